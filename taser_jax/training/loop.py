"""The training loop, top to bottom: restore, step, validate, save, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax

from taser_jax.storage import progress
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import Checked, Natural, NaturalNumber, Positive
from taser_jax.training import watch
from taser_jax.training.checkpoints import Checkpoints
from taser_jax.training.state import Params, TrainState

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)
Step = Callable[[TrainState, BatchT], tuple[TrainState, dict[str, jax.Array]]]
"""(state, batch of a step from `Batches`) -> (state, metrics)."""


MetricWriter = Callable[[int, Mapping[str, float]], None]
"""Records scalars of one step, durably."""


@runtime_checkable
class Batches(Protocol[BatchT_co]):
    """A source of batches; the examples of a step depend on nothing but its number."""

    def iterate(self, start_step: int, stop_step: int) -> Iterator[tuple[int, BatchT_co]]:
        """Batches on the devices, for steps start_step .. stop_step - 1."""

    def describe(self, step: int) -> str:
        """Task and query rows of a step, for error messages."""


@dataclasses.dataclass(frozen=True)
class LoopConfig(Checked):
    """Training length; validation, checkpoint and logging periods; limits that end a run early.

    Attributes:
        train_steps: optimiser steps of this run, over all restarts.
        evaluation_period: steps between validations; 0 validates at the end only.
        checkpoint_period: steps between checkpoints; 0 saves with each validation only.
        checkpoint_minutes: longest time between checkpoints, whatever the periods: what a run that
            is killed loses, with `log_period` steps more on several hosts. 0 saves by steps alone.
        log_period: steps between lines in the metrics files.
        max_skipped_steps: training stops with an error after this many skipped steps in a row; set
            1 to stop at the first. A run with fewer steps stops if it skips all of them.
        patience: training ends after this many validations in a row that are worse than the best
            by `CheckpointConfig.selection`; set it where many queries validate. 0 trains all steps.
        validates_first: whether the initial weights are validated and saved, too: they are kept if
            no later ones are better.
    """

    train_steps: Positive
    evaluation_period: Natural = 0
    checkpoint_period: Natural = 0
    checkpoint_minutes: NaturalNumber = 4.0
    log_period: Positive = 20
    max_skipped_steps: Positive = 10
    patience: Natural = 0
    validates_first: bool = False

    def validates_after(self, step: int) -> bool:
        """Whether validation runs once `step` steps are done."""
        return step == self.train_steps or _divides(self.evaluation_period, step)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is saved once `step` steps are done."""
        return self.validates_after(step) or _divides(self.checkpoint_period, step)

    def has_ended(self, step: int, best_step: int) -> bool:
        """Whether patience has run out after `step`."""
        return 0 < self.patience * self.evaluation_period <= step - best_step

    def check_done(self, step: int) -> None:
        """Refuses a training length below the number of steps that are done.

        Raises:
            ConfigError: naming both numbers.
        """
        if step > self.train_steps:
            problem = f"the newest checkpoint is of step {step} > TRAIN_STEPS={self.train_steps}"
            fix = "raise TRAIN_STEPS, or train into a new MODEL_DIR"
            raise ConfigError(problem, where="TRAIN_STEPS", fix=fix)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Where training ended.

    Attributes:
        state: the final training state.
        validation: metrics of the last validation, empty if there was none.
        steps_per_second: mean over this process's steps, compilation excluded.
    """

    state: TrainState
    validation: dict[str, float]
    steps_per_second: float


def train(
    state: TrainState,
    *,
    train_step: Step[BatchT],
    batches: Batches[BatchT],
    checkpoints: Checkpoints,
    config: LoopConfig,
    about: Mapping[str, object],
    cost: watch.StepCost,
    validate: Callable[[Params], dict[str, float]] | None = None,
    writers: Sequence[MetricWriter] = (),
) -> TrainResult:
    """Trains from `state`, or from the newest checkpoint, up to `config.train_steps`.

    If interrupted, rerunning it gives the parameters of an uninterrupted run: batches and random
    keys depend on the step alone, and a checkpoint is either complete or absent.

    Args:
        state: the initial state, at any step; its buffers are donated.
        train_step: jitted, (state, batch) -> (state, metrics); see `training.step`.
        batches: batches by step.
        checkpoints: where states are saved and found.
        config: lengths and periods.
        about: facts a resumed run must share (data fingerprint, seed, model).
        cost: turns step times into FLOPs per second and their utilisation.
        validate: parameters -> metrics; called between steps.
        writers: where scalars go.

    Returns:
        The final state with the last validation metrics.

    Raises:
        Preempted: SIGTERM arrived; everything done so far is saved.
        KeyboardInterrupt: Ctrl-C; everything done so far is saved. One more than a second later
            stops without, and names the newest checkpoint.
        NonFiniteLossError: `max_skipped_steps` in a row had a loss or gradient that is not finite;
            no parameter has seen it.
        DataError: the same number of steps in a row had a task with a median sensitivity of 0.
    """
    step = _first_step(state, checkpoints, config)
    validation: dict[str, float] = {}
    if checkpoints.latest_step:
        state = checkpoints.restore(jax.tree.map(_abstract, state), step=step, about=about)
        # Rerunning a finished training reports the metrics of its last checkpoint.
        validation = checkpoints.metrics(step)
    elif not step:
        judge = validate if config.validates_first else None
        if checkpoints.latest_step == 0 and (judge is not None or checkpoints.metrics(0)):
            # Left by a run that ended before its next save, perhaps with other weights or data.
            checkpoints.delete(0)
        if judge is not None:
            initial = judge(state.params)
            logger.info("%s", _validation_line(0, initial))
            checkpoints.save(state, step=0, about=about, metrics=initial)
            checkpoints.wait()
    best = _best(checkpoints)
    last_step = step if config.has_ended(step, best[1]) else config.train_steps
    meter = watch.Meter(cost)
    seconds = 60 * config.checkpoint_minutes or math.inf
    saved_at = time.monotonic()
    skips = watch.SkipWatch(
        allowed=min(config.max_skipped_steps, config.train_steps), describe=batches.describe
    )
    iterator = batches.iterate(step, last_step)
    with (
        contextlib.ExitStack() as at_end,
        watch.catch_signals() as stop,
        _finish_saving(checkpoints),
        progress.bar("train", total=config.train_steps, initial=step, unit="step") as bar,
    ):
        if hasattr(iterator, "close"):
            at_end.callback(iterator.close)
        for index, batch in iterator:
            state, metrics = train_step(state, batch)
            # The previous step is checked while this one computes. A skipped step changes neither
            # parameters nor optimiser, so detecting it one step late loses nothing.
            skips.check()
            skips.pending = (index, metrics)
            step = index + 1
            meter.tick(batch, metrics)
            bar.update(1)
            # Without, the metrics at hand are those of a checkpoint that was resumed from.
            validates = validate is not None and config.validates_after(step)
            logs = config.saves_after(step) or _divides(config.log_period, step)
            saves = config.saves_after(step) or watch.agree_to_save(saved_at + seconds, logs=logs)
            if logs:
                skips.check()
                scalars = {name: float(value) for name, value in metrics.items()} | meter.read()
                bar.set_postfix(loss=f"{scalars['loss']:.3f}", refresh=False)
                lines = {f"train/{name}": value for name, value in scalars.items()}
                if validates and validate is not None:
                    with meter.pause():
                        validation = validate(state.params)
                    lines |= {f"validation/{name}": value for name, value in validation.items()}
                    if jax.process_index() == 0:
                        bar.write(_validation_line(step, validation))
                for write in writers:
                    write(step, lines)
            if saves:
                skips.check()
                with meter.pause():
                    judged = validation if validates else None
                    checkpoints.save(state, step=step, about=about, metrics=judged)
                saved_at = time.monotonic()
            if validates:
                best = max(best, (checkpoints.ranking(validation), step))
                if config.has_ended(step, best[1]):
                    logger.info("training: no validation is better than after step %d", best[1])
                    break
            # After validation, so that no checkpoint lacks the metrics an undisturbed run gives it.
            if watch.agree_to_stop(stop, step):
                skips.check()
                began = time.monotonic()
                checkpoints.save(state, step=step, about=about)
                checkpoints.wait()
                # A preempted job is granted a limited time, which this should stay well below.
                took = f"in {time.monotonic() - began:.0f} s"
                raise stop.error(f"saved after step {step} of {config.train_steps} {took}")
    return TrainResult(state=state, validation=validation, steps_per_second=meter.mean_rate)


def _first_step(state: TrainState, checkpoints: Checkpoints, config: LoopConfig) -> int:
    """The step after which training begins: the newest checkpoint's, or the state's own."""
    saved = checkpoints.latest_step
    step = int(state.step) if saved is None else saved
    config.check_done(step)
    if step:
        logger.info("training: resuming after step %d of %d", step, config.train_steps)
    else:
        logger.info("training: no checkpoint yet, beginning at step 0 of %d", config.train_steps)
    return step


def _best(checkpoints: Checkpoints) -> tuple[float, int]:
    """Ranking and step of the best checkpoint so far; any validation beats none."""
    step = checkpoints.best_step
    if step is None:
        return -math.inf, 0
    return checkpoints.ranking(checkpoints.metrics(step)), step


@contextlib.contextmanager
def _finish_saving(checkpoints: Checkpoints) -> Iterator[None]:
    """Waits for the current save, even if training stops with an error."""
    try:
        yield
    except BaseException as error:
        # The error that stopped the training is the one to report.
        with contextlib.suppress(Exception):
            checkpoints.wait()
        if isinstance(error, KeyboardInterrupt) and not error.args:
            newest = checkpoints.latest_step
            left = "nothing is saved" if newest is None else f"the newest checkpoint: step {newest}"
            raise KeyboardInterrupt(f"stopped without saving; {left}") from None
        raise
    checkpoints.wait()


def _divides(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _validation_line(step: int, validation: Mapping[str, float]) -> str:
    values = ", ".join(f"{name} {value:.4f}" for name, value in validation.items())
    return f"validation after step {step}: {values}"
