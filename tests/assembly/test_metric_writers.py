"""metrics.jsonl is exact across restarts."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
from etils import epath

from taser_jax.assembly.run_record import jsonl_writer, make_writers


def write(path, steps, *, resume_step=0, value=1.0):
    write_line = jsonl_writer(path, resume_step=resume_step)
    for step in steps:
        write_line(step, {"train/loss": value})


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines]


@pytest.mark.parametrize("place", ["", "gs://bucket"])
def test_lines_after_the_checkpoint_are_written_anew(tmp_path, bucket, place):
    path = epath.Path(f"{place or tmp_path}/model/metrics.jsonl")
    write(path, [1, 2, 3, 4])
    write(path, [3, 4, 5], resume_step=2, value=2.0)
    assert read(path) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    # A training from the start forgets what was there.
    write(path, [1], value=3.0)
    assert read(path) == [(1, 3.0)]


@pytest.mark.parametrize("rest", ['{"step": 3, "tr', '{"step"', "3", "{}", "\x00\x00", "null\n"])
def test_half_a_line_is_dropped(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write(rest)
    write(path, [3], resume_step=2, value=2.0)
    assert read(path) == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_kill_while_it_is_shortened_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        jsonl_writer(path, resume_step=2)
    assert read(path) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_only_the_first_process_writes(tmp_path):
    assert make_writers(tmp_path, resume_step=0, is_first_process=False) == ()
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_there_is_jsonl_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer", None)
    with caplog.at_level("INFO", logger="taser"):
        (writer,) = make_writers(tmp_path, resume_step=0, is_first_process=True)
    writer(1, {})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert "tensorboard is not installed" in caplog.text


def test_tensorboard_gets_the_same_scalars(tmp_path):
    writers = make_writers(tmp_path, resume_step=0, is_first_process=True)
    assert len(writers) == 2
    for writer in writers:
        writer(3, {"train/loss": 0.5})
    assert read(tmp_path / "metrics.jsonl") == [(3, 0.5)]
    # TensorBoard's own reader.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 0.5)]


def test_tensorflow_is_not_imported_for_tensorboard(tmp_path):
    program = (
        "import sys; from taser_jax.assembly.run_record import make_writers; "
        f"writers = make_writers({str(tmp_path)!r}, resume_step=0, is_first_process=True); "
        "writers[1](1, dict(loss=1.0)); "
        "sys.exit('tensorflow' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
