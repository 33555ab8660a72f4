import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.training.validation import (
    PoolConfig,
    rank_in_pool,
    select_pool,
)

NO_OTHERS = PoolConfig(other_negatives=0)


def test_worked_examples_of_the_docstrings():
    pool = select_pool([[4], [1, 9]], [[7], [4]], num_passages=10, config=NO_OTHERS)
    assert pool.query_rows.tolist() == [0, 1]
    assert pool.passage_rows.tolist() == [1, 4, 7]
    assert pool.positive_index.tolist() == [1, 0]
    result = rank_in_pool(
        np.array([[1.0, 0.0]], np.float32),
        np.array([[0.5, 0], [2, 0], [1, 0]], np.float32),
        positive_index=np.array([2]),
    )
    assert result.tolist() == [2]


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
    known = set(golds).union(*(hard[i][:5] for i in pool.query_rows))
    others = set(pool.passage_rows.tolist()) - known
    assert known <= set(pool.passage_rows.tolist())
    assert 30 <= len(others) <= 50
    assert np.all(np.diff(pool.passage_rows) > 0)
    again = select_pool(positives, hard, num_passages=1000, config=config)
    np.testing.assert_array_equal(again.passage_rows, pool.passage_rows)


def oracle(queries, passages, positive):
    ranks = []
    for i, query in enumerate(queries):
        scores = [float(np.dot(np.float64(query), np.float64(p))) for p in passages]
        order = sorted(range(len(passages)), key=lambda j: (-scores[j], j))
        ranks.append(order.index(positive[i]) + 1)
    return np.array(ranks)


@pytest.mark.parametrize("block", [1, 4, 7, None])
def test_ranks_equal_a_sort_in_float64_whatever_the_block(block):
    rng = np.random.default_rng(0)
    # Small integers: exact in float32, with many ties.
    queries = rng.integers(-2, 3, size=(10, 3)).astype(np.float32)
    passages = rng.integers(-2, 3, size=(40, 3)).astype(np.float32)
    positive = rng.integers(40, size=10)
    expected = oracle(queries, passages, positive)
    result = rank_in_pool(queries, jnp.asarray(passages), positive_index=positive, block=block)
    np.testing.assert_array_equal(result, expected)


def test_nan_embeddings_rank_last():
    queries = np.full((2, 3), np.nan, np.float32)
    passages = np.ones((4, 3), np.float32)
    result = rank_in_pool(queries, passages, positive_index=np.array([0, 1]))
    assert result.tolist() == [4, 4]


def test_bad_input():
    with pytest.raises(DataError, match="none of 2 validation queries"):
        select_pool([[], []], [[1], [2]], num_passages=5, config=NO_OTHERS)
    with pytest.raises(ConfigError, match="max_queries is 0"):
        PoolConfig(max_queries=0)
