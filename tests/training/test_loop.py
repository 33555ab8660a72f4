"""The loop over a toy step: periods, restarts, preemption, non-finite losses and the meter."""

import dataclasses
import logging
import signal
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
import toy_loop
from toy_loop import (
    ToyBatches,
    batches_at,
    lines_of,
    machine_gone,
    nan_at,
    run,
    sigint,
    sigterm,
    steps_saved,
    toy_step,
)

from taser_jax.storage.errors import ConfigError, DataError, NonFiniteLossError, Preempted
from taser_jax.training import loop, watch


def test_periods(tmp_path):
    validated = []

    def validate(params):
        validated.append(float(params["weight"]))
        return {"nll": 1.0 / len(validated)}

    config = loop.LoopConfig(train_steps=11, evaluation_period=4, checkpoint_period=3, log_period=5)
    result = run(tmp_path, config, validate=validate)
    weights = [weight_without(steps=steps) for steps in range(12)]
    assert steps_saved(tmp_path) == [3, 4, 6, 8, 9, 11]
    np.testing.assert_allclose(validated, [weights[4], weights[8], weights[11]], rtol=1e-6)
    assert result.validation == {"nll": 1.0 / 3}
    assert float(result.state.params["weight"]) == pytest.approx(weights[11], rel=1e-6)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 8, 9, 10, 11]
    assert [line["step"] for line in lines if "validation/nll" in line] == [4, 8, 11]
    assert all("train/loss" in line for line in lines)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        # The best is the first; two worse ones end it.
        ([0.5, 0.6, 0.7, 0.1, 0.1, 0.1], 3),
        # A better one begins the count again, as does an equal one.
        ([0.5, 0.6, 0.4, 0.4, 0.9, 0.3], 6),
    ],
)
def test_patience_ends_a_training_that_gets_no_better_and_it_stays_so(tmp_path, losses, ends):
    config = loop.LoopConfig(train_steps=6, evaluation_period=1, patience=2)
    validations = iter(losses)
    result = run(tmp_path, config, validate=lambda params: {"nll": next(validations)})
    assert int(result.state.step) == ends
    assert result.validation == {"nll": losses[ends - 1]}
    batches = ToyBatches()
    assert run(tmp_path, config, batches=batches).validation == result.validation
    assert batches.asked == []
    if ends == 3:
        # A larger patience goes on where it ended.
        config = dataclasses.replace(config, patience=3)
        run(tmp_path, config, batches=batches, validate=lambda params: {"nll": next(validations)})
        assert batches.asked == [3, 4, 5]


@pytest.mark.parametrize(("minutes", "expected"), [(4.0, [3, 5, 8, 10, 11]), (0.0, [5, 10, 11])])
def test_checkpoints_by_time_beside_steps(tmp_path, monkeypatch, minutes, expected):
    """A step takes 100 seconds: step 3 ends 300 seconds after the start, step 8 after step 5."""
    batches = ToyBatches()
    clock = types.SimpleNamespace(monotonic=lambda: 100.0 * len(batches.asked))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(watch, "time", clock)
    config = loop.LoopConfig(train_steps=11, checkpoint_period=5, checkpoint_minutes=minutes)
    run(tmp_path, config, batches=batches)
    assert steps_saved(tmp_path) == expected
    # What is measured does not depend on the clock.
    assert [line["step"] for line in lines_of(tmp_path)] == [5, 10, 11]


def test_the_initial_weights_are_validated_first_and_kept_if_nothing_is_better(tmp_path, opened):
    ranks = iter([0.5, 0.2, 0.3])
    config = loop.LoopConfig(train_steps=4, evaluation_period=2, validates_first=True)
    result = run(tmp_path, config, validate=lambda params: {"nll": -next(ranks)})
    assert result.validation == {"nll": -0.3}
    assert steps_saved(tmp_path) == [0, 2, 4]
    # Not again when training is resumed.
    config = dataclasses.replace(config, train_steps=5, evaluation_period=0)
    run(tmp_path, config, validate=lambda params: {"nll": 9.0})
    checkpoints = opened(tmp_path)
    assert (checkpoints.best_step, checkpoints.metrics(0)) == (0, {"nll": -0.5})


