"""A teacher's scores in `taser mine`, on passages checked by hand, and training with them."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest
import tiny_training
from capitals import IDS, Capitals
from small_world import gin, refused, succeed
from written_files import run_of, write_run

from taser_jax.assembly.data import training_queries
from taser_jax.commands.mine import embedding_scorer, run_scorer
from taser_jax.data.token_store.arrays import TeacherScores
from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.embeddings import Embeddings, write_embeddings
from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.training.objective import Distillation, ObjectiveConfig


@pytest.fixture(scope="module")
def runs(capitals, tmp_path_factory) -> pathlib.Path:
    """BM25's run of task "capital", and a second run by hand."""
    root = tmp_path_factory.mktemp("score")
    capitals.bm25(root / "bm25", SPLIT="train")
    hand = {"France": {"p0": 3.0, "p1": 2.5, "p7": -1.0}, "Italy": {"p4": 0.5, "p3": 0.25}}
    write_run(root / "hand" / "capital.train.trec", hand)
    return root


def mine(capitals: Capitals, runs: pathlib.Path, output: pathlib.Path, **settings) -> list[str]:
    return [
        *("mine", *capitals.where),
        *gin(RUNS_DIR=runs / "bm25", NEGATIVES_DIR=output, TASKS=["capital"], **settings),
    ]


def test_two_runs_by_weight(capitals, runs, tmp_path):
    """hand + 0.5 · BM25; p0 is the positive of France, p3 that of Italy."""
    teachers = {str(runs / "hand"): 1.0, str(runs / "bm25"): 0.5}
    succeed(*mine(capitals, runs, tmp_path / "scored", TEACHERS=teachers))
    bm25 = list(run_of(runs / "bm25" / "capital.train.trec").values())
    hand = [{"p0": 3.0, "p1": 2.5}, {"p4": 0.5, "p3": 0.25}]
    lowest = [-1.0, 0.25]
    lines = read_negatives(tmp_path / "scored", "capital", "train", ["France", "Italy"])
    for number, line in enumerate(lines):

        def total(passage: str, number: int = number) -> float:
            own = hand[number].get(passage, lowest[number])
            least = min(bm25[number].values())
            return own + 0.5 * bm25[number].get(passage, least)

        expected = [total(IDS[row]) for row in line.rows]
        np.testing.assert_allclose(line.teacher.negatives, expected, rtol=1e-6)
        np.testing.assert_allclose(line.teacher.positives, [total(["p0", "p3"][number])], rtol=1e-6)
    metadata = json.loads((tmp_path / "scored" / "metadata.json").read_text())
    places = {os.path.relpath(name, tmp_path / "scored"): teachers[name] for name in teachers}
    assert metadata["teachers"] == places


def test_what_a_run_lacks_gets_its_querys_lowest_score_and_0_without_any():
    rows = np.array([[7, 4], [2, -1], [-1, -1]], np.int32)
    scores = np.array([[3, 1], [-5, -np.inf], [-np.inf, -np.inf]], np.float32)
    score = run_scorer(SearchResult(rows, scores))
    teacher_scores = [score(query, np.array([7, 2, 9])).tolist() for query in range(3)]
    assert teacher_scores == [[3, 1, 1], [-5, -5, -5], [0, 0, 0]]


