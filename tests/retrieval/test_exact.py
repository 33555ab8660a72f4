"""Exact search against float64 NumPy with a stable sort, in blocks and over eight devices."""

import jax
import ml_dtypes
import numpy as np
import pytest

from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.storage.errors import ConfigError


def oracle(queries, passages, k):
    scores = queries.astype(np.float64) @ passages.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(scores, rows, 1)


@pytest.mark.parametrize("num_devices", [None, 1, 8])
@pytest.mark.parametrize("k", [1, 10, 70, 5000])
def test_blocks_and_devices_equal_a_stable_sort(num_devices, k):
    rng = np.random.default_rng(0)
    # Their products are exact in float32 and tie often.
    passages, queries = (rng.integers(-2, 3, (n, 3)).astype(np.float32) for n in (4500, 37))
    # None: NumPy.
    devices = num_devices and jax.devices()[:num_devices]
    block = 128 * 8 // (num_devices or 1)
    resident = ExactSearcher(passages, query_block=16, passage_block=block, devices=devices)
    rows, scores = oracle(queries, passages, k)
    streamed = ExactSearcher(passages, passage_block=1024, resident_bytes=0)
    # The second time from blocks kept on the devices.
    for searcher in (resident, resident, streamed):
        hits = searcher.search(queries, k)
        np.testing.assert_array_equal(hits.rows[:, :4500], rows)
        np.testing.assert_array_equal(hits.scores[:, :4500], scores)
        assert (hits.rows[:, 4500:] == -1).all()
        assert np.isneginf(hits.scores[:, 4500:]).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_real_numbers_against_float64(dtype):
    rng = np.random.default_rng(2)
    passages = rng.standard_normal((3000, 64)).astype(dtype)
    queries = rng.standard_normal((20, 64)).astype(np.float32)
    hits = ExactSearcher(passages, passage_block=999).search(queries, 20)
    rows, scores = oracle(queries, passages, 20)
    np.testing.assert_allclose(hits.scores, scores, rtol=1e-5)
    assert (hits.rows == rows).mean() > 0.999


@pytest.mark.parametrize("num_queries", [0, 1, 3, 64, 600])
def test_copies_of_a_passage_tie_wherever_they_are(num_queries):
    rng = np.random.default_rng(6)
    copied = rng.integers(0, 1000, 5003)
    passages = rng.standard_normal((1000, 96)).astype(np.float32)[copied]
    queries = rng.standard_normal((num_queries, 96)).astype(np.float32)
    hits = ExactSearcher(passages).search(queries, 300)
    assert hits.rows.shape == (num_queries, 300)
    for rows in hits.rows:
        # Copies follow each other, the lower row first: no row comes twice to the same passage.
        is_copy = np.diff(copied[rows]) == 0
        assert np.count_nonzero(~is_copy) + 1 == len({*copied[rows]})
        assert (np.diff(rows)[is_copy] > 0).all()


def test_positive_and_negative_zero_tie():
    passages = np.array([[-0.0], [0.0], [-0.0]], np.float32)
    hits = ExactSearcher(passages).search(np.array([[1.0]], np.float32), 3)
    assert hits.rows.tolist() == [[0, 1, 2]]


def test_wrong_dimensions_and_k_are_refused():
    searcher = ExactSearcher(np.ones((4, 2), np.float32))
    with pytest.raises(ConfigError, match=r"not \[queries, 2\]"):
        searcher.search(np.ones((1, 3), np.float32), 1)
    with pytest.raises(ConfigError, match="k is 0"):
        searcher.search(np.ones((1, 2), np.float32), 0)
