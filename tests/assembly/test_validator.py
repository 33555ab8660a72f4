"""Validation: queries whose gold is not in the collection, pools, and ranks within them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_training
from tiny_models import encode

from taser_jax.assembly import validator
from taser_jax.assembly.validator import PoolConfig, Validator, rank_in_pool, select_pool
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.stream import FalseNegatives
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import DevelopmentSets
from taser_jax.training.objective import ObjectiveConfig

MODEL = DualEncoder(tiny_training.model_config())


@functools.cache
def params():
    return tiny_training.draw_params(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def store(tiny_store_dir):
    return TokenStore.open(tiny_store_dir)


def validate(store, *queries, false_negatives=FalseNegatives.MASK, buckets=(), **changes):
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.devices()[:2]))
    config = tiny_training.training_config(train_steps=1).validation
    validator = Validator(
        MODEL,
        store,
        {query_set.task: query_set for query_set in queries},
        dataclasses.replace(config, **changes),
        objective=ObjectiveConfig(),
        partitioner=partitioner,
        texts=store,
        false_negatives=false_negatives,
        buckets=buckets,
    )
    with jax.set_mesh(partitioner.mesh):
        return validator(params())


def test_queries_without_a_positive_have_no_part(store):
    queries = store.queries("first", "validation")
    without = [0, 5, len(queries) - 1]
    golds = [[] if row in without else list(queries.positives[row]) for row in range(len(queries))]
    holed = dataclasses.replace(queries, positives=Ragged.from_lists(golds))
    rows = [row for row in range(len(queries)) if row not in without]
    with_positive = queries_of(queries, np.array(rows))
    metrics = validate(store, holed)
    assert metrics == validate(store, with_positive)
    assert metrics != validate(store, queries)


def test_texts_in_buckets_of_lengths_are_judged_as_those_of_full_padding(tmp_path):
    store = tiny_training.write_token_store(tmp_path / "ragged", least_words=1)
    queries = store.queries("first", "validation")
    grouped = validate(store, queries, buckets=(5, 9))
    assert grouped == pytest.approx(validate(store, queries), rel=1e-5)


def test_the_loss_counts_no_label_as_a_negative_unless_training_does(store):
    queries = store.queries("first", "validation")
    golds = [int(rows[0]) for rows in queries.positives]
    hard = [int(rows[0]) for rows in queries.hard_negatives]
    # All that is in a batch is a positive of every query: there is nothing to tell a gold from.
    labels = [[gold, *({*golds, *hard} - {gold})] for gold in golds]
    labelled = dataclasses.replace(queries, positives=Ragged.from_lists(labels))
    masks = {"num_negatives": 0, "pool": None}
    assert validate(store, labelled, **masks) == {"nll": 0.0}
    assert validate(store, labelled, false_negatives=FalseNegatives.KEEP, **masks)["nll"] > 0.1


def embeddings(tokens, role):
    return np.asarray(encode(MODEL, params(), tokens, role).embeddings, np.float64)


def ranks_among(store, queries, pool):
    """1-based ranks of the golds among the pool's passages, in float64."""
    scores = embeddings(queries.tokens(np.arange(len(queries))), Role.QUERY)
    scores = scores @ embeddings(store.passages.tokens(np.array(pool)), Role.PASSAGE).T
    golds = [pool.index(queries.positives[row][0]) for row in range(len(queries))]
    return 1 + (scores > scores[np.arange(len(golds)), golds, None]).sum(axis=1)


@pytest.mark.slow
def test_tasks_or_their_queries_count_the_same(store):
    many = store.queries("first", "validation")
    few = queries_of(store.queries("second", "validation"), np.arange(4))
    golds = [sorted({int(row[0]) for row in query_set.positives}) for query_set in (many, few)]
    pool = PoolConfig(hard_negatives=0, other_negatives=0)
    changes = {"pool": pool, "batch_size": 4, "num_batches": 9}

    apart = validate(store, many, few, **changes)
    ranks = [ranks_among(store, many, golds[0]), ranks_among(store, few, golds[1])]
    assert apart["mrr"] == pytest.approx(np.mean([(1 / r).mean() for r in ranks]))
    assert apart["average_rank"] == pytest.approx(np.mean([r.mean() for r in ranks]))

    changes["sets"] = DevelopmentSets.COMBINED
    combined = validate(store, many, few, **changes)
    union = sorted({*golds[0], *golds[1]})
    ranks = [ranks_among(store, query_set, union) for query_set in (many, few)]
    assert combined["mrr"] == pytest.approx((1 / np.concatenate(ranks)).mean())
    assert combined["average_rank"] == pytest.approx(np.concatenate(ranks).mean())
    assert combined["mrr/second"] == pytest.approx((1 / ranks[1]).mean())
    # Four batches of the one, one of the other.
    first, second = (validate(store, query_set, **changes) for query_set in (many, few))
    assert apart["nll"] == pytest.approx((first["nll"] + second["nll"]) / 2)
    assert combined["nll"] == pytest.approx((4 * first["nll"] + second["nll"]) / 5)

    assert validate(store, many, few, tasks=("second",), **changes) == second
    with pytest.raises(ConfigError, match="no task third"):
        validate(store, many, few, tasks=("third",))


