"""A teacher's scores on their way into batches."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.arrays import Ragged, TeacherScores
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import abstract_batch


def score(task, query_id, row):
    """A number that tells query and passage."""
    return np.float32(zlib.crc32(f"{task}/{query_id}".encode()) % 997 + row / 64)


def with_teacher(queries, *, seed=0):
    """One to four hard negatives per query, some twice; all scored."""
    rng = np.random.default_rng(seed)
    hard = Ragged.from_lists(rng.integers(0, 48, rng.integers(1, 5)) for _ in queries.query_ids)

    def of(lists):
        return np.array(
            [
                score(queries.task, query_id, row)
                for query_id, rows in zip(queries.query_ids, lists, strict=True)
                for row in rows
            ],
            np.float32,
        )

    return queries.with_hard_negatives(hard, TeacherScores(of(queries.positives), of(hard)))


@pytest.fixture(scope="module")
def store(tiny_store_dir):
    return TokenStore.open(tiny_store_dir)


@pytest.fixture(scope="module")
def tasks(store):
    return {task: with_teacher(store.queries(task, "train")) for task in ("first", "second")}


CONFIG = BatchingConfig(batch_size=8, num_negatives=3)


def test_scores_are_those_of_the_pairs_and_nan_for_random_passages(store, tasks):
    stream = BatchStream(store, tasks, CONFIG)
    unscored = scored = 0
    for step in range(8):
        batch, rows = stream.batch(step), stream.rows(step)
        queries = tasks[rows.task]
        passages = rows.passage_rows.reshape(8, 4)
        for i, query in enumerate(rows.query_rows):
            labelled = {*queries.positives[query].tolist(), *queries.hard_negatives[query].tolist()}
            for j, row in enumerate(passages[i].tolist()):
                teacher_score = batch.teacher_scores[i, j]
                if row in labelled:
                    assert teacher_score == score(rows.task, queries.query_ids[query], row)
                    scored += 1
                else:
                    assert np.isnan(teacher_score)
                    assert j > 0
                    unscored += 1
        assert batch.teacher_scores.dtype == np.float32
    assert scored > 100
    assert unscored > 20


def check_positives(batch, queries):
    ids = [queries.query_ids[row] for row in batch.query_rows]
    positives = batch.passage_rows[batch.positive_index].tolist()
    expected = [score(queries.task, *pair) for pair in zip(ids, positives, strict=True)]
    np.testing.assert_array_equal(batch.teacher_scores[:, 0], expected)


def test_a_batch_of_every_task_has_each_tasks_scores_and_none_without_a_teacher(store, tasks):
    config = TaskBatchingConfig(total=16, num_negatives=1)
    stream = TaskBatchStream(store, tasks, config)
    for task, batch in stream.batches(0).items():
        check_positives(batch, tasks[task])
    plain = {"first": store.queries("first", "train")}
    assert BatchStream(store, plain, CONFIG).batch(0).teacher_scores is None


def test_some_of_the_queries_keep_their_scores(store, tasks):
    queries = tasks["first"]
    rows = np.array([7, 2, 30])
    subset = queries_of(queries, rows)
    stream = BatchStream(store, {"first": subset}, dataclasses.replace(CONFIG, batch_size=3))
    batch = stream.batch(0)
    ids = [subset.query_ids[row] for row in batch.query_rows]
    assert {queries.query_ids[row] for row in rows} == set(ids)
    check_positives(batch, subset)


def test_the_abstract_batch_has_the_shapes_of_a_batch(store, tasks):
    batch = BatchStream(store, tasks, CONFIG).batch(0)
    queries, passages = (8, tiny_training.QUERY_LENGTH), (32, tiny_training.PASSAGE_LENGTH)
    planned = abstract_batch(queries, passages, teacher_candidates=4)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), batch)
    abstract = jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), planned)
    assert shapes == abstract
