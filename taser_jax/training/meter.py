"""Rates of a training: steps, tokens and FLOPs per second, and the share of padding."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step costs, to turn its time into rates.

    Attributes:
        flops: batches -> matrix-product FLOPs of a step's forward and backward pass.
        positions: batches -> tokens of a step, padding included; None if batches hold vectors. If
            it is given, the step reports the tokens without padding as the metric `tokens`.
        peak_flops: peak FLOP/s of all devices together; None where the chip is unknown.
    """

    flops: Callable[[Any], float]
    positions: Callable[[Any], int] | None = None
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

    def tick(self, batches: Any, metrics: Mapping[str, jax.Array]) -> None:
        """Counts one dispatched step; the first, which compiles, only starts the clock."""
        if self._started is None:
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
        rates = {
            "steps_per_second": rate,
            "model_flops_per_second": flops,
        }
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
