"""`taser memory report` on the records that two runs left."""

from __future__ import annotations

import csv
import json

import pytest

from taser_jax.storage.errors import DataError
from taser_jax.systems.moma.memory_report import memory_report


def write_stage(path, task, **shares):
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"task": task, "attention": shares, "queries_with_gold": 0.5}
    line["documents"] = dict.fromkeys(shares, 1 / len(shares))
    path.write_text(json.dumps({"outputs": {"attention": [line]}}))


def test_episodes_and_targets_are_drawn_in_their_order(tmp_path):
    run = tmp_path / "moma"
    for episode, share in ((10, 0.9), (2, 0.6)):
        write_stage(run / f"stages/episode-{episode}-distil.json", "qa", wiki=share, mesh=1 - share)
    write_stage(run / "targets/scifact/stages/x-attention.json", "scifact", wiki=0.3, mesh=0.7)
    found = memory_report(pipeline_dirs={"MoMA": str(run)}, output_dir=str(tmp_path / "report"))
    assert [(one.stage, one.memory, one.attention) for one in found] == [
        ("episode-2", "wiki", 0.6),
        ("episode-2", "mesh", 0.4),
        ("episode-10", "wiki", 0.9),
        ("episode-10", "mesh", pytest.approx(0.1)),
        ("scifact", "wiki", 0.3),
        ("scifact", "mesh", 0.7),
    ]
    with open(tmp_path / "report/memories.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert lines[4]["stage"] == "scifact"
    assert float(lines[4]["documents"]) == 0.5
    for name in ("episodes", "targets"):
        assert (tmp_path / f"report/{name}.png").stat().st_size > 1000


def test_a_run_without_episodes_is_named(tmp_path):
    with pytest.raises(DataError, match="no episode has scored its documents"):
        memory_report(pipeline_dirs={"MoMA": str(tmp_path)}, output_dir=str(tmp_path / "report"))