@pytest.mark.parametrize("again", [True, False])
def test_what_ended_at_once_leaves_no_initial_weights(tmp_path, opened, monkeypatch, again):
    config = loop.LoopConfig(train_steps=4, evaluation_period=2, validates_first=True)
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path, config, batches=batches_at(0, machine_gone), validate=lambda _: {"nll": 0.1})
    assert steps_saved(tmp_path) == [0]
    other = dataclasses.replace(toy_loop.initial_state(), params={"weight": jnp.float32(7.0)})
    monkeypatch.setattr(toy_loop, "initial_state", lambda: other)
    losses = iter([0.5] * again + [0.6, 0.7])
    config = dataclasses.replace(config, validates_first=again)
    run(tmp_path, config, validate=lambda _: {"nll": next(losses)})
    checkpoints = opened(tmp_path)
    best = checkpoints.best_step
    assert (best, checkpoints.metrics(best)) == ((0, {"nll": 0.5}) if again else (2, {"nll": 0.6}))
    if again:
        assert checkpoints.restore_params({"weight": jnp.float32(0)}) == {"weight": 7.0}


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_stopping_and_resuming_equals_not_stopping(tmp_path, stop):
    config = loop.LoopConfig(train_steps=9, checkpoint_period=2, log_period=1)
    whole = run(tmp_path / "whole", config)
    halfway = tmp_path / "halfway"

    with pytest.raises(RuntimeError, match="gone"):
        run(halfway, config, batches=batches_at(stop, machine_gone))
    batches = ToyBatches()
    again = run(halfway, config, batches=batches)
    assert batches.asked == list(range(stop - stop % 2, 9))
    assert float(again.state.params["weight"]) == float(whole.state.params["weight"])
    losses = [(line["step"], line["train/loss"]) for line in lines_of(halfway)]
    assert losses == [(line["step"], line["train/loss"]) for line in lines_of(tmp_path / "whole")]


def test_a_run_that_no_longer_validates_does_not_save_the_metrics_that_it_found(tmp_path, opened):
    config = loop.LoopConfig(train_steps=4, evaluation_period=2, patience=2)
    losses = iter([0.5, 0.6])
    run(tmp_path, config, validate=lambda _: {"nll": next(losses)})
    run(tmp_path, dataclasses.replace(config, train_steps=9))
    checkpoints = opened(tmp_path)
    assert steps_saved(tmp_path)[-3:] == [6, 8, 9]
    assert [checkpoints.metrics(step) for step in (4, 6, 9)] == [{"nll": 0.6}, {}, {}]
    assert checkpoints.best_step == 2


def test_a_checkpoint_beyond_train_steps_is_refused(tmp_path):
    run(tmp_path, loop.LoopConfig(train_steps=4))
    with pytest.raises(ConfigError, match=r"(?s)step 4.*TRAIN_STEPS=3"):
        run(tmp_path, loop.LoopConfig(train_steps=3))


@pytest.mark.parametrize("validates", [False, True])
def test_sigterm_saves_and_raises_preempted(tmp_path, opened, validates):
    config = loop.LoopConfig(train_steps=8, evaluation_period=3 * validates)
    former = signal.getsignal(signal.SIGTERM)
    batches = batches_at(2, sigterm)
    with pytest.raises(Preempted, match="step 3 of 8"):
        run(tmp_path, config, batches=batches, validate=lambda params: {"nll": 1.0})
    assert batches.closed
    assert signal.getsignal(signal.SIGTERM) is former
    assert steps_saved(tmp_path) == [3]
    assert opened(tmp_path).metrics(3) == ({"nll": 1.0} if validates else {})
    whole = run(tmp_path / "whole", config)
    again = run(tmp_path, config)
    assert float(again.state.params["weight"]) == float(whole.state.params["weight"])


