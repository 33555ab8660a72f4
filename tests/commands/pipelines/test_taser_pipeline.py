"""`taser pipeline taser`: what it leaves behind, and that it goes on wherever it was killed."""

import collections
import dataclasses
import functools
import shutil

import pytest
from bert_checkpoints import write_with_vocabulary
from small_world import ROWS, TASKS, SmallWorld, figures, gin, never, refused, succeed
from stage_calls import without_work

from taser_jax.cli import main as cli
from taser_jax.commands.pipelines import retrieval_stages, taser
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.collections.store import QuerySet, write_queries

# Command -> the module that calls it.
WORK = {"hybrid": taser} | dict.fromkeys(
    ("train", "bm25", "mine", "encode", "index", "search", "evaluate"), retrieval_stages
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the pipeline may catch it."""


def test_the_table_has_every_row_and_task(compared):
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


def trained_on(stages: Stages, stage: str) -> list[object]:
    inputs = stages.record(stage).inputs
    return [inputs[name] for name in sorted(inputs) if "negatives_dirs." in name]


@pytest.fixture
def pretrained(small_world, tmp_path) -> list[str]:
    """SQuAD + NQ's recipe on other data and from a tiny BERT, cut to one system."""
    vocabulary = small_world.root / "vocabulary"
    checkpoint = write_with_vocabulary(tmp_path / "bert", vocabulary, num_layers=1)
    return [
        *("pipeline", "taser", "--gin_file=runs/open_qa_pretrained.gin"),
        *gin(DATA_DIR=small_world.data_dir, TOKEN_STORE=small_world.token_store),
        *gin(OUTPUT_DIR=tmp_path / "pretrained", PRETRAINED=checkpoint, TASKS=["code"]),
        *gin(TRAIN_STEPS=3, BATCH_SIZE=16, WARMUP_STEPS=1),
        "--gin.pipeline_taser.systems={'Shared': @shared/System()}",
        *gin("pipeline_taser", hybrid_systems=[], rounds=1),
    ]


def test_the_untrained_row_stands_beside_the_trained_one_and_gives_it_negatives(
    pretrained, tmp_path, monkeypatch
):
    rows: list[str] = []
    monkeypatch.setattr(taser, "print_table", lambda _, names, **__: rows.extend(names))
    without_work(monkeypatch)
    first_negatives = ["BM25", "Pretrained, untrained"]
    succeed(*pretrained, *gin("pipeline_taser", first_negatives=first_negatives, rounds=2))
    trained = "Shared (negatives of BM25 and Pretrained, untrained)"
    assert rows == ["BM25", "Pretrained, untrained", trained, "Shared (mined negatives)"]
    stages = Stages(tmp_path / "pretrained")
    negatives = ["bm25/negatives", "pretrained-untrained/negatives"]
    assert trained_on(stages, "shared-1-train") == negatives
    # A single training set keeps all negatives of round 1.
    assert trained_on(stages, "shared-2-train") == [*negatives, "shared-1/negatives"]
    imported = stages.record("pretrained-untrained-import").inputs
    assert imported["pretrained.source"] == str(tmp_path / "bert")


@pytest.mark.release
def test_killed_in_several_stages_it_resumes_in_each_and_a_round_can_be_added(
    compared, small_world, tmp_path, monkeypatch
):
    output = tmp_path / "out"
    calls: collections.Counter[str] = collections.Counter()
    # (function, number of its call): the pipeline dies there, the work done and not yet recorded.
    kills = {("encode", 1), ("mine", 1), ("train", 2), ("hybrid", 1)}
    for name, module in WORK.items():
        monkeypatch.setattr(module, name, _counted(name, getattr(module, name), calls, kills))

    one_round = ["--gin.pipeline_taser.hybrid_systems=[]", "--gin.pipeline_taser.rounds=1"]
    for _ in range(3):
        with pytest.raises(Killed):
            cli.run(small_world.compare(output, *one_round))
    succeed(*small_world.compare(output, *one_round))
    with pytest.raises(Killed):
        cli.run(small_world.compare(output))
    succeed(*small_world.compare(output))

    # Each killed call was made once more, and nothing else twice; the first round's training
    # queries are encoded once they are searched.
    assert calls["train"] == 4 + 1
    assert calls["encode"] == 4 + 1 + 2
    assert calls["mine"] == 3 + 1
    assert calls["hybrid"] == 1 + 1
    assert (calls["index"], calls["search"]) == (2 * 4, 2 * (3 + 2))
    assert (calls["bm25"], calls["evaluate"]) == (3, 6)
    assert figures(output) == figures(compared)


def test_a_finished_output_and_its_data_can_be_moved(compared, small_world, tmp_path, monkeypatch):
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


def test_refused_before_anything_is_done(small_world, pretrained, tmp_path, capsys):
    output = tmp_path / "out"
    untrained = "--gin.pipeline_taser.untrained_systems={'untrained': @taser/System()}"
    alike = gin("pipeline_taser", systems="{'A 1': @taser/System(), 'a-1': @dpr/System()}")
    for bindings, words in (
        (gin("pipeline_taser", hybrid_systems=["TASR"]), "no system TASR"),
        (gin("pipeline_taser", rounds=3), "expected: Literal[1, 2]"),
        (gin(TOP_K=50), "mining considers the first 100"),
        (gin(TASKS=["sumary"]), "code, summary"),
        (gin("Setting", hybrid_measure="nDCG10"), "Setting.hybrid_measure: measure 'nDCG10'"),
        (
            [*gin("Setting", hybrid_measure="nDCG@10"), *gin("EvaluationConfig", judge="answers")],
            "nDCG and Recall need qrels",
        ),
        ([untrained], "no pretrained weights"),
        (alike, "folders a-1, a-1"),
    ):
        assert words in refused(capsys, *small_world.compare(output, *bindings))
    shared = gin("pipeline_taser", untrained_systems="{'shared': @untrained/System()}")
    for bindings, words in (
        (gin("TrainingConfig", pretrained=None), "PRETRAINED is set, but nothing loads it"),
        (shared, "give each row its own name"),
        (gin("pipeline_taser", first_negatives=["bm25"]), "no system bm25"),
    ):
        assert words in refused(capsys, *pretrained, *bindings)
    assert not (tmp_path / "pretrained").exists()
    (tmp_path / "file").write_text("")
    message = refused(capsys, *small_world.compare(tmp_path / "file" / "out"))
    assert str(tmp_path / "file" / "out") in message


def test_queries_that_changed_after_they_were_tokenised_are_refused(small_world, tmp_path, capsys):
    world = SmallWorld(tmp_path / "world")
    shutil.copytree(small_world.root, world.root)
    *queries, last = QuerySet.open(world.data_dir, "small", "code", "train")
    changed = dataclasses.replace(last, positives=queries[0].positives, relevance=())
    write_queries(world.data_dir, "small", "code", "train", [*queries, changed])
    message = refused(capsys, *world.compare(tmp_path / "out"))
    assert "train queries of 'code' or their positives have changed" in message


def _counted(name, function, calls, kills):
    @functools.wraps(function)
    def counted(**keywords):
        calls[name] += 1
        result = function(**keywords)
        if (name, calls[name]) in kills:
            raise Killed(name)
        return result

    return counted
