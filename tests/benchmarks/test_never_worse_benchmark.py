"""The cells of "never worse": what each folder has, that finished ones stay, and the claims."""

import json
import pathlib
from typing import Any

import pytest
import written_files
from script_calls import load_script

from taser_jax.data.prepare.detection import detect

never_worse = load_script("never_worse.py")


@pytest.fixture
def kilt_mini(tmp_path) -> pathlib.Path:
    return written_files.kilt_mini(tmp_path / "data" / "kilt_mini", queries=20)


def written(folder: pathlib.Path, data: Any, size: int | None) -> dict[str, set]:
    counts = never_worse.write_cell(data, folder, size=size, passages=24)
    assert detect(folder).passages == (str(folder / "corpus.jsonl"),)
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    ids_by_part = {"passages": {passage["_id"] for passage in corpus}}
    for name in ("train", "test"):
        _, *lines = (folder / "qrels" / f"{name}.tsv").read_text().splitlines()
        ids_by_part[name] = {line.split("\t")[0] for line in lines}
    assert {name: len(ids) for name, ids in ids_by_part.items()} == counts
    assert {"_id": "7", "title": "title 7", "text": 'text "7"'} in corpus
    return ids_by_part


def test_cells_of_a_set_share_passages_and_smaller_draws_are_parts(kilt_mini, tmp_path):
    data = never_worse.read_set(kilt_mini.parent, "fm2", train=99, test=99)
    assert not data.queries["train"].keys() & data.queries["test"].keys()
    assert len(data.queries["train"]) + len(data.queries["test"]) == 20
    few = never_worse.read_set(kilt_mini.parent, "fm2", train=3, test=2)
    assert [len(few.queries[split]) for split in ("train", "test")] == [3, 2]
    assert few.queries["train"].keys() < data.queries["train"].keys()
    small = written(tmp_path / "small", data, 4)
    large = written(tmp_path / "large", data, None)
    assert len(small["train"]) == 4
    assert small["train"] < large["train"]
    assert small["test"] == large["test"]
    # Positives of all queries, and others up to the number.
    assert small["passages"] == large["passages"]
    assert len(small["passages"]) == 24
    assert {f"{n}" for n in range(20)} < small["passages"]


def test_a_finished_cell_is_not_run_again(kilt_mini, tmp_path, monkeypatch, capsys):
    runs: list[int | None] = []

    def run_cell(data: Any, root: pathlib.Path, *, size: int | None, options: Any) -> dict:
        files = {"table.md": "table", "decided.gin": f"TRAIN_STEPS = {size}"}
        written_files.write_all(root / "results", files)
        runs.append(size)
        return {
            "counts": {"train": 4, "test": 5, "passages": 24},
            "recommended": "TASER + BM25",
            "rows": {"BM25": 0.25, never_worse.BASELINE: 0.5},
            "gains": {},
            "seconds": 1.0,
            **{"difference": 0.01, "low": -0.02, "high": 0.04, "p_value": 0.4},
        }

    monkeypatch.setattr(never_worse, "run_cell", run_cell)
    monkeypatch.setattr(never_worse, "SIZES", ("4", "500", "all"))
    data = never_worse.read_set(kilt_mini.parent, "fm2", train=4, test=99)
    monkeypatch.setattr(never_worse, "read_set", lambda *_, **__: data)
    where = [f"--data={kilt_mini.parent}", f"--out={tmp_path}"]
    arguments = [*where, "--sets=fm2", "--sizes=4,500,all"]
    never_worse.main(arguments)
    output = capsys.readouterr().out
    assert "no cell of 500" in output
    assert "no cell of all" in output
    never_worse.main(arguments)
    assert runs == [4]
    assert (tmp_path / "cells" / "fm2-4.gin").read_text() == "TRAIN_STEPS = 4"
    table = (tmp_path / "table.md").read_text()
    assert "| fm2 | 4 | TASER + BM25 | 25.0 | 50.0 | +1.0 [-2.0, +4.0] |" in table
    claims = json.loads((tmp_path / "cells.json").read_text())["claims"]
    assert claims["never below by more than noise"] == {"holds": True, "below": []}
    assert claims["above on average"] == {"holds": True, "mean": 0.01, "cells": 1}


def test_a_loss_beyond_noise_breaks_the_claim():
    cells = {
        "fm2-50": {"difference": -0.02, "low": -0.03, "high": -0.01},
        "fm2-150": {"difference": 0.01, "low": -0.02, "high": 0.04},
    }
    claims = never_worse.summary(cells)["claims"]
    assert claims["never below by more than noise"] == {"holds": False, "below": ["fm2-50"]}
    assert not claims["above on average"]["holds"]


def test_files_of_smart_become_a_folder_that_compare_reads(tmp_path):
    smart_sets = load_script("smart_sets.py")
    documents = '.I 1\n.T\na title\n.W\nsome\n.W\n"words"\n.I 2\n.W\nothers\n.I\n'
    (tmp_path / "cran.all.1400").write_text(documents)
    asked = {"001": "first?", "4": "unjudged?", "7": "unjudged?", "9": "fourth?"}
    queries = "".join(f".I {id}\n.W\n{text}\n" for id, text in asked.items())
    (tmp_path / "cran.qry").write_text(queries)
    (tmp_path / "cranqrel").write_text("1 2 3\n1 1 -1\n4 1 1\n")
    counts = smart_sets.write_set(smart_sets.SETS["cran"], tmp_path, tmp_path / "cran")
    assert counts == {"passages": 2, "test": 1, "train": 1}
    names = ("passages", "cran.test.queries", "cran.test.qrels", "cran.train.queries")
    texts = [(tmp_path / "cran" / f"{name}.tsv").read_text() for name in names]
    assert texts[0] == "id\ttitle\ttext\n1\ta title\tsome 'words'\n2\t\tothers\n"
    # Judgements count the queries, whatever their ids.
    assert texts[1:] == ["4\tfourth?\n", "4\t0\t1\t1\n", "1\tfirst?\n"]
    detected = detect(tmp_path / "cran")
    assert {split: files.qrels for split, files in detected.tasks["cran"].items()} == {
        split: str(tmp_path / "cran" / f"cran.{split}.qrels.tsv") for split in ("test", "train")
    }
