"""A loop whose parameter is a number that every step moves."""

import dataclasses
import functools
import json
import os
import signal
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import tiny_batch

from taser_jax.assembly.run_record import jsonl_writer
from taser_jax.models.batch import Batch, Tokens
from taser_jax.training import loop
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints, Selection
from taser_jax.training.state import SkippedSteps, TrainState
from taser_jax.training.watch import StepCost

ABOUT = {"data": "abc"}
COST = StepCost(lambda batches: 100.0, lambda batches: 40, peak_flops=1e6)


def make_batch(step: int) -> Batch:
    tokens = Tokens(ids=np.full((1, 1), step, np.int32), mask=np.ones((1, 1), bool))
    return dataclasses.replace(tiny_batch(1, negatives=0), queries=tokens)


class ToyBatches:
    """Batches that hold their step; remembers which were asked for and whether it was closed."""

    def __init__(self, on_step=None):
        self.asked: list[int] = []
        self.closed = False
        self._on_step = on_step or (lambda step: None)

    def iterate(self, start_step: int, stop_step: int):
        try:
            for step in range(start_step, stop_step):
                self.asked.append(step)
                self._on_step(step)
                yield step, {"toy": make_batch(step)}
        finally:
            self.closed = True

    def describe(self, step: int) -> str:
        return f"task 'toy', query 'q{step}'"


@jax.jit
def toy_step(state: TrainState, batches: dict[str, Batch]):
    """Order matters: the weight is a polynomial in the steps' numbers."""
    number = batches["toy"].queries.ids[0, 0].astype(jnp.float32)
    weight = state.params["weight"] * 1.25 + number
    skipped = SkippedSteps(jnp.int32(0), state.skipped.total)
    new = TrainState(state.step + 1, {"weight": weight}, state.opt_state, skipped)
    metrics = {"loss": weight, "grad_norm": weight, "skipped_in_a_row": jnp.float32(0)}
    return new, metrics | {"skipped_total": skipped.total, "tokens": jnp.float32(10.0)}


def batches_at(step: int, *actions: Callable[[], None]) -> ToyBatches:
    """Batches with something that happens while a step's is asked for."""

    def act(asked: int) -> None:
        if asked == step:
            for action in actions:
                action()

    return ToyBatches(act)


def machine_gone() -> None:
    raise RuntimeError("the machine is gone")


sigterm = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
sigint = functools.partial(os.kill, os.getpid(), signal.SIGINT)


def nan_at(*bad_steps: int, **reported: float):
    """As training.step: a step that is not finite leaves parameters as they were."""

    def step(state: TrainState, batches: dict[str, Batch]):
        if int(batches["toy"].queries.ids[0, 0]) not in bad_steps:
            return toy_step(state, batches)
        skipped = SkippedSteps(*(count + 1 for count in state.skipped))
        nan = jnp.float32(np.nan)
        metrics = {"loss": nan, "grad_norm": nan, "tokens": jnp.float32(10.0)}
        metrics |= {name: jnp.float32(value) for name, value in reported.items()}
        metrics |= {"skipped_in_a_row": skipped.in_a_row, "skipped_total": skipped.total}
        return dataclasses.replace(state, step=state.step + 1, skipped=skipped), metrics

    return step


def initial_state() -> TrainState:
    return TrainState(step=jnp.int32(0), params={"weight": jnp.float32(1.0)}, opt_state=())


def run(directory, config, *, batches=None, train_step=toy_step, validate=None):
    checkpoints = Checkpoints(directory, CheckpointConfig(keep_latest=20, selection=Selection.NLL))
    lines = jsonl_writer(directory / "metrics.jsonl", resume_step=checkpoints.latest_step or 0)
    try:
        return loop.train(
            initial_state(),
            train_step=train_step,
            batches=batches or ToyBatches(),
            checkpoints=checkpoints,
            config=config,
            about=ABOUT,
            cost=COST,
            validate=validate,
            writers=[lines],
        )
    finally:
        checkpoints.close()


def steps_saved(directory) -> list[int]:
    names = [path.name for path in directory.iterdir() if path.name.startswith("checkpoint_")]
    return sorted(int(name.removeprefix("checkpoint_")) for name in names)


def lines_of(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