def test_embeddings_give_inner_products(tmp_path):
    table = np.random.default_rng(1).normal(size=(60, 6)).astype(np.float32)
    for name, part in (("queries", table[:20]), ("passages", table[20:])):
        write_embeddings(tmp_path / name, part, {"model": "m"}, "none")
    queries, passages = (Embeddings(tmp_path / name) for name in ("queries", "passages"))
    rows = np.array([39, 0, 7])
    exact = table.astype(np.float64)
    expected = exact[20 + rows] @ exact[4]
    np.testing.assert_allclose(embedding_scorer(queries, passages)(4, rows), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("teachers", "words"),
    [
        ("{{'{empty}': 1.0}}", "no embeddings, and no run capital.train.trec"),
        ("hand", "mine.teachers = %TEACHERS: 'hand'"),
    ],
)
def test_refusals(capitals, runs, tmp_path, capsys, teachers, words):
    given = teachers.format(empty=tmp_path, hand=runs / "hand")
    assert words in refused(capsys, *mine(capitals, runs, tmp_path / "out", TEACHERS=given))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_store_dir) -> pathlib.Path:
    """Negatives of the tiny store with another model's scores, without, and with one too many."""
    root = tmp_path_factory.mktemp("teacher")
    store = TokenStore.open(tiny_store_dir)
    # A text is the sum of fixed random vectors of its tokens.
    table = np.random.default_rng(3).normal(size=(96, 6)).astype(np.float32)

    def encode(tokens: Tokens) -> np.ndarray:
        return (table[tokens.ids] * tokens.mask[..., None]).sum(axis=1)

    passages = encode(store.passages.tokens(np.arange(len(store))))
    for task in store.tasks:
        queries = store.queries(task, "train")
        scores = encode(queries.tokens(np.arange(len(queries)))) @ passages.T
        lists = queries.positives, queries.hard_negatives
        scored = [
            TeacherScores(*(scores[number, rows[number]] for rows in lists))
            for number in range(len(queries))
        ]
        wrong = list(scored)
        wrong[3] = TeacherScores(np.array([1.0, 2.0], np.float32), scored[3].negatives)
        for name, teacher in (("scored", scored), ("unscored", None), ("wrong", wrong)):
            write_negatives(
                *(root / name, task, "train"),
                query_ids=queries.query_ids,
                rows=list(queries.hard_negatives),
                scores=[[1.0] * len(rows) for rows in queries.hard_negatives],
                metadata={
                    "collection_fingerprint": store.metadata.collection_fingerprint,
                    "source": "test",
                },
                teacher=teacher,
            )
    return root


def start(model_dir, store_dir, objective, *, negatives=None):
    training = dataclasses.replace(
        tiny_training.training_config(train_steps=20, validates=False), objective=objective
    )
    data = {} if negatives is None else {"negatives_dirs": (str(negatives),)}
    tiny_training.start(model_dir, store_dir, training, data=data)
    lines = (pathlib.Path(model_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_training_comes_closer_to_its_teacher(teacher, tiny_store_dir, tmp_path):
    objective = ObjectiveConfig(
        label_weight=0.0, distillation=Distillation(temperature=4.0), matryoshka_dims=(16,)
    )
    lines = start(tmp_path / "own", tiny_store_dir, objective, negatives=teacher / "scored")
    losses = [line["train/distillation"] for line in lines]
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert lines[-1]["train/loss"] == losses[-1]
    assert lines[0]["train/nll/dim_16"] == lines[0]["train/nll"]


def test_a_missing_teacher_is_reported_before_anything_is_computed(
    teacher, tiny_store_dir, tmp_path
):
    reads_scores = ObjectiveConfig(distillation=Distillation())
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"scores, and batches have none(.|\n)*taser mine"):
        start(out, tiny_store_dir, reads_scores, negatives=teacher / "unscored")
    with pytest.raises(ConfigError, match="of a model with 16 dimensions"):
        start(out, tiny_store_dir, ObjectiveConfig(matryoshka_dims=(8, 32)))
    assert not out.exists()


def test_teacher_scores_of_other_positives_are_refused(teacher, tiny_store_dir):
    store = TokenStore.open(tiny_store_dir)

    def read(*names):
        directories = [str(teacher / name) for name in names]
        return training_queries(store, task_names=["first"], negatives_dirs=directories)["first"]

    with pytest.raises(DataError, match="of query 'first-train-3', of 2 positives"):
        read("wrong")
    with pytest.raises(DataError, match="1 of 2 directories have teacher scores"):
        read("scored", "unscored")
    joined = read("scored", "scored")
    assert len(joined.teacher.negatives) == len(joined.hard_negatives.values) == 64
    np.testing.assert_array_equal(joined.teacher.positives, read("scored").teacher.positives)