def test_ctrl_c_saves_and_a_later_one_does_not_wait(tmp_path, monkeypatch):
    config = loop.LoopConfig(train_steps=8)
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="saved after step 3 of 8"):
        run(tmp_path, config, batches=batches_at(2, sigint))
    assert signal.getsignal(signal.SIGINT) is former
    assert steps_saved(tmp_path) == [3]

    with pytest.raises(KeyboardInterrupt, match="saved after step 3 of 8"):
        run(tmp_path / "at once", config, batches=batches_at(2, sigint, sigint))
    assert steps_saved(tmp_path / "at once") == [3]

    monkeypatch.setattr(watch, "_BOUNCE_SECONDS", -1)
    with pytest.raises(KeyboardInterrupt, match="without saving; nothing is saved"):
        run(tmp_path / "later", config, batches=batches_at(2, sigint, sigint))
    assert steps_saved(tmp_path / "later") == []

    config = loop.LoopConfig(train_steps=8, checkpoint_period=2)
    with pytest.raises(KeyboardInterrupt, match="without saving; the newest checkpoint: step 2"):
        run(tmp_path / "saved before", config, batches=batches_at(2, sigint, sigint))


def weight_without(*skipped: int, steps: int) -> float:
    weight = 1.0
    for step in sorted(set(range(steps)) - set(skipped)):
        weight = weight * 1.25 + step
    return weight


@pytest.mark.parametrize("log_period", [1, 100])
def test_skipped_steps_are_logged_and_training_continues(tmp_path, log_period, caplog):
    """Never three in a row, but four in all, the last one at the end."""
    config = loop.LoopConfig(train_steps=9, log_period=log_period, max_skipped_steps=3)
    with caplog.at_level(logging.WARNING, logger="taser"):
        result = run(tmp_path, config, train_step=nan_at(2, 3, 5, 8))
    weight = weight_without(2, 3, 5, 8, steps=9)
    assert float(result.state.params["weight"]) == pytest.approx(weight, rel=1e-6)
    assert steps_saved(tmp_path) == [9]
    told = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert [line.partition(": step")[0] for line in told] == [
        "step skipped, 1 in a row and 1 in all",
        "step skipped, 2 in a row and 2 in all",
        "step skipped, 1 in a row and 3 in all",
        "step skipped, 1 in a row and 4 in all",
    ]
    assert "step 5, task 'toy', query 'q5': loss nan, gradient norm nan" in told[2]


def test_too_many_skipped_steps_in_a_row_stop_training_also_across_a_restart(tmp_path):
    config = loop.LoopConfig(train_steps=9, checkpoint_period=2, max_skipped_steps=4)
    bad = nan_at(2, 3, 4, 5)

    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path, config, batches=batches_at(4, machine_gone), train_step=bad)
    batches = ToyBatches()
    with pytest.raises(NonFiniteLossError, match=r"step 5, .*'q5'.*4 steps in a row"):
        run(tmp_path, config, batches=batches, train_step=bad)
    assert batches.asked[0] == 4
    assert steps_saved(tmp_path) == [2, 4]


def test_a_median_of_zero_names_its_task_and_the_way_out(tmp_path):
    """Finite numbers; fever's median is at fault, wow has no gradient at all."""
    reported = {"median/nq": 0.5, "median/fever": 0.0, "median/wow": 0.0}
    reported |= {"grad_norm/nq": 1.0, "grad_norm/fever": 1.0, "grad_norm/wow": 0.0}
    bad = nan_at(2, 3, **reported, loss=1.0, grad_norm=1.4)
    config = loop.LoopConfig(train_steps=8, max_skipped_steps=2)
    with pytest.raises(DataError, match=r"(?s)step 3.*sensitivity to fever is 0; 2.*'nonzero'"):
        run(tmp_path, config, train_step=bad)


def test_rates_leave_out_compilation_and_validation(tmp_path):
    first_call = True

    def slow_step(state, batch):
        nonlocal first_call
        time.sleep(0.5 if first_call else 0.01)
        first_call = False
        return toy_step(state, batch)

    def validate(params):
        time.sleep(0.4)
        return {"nll": 1.0}

    config = loop.LoopConfig(train_steps=21, evaluation_period=7, log_period=7)
    result = run(tmp_path, config, train_step=slow_step, validate=validate)
    # 10 ms a step is at most 100 a second; counted in, the pauses alone would make it below 13.
    assert 13 < result.steps_per_second <= 100
    for line in lines_of(tmp_path):
        rate = line["train/steps_per_second"]
        assert line["train/tokens_per_second"] == pytest.approx(10 * rate)
        assert line["train/padding"] == pytest.approx(1 - 10 / 40)
        assert line["train/model_flops_utilisation"] == pytest.approx(100 * rate / 1e6)
