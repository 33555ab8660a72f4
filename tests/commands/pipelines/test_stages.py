"""Stages run once, are recorded whole or not at all, and refuse other settings."""

from __future__ import annotations

import json
import os

import pytest

from taser_jax.commands.pipelines.stages import Stages
from taser_jax.storage.errors import ConfigError


class Counter:
    def __init__(self, outputs=None):
        self.calls = 0
        self.outputs = outputs

    def __call__(self):
        self.calls += 1
        return self.outputs


def test_a_finished_stage_is_not_run_again(tmp_path):
    work = Counter({"path": "model", "values": [1, 2]})
    first = Stages(tmp_path).run("train", work, inputs={"steps": 3, "rate": 0.1})
    again = Stages(tmp_path).run("train", work, inputs={"rate": 0.1, "steps": 3})
    assert work.calls == 1
    assert first == again == {"path": "model", "values": [1, 2]}
    record = Stages(tmp_path).record("train")
    assert record.inputs == {"steps": 3, "rate": 0.1}
    assert record.seconds >= 0


def test_tuples_and_lists_are_the_same_input(tmp_path):
    work = Counter()
    Stages(tmp_path).run("a", work, inputs={"tasks": ("x", "y")})
    assert Stages(tmp_path).run("a", work, inputs={"tasks": ["x", "y"]}) == {}
    assert work.calls == 1


@pytest.mark.parametrize(
    ("inputs", "named"),
    [({"steps": 4}, "steps was 3 when this stage ran, now 4"), ({}, "steps"), ({"x": 1}, "steps")],
)
def test_other_inputs_are_named(tmp_path, inputs, named):
    stages = Stages(tmp_path)
    stages.run("train", Counter(), inputs={"steps": 3})
    work = Counter()
    with pytest.raises(ConfigError, match=named) as error:
        stages.run("train", work, inputs=inputs)
    assert work.calls == 0
    assert "train.json" in str(error.value)


def test_an_input_that_was_not_there_before_is_another_input(tmp_path):
    stages = Stages(tmp_path)
    stages.run("train", Counter(), inputs={})
    with pytest.raises(ConfigError, match="seed"):
        stages.run("train", Counter(), inputs={"seed": 0})


def test_a_stage_that_failed_runs_again(tmp_path):
    def fail():
        raise RuntimeError("killed")

    stages = Stages(tmp_path)
    with pytest.raises(RuntimeError):
        stages.run("train", fail, inputs={})
    assert stages.finished() == []
    work = Counter()
    stages.run("train", work, inputs={})
    assert work.calls == 1
    assert stages.finished() == ["train"]


def test_a_record_killed_while_written_is_no_record(tmp_path, monkeypatch):
    def killed(source, target):
        raise KeyboardInterrupt

    stages = Stages(tmp_path)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        stages.run("train", Counter(), inputs={})
    monkeypatch.undo()
    assert stages.finished() == []
    stages.run("train", Counter({"a": 1}), inputs={})
    assert json.loads((tmp_path / "stages" / "train.json").read_text())["outputs"] == {"a": 1}


def test_stages_are_listed_in_their_order(tmp_path):
    stages = Stages(tmp_path)
    for place, name in enumerate(("prepare", "train", "encode")):
        stages.run(name, Counter(), inputs={})
        path = tmp_path / "stages" / f"{name}.json"
        os.utime(path, ns=(place, place))
    assert stages.finished() == ["prepare", "train", "encode"]


def test_a_record_of_another_format_is_refused(tmp_path):
    stages = Stages(tmp_path)
    stages.run("train", Counter(), inputs={})
    path = tmp_path / "stages" / "train.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 9'))
    (path.parent / "checksums.txt").unlink()
    with pytest.raises(ConfigError, match="format version 9"):
        stages.run("train", Counter(), inputs={})
