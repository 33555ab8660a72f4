"""`taser pipeline taser`: what it leaves behind, and that it goes on wherever it was killed."""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_world import ROWS, TASKS, SmallWorld, figures, never, refused, succeed
from stage_calls import check_every_argument, noted

from taser_jax.cli import main as cli
from taser_jax.commands.pipelines import retrieval_stages, taser
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.train import TrainSummary
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import read_per_query
from taser_jax.retrieval.runs import read_trec_run

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
# Command -> the module that calls it.
WORK = dict.fromkeys(("train", "hybrid"), taser) | dict.fromkeys(
    ("bm25", "mine", "encode", "index", "search", "evaluate"), retrieval_stages
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the pipeline may catch it."""


def test_the_table_has_every_row_and_task(compared: pathlib.Path):
    lines = figures(compared)
    assert [(line["system"], line["task"]) for line in lines] == [
        (system, task) for system in ROWS for task in (*sorted(TASKS), "average")
    ]
    by_row = {line["system"]: line for line in lines}
    assert by_row["BM25"]["parameters"] == ""
    assert by_row["TASER (mined negatives)"]["parameters"] == by_row["TASER + BM25"]["parameters"]
    assert int(by_row["DPR (mined negatives)"]["parameters"]) > 0
    assert {line["false negatives"] for line in lines if line["system"] != "BM25"} == {"mask"}
    # In units of the ratio of the two runs' scores, which six steps of training leave small.
    assert float(by_row["TASER + BM25"]["alpha"]) > 0
    markdown = (compared / "table.md").read_text()
    assert all(f"| {row} |" in markdown for row in ROWS)
    # Rows are tested against the first, from what is on disk by query.
    assert markdown.count("Difference from BM25") == len(TASKS) + 1
    average = markdown.split("Difference from BM25", 1)[1].split("###", 1)[0]
    assert all((f"| {row} |" in average) == (row != "BM25") for row in ROWS)


def test_results_and_per_query_values_agree_with_the_table(
    compared: pathlib.Path, small_world: SmallWorld
):
    results = {
        (value := json.loads(path.read_text()))["system"]: value
        for path in (compared / "results").glob("*.json")
    }
    assert results.keys() == set(ROWS)
    table = {(line["system"], line["task"]): line for line in figures(compared)}
    for system in ROWS:
        for task in TASKS:
            name = f"{system}.{task}.test".replace(" ", "_")
            evaluation = read_per_query(compared / "per_query" / f"{name}.csv")
            queries = QuerySet.open(small_world.data_dir, "small", task, "test")
            assert list(evaluation.query_ids) == [query.id for query in queries]
            for measure, mean in results[system]["tasks"][task]["metrics"].items():
                assert evaluation.values[measure].mean() == pytest.approx(mean, abs=1e-9)
                assert float(table[system, task][measure]) == pytest.approx(mean, abs=1e-6)


def test_run_files_hold_the_best_hundred(compared: pathlib.Path, small_world: SmallWorld):
    store = PassageStore.open(small_world.data_dir, "small")
    for directory, split in (("bm25", "test"), ("taser-1", "validation"), ("taser-2", "test")):
        run = read_trec_run(compared / directory / "runs" / f"code.{split}.trec", store.row_of)
        assert np.isfinite(run.scores[run.rows >= 0]).all()
        assert (np.diff(run.scores, axis=1)[run.rows[:, 1:] >= 0] <= 0).all()
        if directory != "bm25":
            assert (run.rows >= 0).sum(axis=1).tolist() == [100] * len(run.query_ids)
    # Nothing is mined with the last round's runs.
    splits = [sorted(compared.glob(f"dpr-{number}/runs/*.train.trec")) for number in (1, 2)]
    assert [len(paths) for paths in splits] == [2, 0]


def test_mined_negatives_are_the_first_hundred_without_the_positives(
    compared: pathlib.Path, small_world: SmallWorld
):
    """P2 of TASER, appendix B, without the query's other positives: nothing else is left out."""
    store = PassageStore.open(small_world.data_dir, "small")
    positives = {query.id: query.positives for query in _queries(small_world, "summary", "train")}
    run = read_trec_run(compared / "taser-1" / "runs" / "summary.train.trec", store.row_of)
    ranked = dict(zip(run.query_ids, run.rows[:, :100].tolist(), strict=True))
    path = compared / "taser-1" / "negatives" / "summary.train.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(positives)
    for line in lines:
        query = line["query_id"]
        assert line["rows"] == [row for row in ranked[query] if row not in positives[query]]


@pytest.mark.parametrize(
    ("bindings", "sources"),
    [
        ([], ["taser-1"]),
        (["--gin.TASKS=['code']"], ["bm25", "taser-1"]),
    ],
)
def test_a_single_set_trains_on_p1_and_p2_in_the_end(
    small_world: SmallWorld,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    bindings: list[str],
    sources: list[str],
):
    trained = []

    def train(*, negatives_dirs: list[str], **_: Any) -> TrainSummary:
        trained.append(negatives_dirs)
        return TrainSummary(parameters=1, validation={}, steps_per_second=1.0, seconds=1.0)

    for name, module in WORK.items():
        monkeypatch.setattr(module, name, lambda **_: {})
    monkeypatch.setattr(taser, "train", train)
    monkeypatch.setattr(taser, "write_table", lambda *_, **__: ResultsTable([], [], [], ""))
    monkeypatch.setattr(ResultsTable, "to_text", lambda _: "")
    output = tmp_path / "out"
    succeed(*small_world.compare(output, "--gin.pipeline_taser.hybrid_systems=[]", *bindings))
    first, final = (trained[number] for number in (1, 3))
    assert first == [str(output / "bm25" / "negatives")]
    assert final == [str(output / source / "negatives") for source in sources]


def test_every_stage_is_recorded_with_inputs_and_outputs(compared: pathlib.Path):
    stages = Stages(compared)
    rounds = [f"{system}-{number}" for number in (1, 2) for system in ("dpr", "taser")]
    steps = ("train", "encode", "index", "search-validation", "search-test")
    expected = {"bm25-search", "bm25-mine", "bm25-evaluate", "taser-2-hybrid"}
    expected |= {f"{name}-{step}" for name in rounds for step in steps}
    # Nothing mines with the last round.
    expected |= {
        f"{name}-1-{step}" for name in ("dpr", "taser") for step in ("search-train", "mine")
    }
    expected |= {"taser-bm25-evaluate"}
    expected |= {
        f"{system}-{negatives}-negatives-evaluate"
        for system in ("dpr", "taser")
        for negatives in ("bm25", "mined")
    }
    assert set(stages.finished()) == expected
    for name in expected:
        record = stages.record(name)
        # An evaluation names the tasks that its table has.
        assert record.inputs["tasks"] in (None, ["code", "summary"])
        assert record.seconds >= 0
    assert stages.record("taser-2-train").outputs["parameters"] > 0
    encoded = {name: stages.record(f"{name}-encode").outputs["model"] for name in rounds}
    assert len(set(encoded.values())) == 4, "four trainings, four models"


@pytest.mark.release
def test_killed_in_several_stages_it_resumes_in_each(
    compared: pathlib.Path,
    small_world: SmallWorld,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    output = tmp_path / "out"
    # BM25, its negatives and the first training are taken from the finished comparison.
    _copy_up_to(compared, output, last_stage="dpr-1-train")
    calls: collections.Counter[str] = collections.Counter()
    # (function, number of its call): the pipeline dies there, the work done and not yet recorded.
    kills = {("encode", 1), ("mine", 1), ("train", 2), ("hybrid", 1)}
    for name, module in WORK.items():
        monkeypatch.setattr(module, name, _counted(name, getattr(module, name), calls, kills))

    arguments = small_world.compare(output)
    for _ in kills:
        with pytest.raises(Killed):
            cli.run(arguments)
    assert cli.run(arguments) == 0

    # Each killed call was made once more, and nothing else twice.
    assert calls["train"] == 3 + 1
    assert calls["encode"] == 4 + 1
    assert calls["mine"] == 2 + 1
    assert calls["hybrid"] == 1 + 1
    assert (calls["index"], calls["search"], calls["evaluate"]) == (2 * 4, 2 * (3 + 2), 5)
    assert calls["bm25"] == 0
    assert figures(output) == figures(compared)


@pytest.mark.slow
def test_sigkill_in_a_stage_and_the_rest_afterwards(
    compared: pathlib.Path, small_world: SmallWorld, tmp_path: pathlib.Path
):
    output = tmp_path / "out"
    _copy_up_to(compared, output, last_stage="taser-2-encode")
    environment = os.environ | {
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}",
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "taser_jax.cli.main", *small_world.compare(output)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        # Two short stages before the one that is asked for below: the signal takes time, too.
        if line.startswith("taser-2-index: started"):
            process.send_signal(signal.SIGKILL)
            break
    process.stderr.close()
    assert process.wait(timeout=60) == -signal.SIGKILL, "".join(said)
    assert not (output / "stages" / "taser-2-search-test.json").exists()
    succeed(*small_world.compare(output))
    assert figures(output) == figures(compared)


@pytest.mark.release
def test_a_round_that_is_added_encodes_the_training_queries(
    compared: pathlib.Path, small_world: SmallWorld, tmp_path: pathlib.Path
):
    output = tmp_path / "out"
    _copy_up_to(compared, output, last_stage="taser-1-index")
    embeddings = output / "taser-1" / "embeddings"
    checksums = embeddings / "checksums.txt"
    lines = checksums.read_text().splitlines(keepends=True)
    checksums.write_text("".join(line for line in lines if "queries/" not in line))
    for queries in (embeddings / "queries").glob("*.train"):
        shutil.rmtree(queries)
    succeed(*small_world.compare(output))
    assert figures(output) == figures(compared)
    names = {path.name for path in (output / "taser-2" / "embeddings" / "queries").iterdir()}
    assert names == {f"{task}.{split}" for task in TASKS for split in ("validation", "test")}


def test_run_again_when_done_it_only_prints_the_table(
    compared: pathlib.Path,
    small_world: SmallWorld,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    before = (compared / "table.csv").read_bytes()
    for name, module in WORK.items():
        monkeypatch.setattr(module, name, never(getattr(module, name)))
    succeed(*small_world.compare(compared))
    printed = capsys.readouterr().out
    assert all(row in printed for row in ROWS)
    assert (compared / "table.csv").read_bytes() == before


def test_every_argument_of_every_stage_counts(
    compared: pathlib.Path, small_world: SmallWorld, monkeypatch: pytest.MonkeyPatch
):
    """Each is changed in turn, with its fields, and the finished stage is refused by its name."""
    with monkeypatch.context() as patched:
        calls = noted(patched, works=True)
        succeed(*small_world.compare(compared))
    assert len(calls) == 8
    check_every_argument(compared, calls)


def test_a_finished_output_and_its_data_can_be_moved(
    compared: pathlib.Path,
    small_world: SmallWorld,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
):
    output = tmp_path / "moved"
    shutil.copytree(compared, output)
    shutil.copytree(small_world.root, tmp_path / "world")
    for path in (output / "stages").glob("*.json"):
        assert str(compared) not in path.read_text()
    for name, module in WORK.items():
        if name != "mine":
            monkeypatch.setattr(module, name, never(getattr(module, name)))
    # Mined anew in the moved folder, negatives are the same, and so is what was trained on them.
    (output / "stages" / "taser-1-mine.json").unlink()
    succeed(*SmallWorld(tmp_path / "world").compare(output))
    assert figures(output) == figures(compared)


@pytest.mark.parametrize(
    ("binding", "named"),
    [
        ("--gin.TRAIN_STEPS=7", "training.loop.train_steps was 6 when this stage ran, now 7"),
        ("--gin.TASKS=['code']", "tasks was None when this stage ran, now ['code']"),
        ("--gin.Setting.hybrid_measure=R@5", "measure was 'R@20' when this stage ran, now 'R@5'"),
    ],
)
def test_changed_settings_are_refused(
    compared: pathlib.Path,
    small_world: SmallWorld,
    capsys: pytest.CaptureFixture[str],
    binding: str,
    named: str,
):
    message = refused(capsys, *small_world.compare(compared, binding))
    assert named in message
    assert str(compared / "stages") in message
    assert "choose another directory" in message


def test_refused_before_anything_is_done(
    small_world: SmallWorld, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "out"
    message = refused(
        capsys, *small_world.compare(output, "--gin.pipeline_taser.hybrid_systems=['TASR']")
    )
    assert "TASR" in message
    message = refused(capsys, *small_world.compare(output, "--gin.TOP_K=50"))
    assert "mining considers the first 100" in message
    assert not output.exists()
    message = refused(capsys, *small_world.compare(output, "--gin.TASKS=['sumary']"))
    assert "'sumary'" in message
    assert "code, summary" in message
    (tmp_path / "file").write_text("")
    message = refused(capsys, *small_world.compare(tmp_path / "file" / "out"))
    assert str(tmp_path / "file" / "out") in message


def _queries(world: SmallWorld, task: str, split: str) -> QuerySet:
    return QuerySet.open(world.data_dir, "small", task, split)


def _copy_up_to(source: pathlib.Path, target: pathlib.Path, *, last_stage: str) -> None:
    """What the pipeline had on disk when `last_stage` finished."""
    names = Stages(source).finished()
    kept = names[: names.index(last_stage) + 1]
    shutil.copytree(source, target)
    for name in names[len(kept) :]:
        (target / "stages" / f"{name}.json").unlink()
    shutil.rmtree(target / "taser-2-bm25")
    for path in (target / "results").iterdir():
        path.unlink()
    for name in ("dpr-1", "dpr-2", "taser-1", "taser-2"):
        if f"{name}-train" not in kept:
            shutil.rmtree(target / name)
            continue
        for step, folders in {
            "encode": ("embeddings",),
            "index": ("exact", "index"),
            "search": ("runs",),
            "mine": ("negatives",),
        }.items():
            if f"{name}-{step}" not in kept:
                for folder in folders:
                    shutil.rmtree(target / name / folder, ignore_errors=True)
    # Rows whose stage was finished keep their result.
    for path in (source / "results").iterdir():
        if any(f"{path.stem}" in name for name in kept):
            shutil.copy(path, target / "results" / path.name)


def _counted(
    name: str,
    function: Callable[..., Any],
    calls: collections.Counter[str],
    kills: set[tuple[str, int]],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(**keywords: Any) -> Any:
        calls[name] += 1
        result = function(**keywords)
        if (name, calls[name]) in kills:
            raise Killed(name)
        return result

    return counted
