"""The time after SIGTERM: what a step, a validation and a save need of it."""

from __future__ import annotations

import logging

import pytest
from toy_loop import run, steps_saved

from taser_jax.storage.errors import ConfigError
from taser_jax.training import grace, loop

CONFIG = loop.LoopConfig(train_steps=4, checkpoint_period=2, evaluation_period=2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(grace.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("granted", "warns"), [(10.9, True), (11.1, False)])
def test_needed_is_the_longer_of_step_and_validation_and_the_save(clock, caplog, granted, warns):
    watch = grace.GraceWatch(granted)
    with caplog.at_level(logging.WARNING, "taser"):
        for seconds in (3.0, 7.0, 5.0):
            with watch.validating():
                clock[0] += seconds

        def wait():
            clock[0] += 3.0

        with watch.saving(wait, step=2.0):
            clock[0] += 1.0
    # 7 s of validation, longer than the step, and 1 + 3 s of saving.
    found = "needs 11 s (step 2.0 s, validation 7.0 s, save 4.0 s)" in caplog.text
    assert (found, "--grace_seconds" in caplog.text) == (warns, warns)


def test_only_the_first_save_is_waited_for(clock):
    waited = []
    watch = grace.GraceWatch(60.0)
    for _ in range(2):
        with watch.saving(lambda: waited.append(1), step=0.0):
            pass
    with grace.GraceWatch(None).saving(lambda: waited.append(1), step=0.0):
        pass
    assert waited == [1]


def test_training_warns_once_and_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(grace.VARIABLE, "1e-9")
    with caplog.at_level(logging.WARNING, "taser"):
        run(tmp_path, CONFIG, validate=lambda params: {"nll": 1.0})
    assert caplog.text.count("after SIGTERM, training needs") == 1
    assert steps_saved(tmp_path) == [2, 4]


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf", "nan", ""])
def test_a_time_that_is_none(tmp_path, monkeypatch, text):
    monkeypatch.setenv(grace.VARIABLE, text)
    with pytest.raises(ConfigError, match="TASER_GRACE_SECONDS"):
        run(tmp_path, CONFIG)
    assert not steps_saved(tmp_path)
