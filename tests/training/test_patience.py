"""Patience: training ends once validation no longer improves."""

from __future__ import annotations

import pytest
from toy_loop import (
    ABOUT,
    COST,
    ToyBatches,
    initial_state,
    make_batch,
    toy_step,
)

from taser_jax.storage.errors import ConfigError
from taser_jax.training import loop
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints, Selection
from taser_jax.training.state import TrainState


def judged(*values: float):
    """A validation whose MRR after step N is values[N - 1]."""
    # The weight tells the step: it grows with each.
    weights = [float(state_after(step).params["weight"]) for step in range(1, len(values) + 1)]
    return lambda params: {"mrr": values[weights.index(float(params["weight"]))]}


def state_after(steps: int) -> TrainState:
    state = initial_state()
    for step in range(steps):
        state, _ = toy_step(state, {"toy": make_batch(step)})
    return state


def train_patiently(tmp_path, values, *, patience=2, train_steps=6):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(selection=Selection.MRR))
    batches = ToyBatches()
    result = loop.train(
        initial_state(),
        train_step=toy_step,
        batches=batches,
        checkpoints=checkpoints,
        config=loop.LoopConfig(train_steps=train_steps, evaluation_period=1, patience=patience),
        about=ABOUT,
        cost=COST,
        validate=judged(*values),
    )
    checkpoints.close()
    return result, batches


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        # The best is the first; two worse ones end it.
        ([0.5, 0.4, 0.3, 0.9, 0.9, 0.9], 3),
        # A better one begins the count again, as does an equal one.
        ([0.5, 0.4, 0.6, 0.6, 0.1, 0.7], 6),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 6),
    ],
)
def test_patience_ends_a_training_that_does_not_improve(tmp_path, caplog, values, ends):
    with caplog.at_level("INFO", logger="taser"):
        result, _ = train_patiently(tmp_path, values)
    assert int(result.state.step) == ends
    assert result.validation == {"mrr": values[ends - 1]}
    told = "training: ended after step 3 of 6, the best being step 1 (LoopConfig.patience)"
    assert (told in caplog.text) == (ends == 3)


def test_a_training_that_patience_ended_stays_so(tmp_path):
    values = [0.5, 0.4, 0.3, 0.9, 0.9, 0.9]
    train_patiently(tmp_path, values)
    again, batches = train_patiently(tmp_path, values)
    assert batches.asked == []
    assert again.validation == {"mrr": 0.3}
    # A larger patience goes on where it ended.
    further, batches = train_patiently(tmp_path, values, patience=3)
    assert batches.asked == [3, 4, 5]
    assert int(further.state.step) == 6


@pytest.mark.parametrize(("patience", "period"), [(-1, 1), (1, 0)])
def test_patience_needs_validations(patience, period):
    with pytest.raises(ConfigError, match="patience"):
        loop.LoopConfig(train_steps=9, evaluation_period=period, patience=patience)