def test_the_queries_of_some_rows(store):
    queries = store.queries("first", "train")
    rows = np.array([7, 2, 30])
    subset = queries_of(queries, rows)
    assert subset.fingerprint != queries.fingerprint
    for place, row in enumerate(rows):
        assert subset.query_ids[place] == f"first-train-{row}"
        np.testing.assert_array_equal(subset.tokens([place]).ids, queries.tokens([row]).ids)
        for name in ("positives", "hard_negatives"):
            assert getattr(subset, name)[place].tolist() == getattr(queries, name)[row].tolist()


def test_a_task_without_any_positive(store):
    queries = store.queries("first", "validation")
    empty = dataclasses.replace(queries, positives=Ragged.from_lists([[]] * len(queries)))
    with pytest.raises(DataError, match=r"'first', split 'validation': none of 16 queries"):
        validate(store, empty)


def test_worked_examples_of_the_docstrings():
    no_others = PoolConfig(other_negatives=0)
    pool = select_pool([[4], [1, 9]], [[7], [4]], num_passages=10, config=no_others)
    assert pool.query_rows.tolist() == [0, 1]
    assert pool.passage_rows.tolist() == [1, 4, 7]
    assert pool.positive_index.tolist() == [1, 0]
    queries = np.array([[1, 0]], np.float32)
    passages = np.array([[0.5, 0], [2, 0], [1, 0]], np.float32)
    assert rank_in_pool(queries, passages, positive_index=np.array([2])).tolist() == [2]


def test_pool_takes_what_dpr_takes():
    rng = np.random.default_rng(0)
    positives = [[int(rng.integers(1000))] if i % 3 else [] for i in range(60)]
    hard = [rng.integers(1000, size=int(rng.integers(60))).tolist() for _ in range(60)]
    config = PoolConfig(max_queries=25, hard_negatives=5, other_negatives=2)
    pool = select_pool(positives, hard, num_passages=1000, config=config)
    assert len(pool.query_rows) == 25
    assert all(positives[i] for i in pool.query_rows)
    golds = [positives[i][0] for i in pool.query_rows]
    assert pool.passage_rows[pool.positive_index].tolist() == golds
    own_passages = set(golds).union(*(hard[i][:5] for i in pool.query_rows))
    others = set(pool.passage_rows.tolist()) - own_passages
    assert own_passages <= set(pool.passage_rows.tolist())
    assert 30 <= len(others) <= 50
    assert np.all(np.diff(pool.passage_rows) > 0)
    again = select_pool(positives, hard, num_passages=1000, config=config)
    np.testing.assert_array_equal(again.passage_rows, pool.passage_rows)


@pytest.mark.parametrize("block", [1, 4, 7, 10])
def test_ranks_equal_a_sort_in_float64_whatever_the_block(monkeypatch, block):
    rng = np.random.default_rng(0)
    # Small integers: exact in float32, with many ties.
    queries = rng.integers(-2, 3, size=(10, 3)).astype(np.float32)
    passages = rng.integers(-2, 3, size=(40, 3)).astype(np.float32)
    positive = rng.integers(40, size=10)
    # Ties go by position.
    order = np.argsort(-queries.astype(np.float64) @ passages.T, axis=1, kind="stable")
    expected = 1 + np.argmax(order == positive[:, None], axis=1)
    monkeypatch.setattr(validator, "_SCORES_AT_ONCE", block * len(passages))
    result = rank_in_pool(queries, jnp.asarray(passages), positive_index=positive)
    np.testing.assert_array_equal(result, expected)


def test_bad_input():
    with pytest.raises(ConfigError, match="max_queries is 0"):
        PoolConfig(max_queries=0)
