"""The five-set recipe and EntityQuestions, from files in DPR's layout to tables, on toy texts."""

import json
import pathlib

import pytest
from bert_checkpoints import write_with_vocabulary
from small_world import figures, gin, succeed
from written_files import write_all

from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.tokenize import make_vocabulary
from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.tasks.odqa import ENTITY_TASKS, RELATIONS, TASKS

pytestmark = pytest.mark.slow

FILES = {"nq": "nq", "trivia": "trivia", "webq": "webq", "trec": "curatedtrec", "squad": "squad1"}
TOWNS = [f"town{number}" for number in range(40)]


def _passage(number: int) -> dict[str, str]:
    town = TOWNS[number]
    text = f"{town} lies on the river stream{number} and has {number} bridges."
    return {"psg_id": str(number), "text": text, "title": town}


def _question(number: int, kind: str) -> dict[str, object]:
    """CuratedTREC's answers are patterns, which no passage holds as they stand."""
    answer = f"(str|dr)eam0?{number}|none" if kind == "trec" else f"stream{number}"
    return {"question": f"on which river lies {TOWNS[number]}", "answers": [answer]}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> pathlib.Path:
    """Files as DPR's downloader and EntityQuestions leave them, eight questions a training set."""
    rows = ["\t".join(_passage(number).values()) for number in range(len(TOWNS))]
    files = {"wikipedia_split/psgs_w100.tsv": "\n".join(["id\ttext\ttitle", *rows, ""])}
    for place, (task, name) in enumerate(FILES.items()):
        for split, first in (("train", 0), ("dev", 8)):
            numbers = [(8 * place + n) % len(TOWNS) for n in range(first, first + 8)]
            records = [_question(n, task) | {"positive_ctxs": [_passage(n)]} for n in numbers]
            files[f"retriever/{name}-{split}.json"] = json.dumps(records)
        lines = ["{question}\t{answers}\n".format(**_question(n, task)) for n in range(30, 34)]
        files[f"retriever/qas/{name}-test.csv"] = "".join(lines)
    for place, relation in enumerate(RELATIONS):
        question = json.dumps([_question(place, "entity")])
        files[f"entity_questions/test/P{relation}.test.json"] = question
    return write_all(tmp_path_factory.mktemp("odqa"), files)


@pytest.fixture(scope="module")
def world(source, tmp_path_factory) -> pathlib.Path:
    """Collection, vocabulary, tiny BERT and token store."""
    root = tmp_path_factory.mktemp("world")
    data = gin(DATA_DIR=root / "data")
    succeed("prepare", "--gin_file=runs/odqa_prepare.gin", *data, *gin(SOURCE_DIR=source))
    make_vocabulary(
        data_dir=f"{root}/data", collection="odqa", output_dir=f"{root}/vocabulary", size=300
    )
    directory = write_with_vocabulary(root / "bert", root / "vocabulary", num_layers=3)
    succeed(
        *("tokenize", *data, *gin(VOCABULARY=directory, TOKEN_STORE=root / "tokens")),
        *gin(MIXTURE_OR_TASK_NAME="odqa_entities", MIXTURE_OR_TASK_MODULE="taser_jax.tasks.odqa"),
        *gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 24}),
    )
    return root


def test_the_collection_has_all_sets_and_relations(world):
    tasks = list_tasks(world / "data", "odqa")
    assert set(tasks) == {*TASKS, *ENTITY_TASKS}
    assert len(ENTITY_TASKS) == 24
    for task in TASKS:
        assert set(tasks[task]) == {"train", "validation", "test"}
        assert len(QuerySet.open(world / "data", "odqa", task, "train")) == 8
    assert all(tasks[task] == ["test"] for task in ENTITY_TASKS)


@pytest.mark.release
def test_the_recipe_trains_on_the_five_and_judges_each_its_own_way(world, tmp_path, capsys):
    output = tmp_path / "out"
    succeed(
        *("pipeline", "taser", "--gin_file=runs/odqa.gin", *gin(DATA_DIR=world / "data")),
        *gin(TOKEN_STORE=world / "tokens", OUTPUT_DIR=output, PRETRAINED=world / "bert"),
        *gin(TRAIN_STEPS=2, EVAL_PERIOD=1, CHECKPOINT_PERIOD=1, BATCH_SIZE=8, WARMUP_STEPS=1),
        "--gin.pipeline_taser.systems={'TASER': @taser/System()}",
        # The tiny model has 32 positions, fewer than Wikipedia's texts have tokens.
        "--gin.TrainingConfig.length_buckets=()",
        *("--gin.pipeline_taser.hybrid_systems=['TASER']", "--gin.pipeline_taser.rounds=1"),
    )
    log = capsys.readouterr().err
    facts = json.loads((output / "taser-1" / "model" / "run.json").read_text())
    assert facts["pretrained"] == str(world / "bert")
    rows = {(line["system"], line["task"]): line for line in figures(output)}
    assert {task for _, task in rows} == {*TASKS, "average"}
    # Every town's passage names its river: BM25 finds all, and patterns count as patterns.
    assert {rows["BM25", task]["R@20"] for task in TASKS} == {"1.000000"}
    mined = Stages(output).record("bm25-mine").inputs
    assert mined["regex_tasks"] == ["trec"]
    negatives = (output / "bm25" / "negatives" / "trec.train.jsonl").read_text().splitlines()
    for line, number in zip(negatives, range(24, 32), strict=True):
        assert number not in json.loads(line)["rows"]
    # One alpha, and the checkpoint, from the questions of two sets together.
    hybrid = Stages(output).record("taser-1-hybrid").inputs
    assert (hybrid["config.tasks"], hybrid["config.sets"]) == (["nq", "trivia"], "combined")
    assert "R@20 by alpha: 0.5: " in log
    last = (output / "taser-1" / "model" / "metrics.jsonl").read_text().splitlines()[-1]
    ranked = {name for name in json.loads(last) if "mrr/" in name}
    assert {name.rpartition("/")[2] for name in ranked} == {"nq", "trivia"}

    # EntityQuestions, zero-shot, by the same model and token store.
    runs, relations = gin(RUNS_DIR=tmp_path / "eq"), gin(TASKS=list(ENTITY_TASKS))
    embeddings = gin(EMBEDDINGS_DIR=output / "taser-1" / "embeddings")
    # The passages' embeddings are reused.
    encode = gin(MODEL_DIR=output / "taser-1" / "model", TOKEN_STORE=world / "tokens")
    succeed("encode", *encode, *embeddings, *relations)
    succeed(
        *("search", *embeddings, *gin(INDEX_DIR=output / "taser-1" / "index")),
        *(*gin(DATA_DIR=world / "data", COLLECTION="odqa"), *runs, *relations),
    )
    succeed(
        *("evaluate", "--gin_file=runs/entity_questions.gin", *gin(DATA_DIR=world / "data")),
        *(*runs, *gin(EVAL_OUTPUT_DIR=tmp_path / "scored", SYSTEM="TASER")),
    )
    said = capsys.readouterr().err
    assert "macro: mean over 24 tasks" in said
    assert "micro: all queries pooled" in said
    assert {line["task"] for line in figures(tmp_path / "scored")} == {*ENTITY_TASKS, "average"}
