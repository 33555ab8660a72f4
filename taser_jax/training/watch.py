"""What the training loop watches: rates, skipped steps, and signals that ask it to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from taser_jax.optim.tsage import MEDIAN
from taser_jax.storage.errors import DataError, NonFiniteLossError, Preempted, TaserError
from taser_jax.storage.progress import logger

# Ctrl-C again within this time means the same as once.
_BOUNCE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step costs, to turn its time into rates.

    Attributes:
        flops: batches -> matrix-product FLOPs of a step's forward and backward pass.
        positions: batches -> tokens of a step, padding included; None if batches hold vectors. If
            it is given, the step reports the tokens without padding as the metric `tokens`.
        peak_flops: peak FLOP/s of all devices together; None where the chip is unknown.
    """

    flops: Callable[[PyTree], float]
    positions: Callable[[PyTree], int] | None = None
    peak_flops: float | None = None


class Meter:
    """Steps, tokens and FLOPs per second, without compilation and validation; share of padding."""

    def __init__(self, cost: StepCost):
        self._cost = cost
        self._forget()
        self._started: float | None = None
        self._paused = 0.0
        self._total_steps = 0
        self._total_seconds = 0.0

    def tick(self, batches: PyTree, metrics: Mapping[str, jax.Array]) -> None:
        """Counts one dispatched step; the first, which compiles, starts the clock when it ends."""
        if self._started is None:
            jax.block_until_ready(metrics)
            self._started = time.monotonic()
            return
        self._steps_since += 1
        if self._cost.positions is not None:
            self._tokens.append(metrics["tokens"])
            self._positions += self._cost.positions(batches)
        self._flops += self._cost.flops(batches)

    def _forget(self) -> None:
        self._steps_since, self._positions, self._flops = 0, 0, 0.0
        self._tokens: list[jax.Array] = []

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time spent inside the `with`."""
        start = time.monotonic()
        yield
        self._paused += time.monotonic() - start

    def read(self) -> dict[str, float]:
        """Rates since the last reading; empty before the second step."""
        now = time.monotonic()
        if self._started is None or self._steps_since == 0:
            return {}
        seconds = max(now - self._started - self._paused, 1e-9)
        rate = self._steps_since / seconds
        self._total_steps += self._steps_since
        self._total_seconds += seconds
        tokens, flops = sum(map(float, self._tokens)), self._flops / seconds
        rates = {"steps_per_second": rate, "model_flops_per_second": flops}
        if self._positions:
            rates["tokens_per_second"] = tokens / seconds
            rates["padding"] = 1.0 - tokens / self._positions
        if self._cost.peak_flops:
            rates["model_flops_utilisation"] = flops / self._cost.peak_flops
        self._started, self._paused = now, 0.0
        self._forget()
        return rates

    @property
    def mean_rate(self) -> float:
        """Steps per second over all readings; 0 if nothing was timed."""
        return self._total_steps / self._total_seconds if self._total_seconds else 0.0


class SkipWatch:
    """Reports skipped steps, and stops training where there are too many in a row.

    Only steps in a row count: an occasional batch that overflows does no harm in a run of any
    length, whereas one skipped step after another means that parameters or settings are at fault.
    Skipped steps do not change the parameters, so continuing would only repeat the error.

    Args:
        allowed: the number of skipped steps in a row that is an error.
        describe: step -> its task and queries, for messages.

    Attributes:
        pending: number and metrics of the step to be checked next.
    """

    def __init__(self, *, allowed: int, describe: Callable[[int], str]) -> None:
        self._allowed, self._describe = allowed, describe
        self.pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def check(self) -> None:
        """Warns if the pending step was skipped.

        Raises:
            NonFiniteLossError: it was one too many, and its loss or gradient is not finite.
            DataError: it was one too many, and a median is 0.
        """
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        in_a_row = int(metrics["skipped_in_a_row"])
        if not in_a_row:
            return
        where = f"step {step}, {self._describe(step)}"
        error = _skip_error(metrics, where=where)
        if in_a_row >= self._allowed:
            raise error
        logger.warning(
            "step skipped, %d in a row and %d in all: %s: %s",
            in_a_row,
            int(metrics["skipped_total"]),
            error.where,
            error.problem,
        )


def _skip_error(metrics: Mapping[str, jax.Array], *, where: str) -> TaserError:
    """Why a step was skipped."""
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    also = ""
    if (in_a_row := int(metrics["skipped_in_a_row"])) > 1:
        also = f"; {in_a_row} steps in a row were skipped"
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return NonFiniteLossError(
            f"loss {loss}, gradient norm {norm}{also}",
            where=where,
            fix="no parameter has seen them, and the newest checkpoint is good; lower the learning "
            "rate, clip harder, use float32 or bfloat16 activations, look at the queries named "
            "above, or see whether `taser verify` still accepts the token store",
        )
    medians = {
        name.removeprefix(MEDIAN): float(value)
        for name, value in metrics.items()
        if name.startswith(MEDIAN)
    }
    tasks = [t for t, median in medians.items() if not median and metrics[f"grad_norm/{t}"] > 0]
    return DataError(
        f"the median sensitivity to {', '.join(tasks)} is 0{also}",
        where=where,
        expected="gradients that are not 0 for more than half of the trained parameters: T-SAGE "
        "divides by the median",
        fix="set median_over = 'nonzero' (of a small model most parameters are vocabulary rows "
        "that no batch touches), or raise TaskBatchingConfig.total",
    )


class Stop:
    """A signal that asks training to save and stop.

    Attributes:
        is_asked: whether a signal has arrived.
        error: raised once everything is saved.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.error: type[BaseException] = Preempted
        self._interrupted_at: float | None = None

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: training saves and stops; rerunning the command resumes it."""
        self.is_asked = True

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """SIGINT, Ctrl-C: the first stops after the step and a save, a later one without it.

        Two within a second are one: a shell and its launcher may both pass on the same Ctrl-C.
        """
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self.error = KeyboardInterrupt
            self.is_asked = True
            logger.info("training: saving after this step; press Ctrl-C again to stop without it")
        elif now > self._interrupted_at + _BOUNCE_SECONDS:
            # A third one would interrupt the save that the second lets end.
            self._interrupted_at = math.inf
            raise KeyboardInterrupt


def agree_to_save(due: float, *, logs: bool) -> bool:
    """Whether a checkpoint is due by the clock: host 0's, where a line is logged, on several hosts.

    Args:
        due: when, by `time.monotonic`, which differs from host to host.
        logs: whether this step's metrics are read, so that hosts wait for each other anyway.
    """
    is_due = time.monotonic() >= due
    if jax.process_count() == 1:
        return is_due
    return logs and bool(multihost_utils.broadcast_one_to_all(np.array(is_due)))


def agree_to_stop(stop: Stop, step: int) -> bool:
    """True on every host once any of them received SIGTERM."""
    if jax.process_count() == 1:
        return stop.is_asked
    return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catches SIGTERM and SIGINT while the loop runs; only the main thread receives signals.

    On several hosts JAX itself catches SIGTERM, and SIGINT stops at once.
    """
    stop = Stop()
    one_host = jax.process_count() == 1
    if not one_host or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, stop.terminate),
        signal.SIGINT: signal.signal(signal.SIGINT, stop.interrupt),
    }
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
