"""Confidence: by hand, against float64 NumPy, and what must hold for any ensemble."""

import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.systems.muf.confidence import (
    confidence,
    member_logits,
    mutual_information,
    query_confidence,
)

MEMBERS, QUERIES, K, DIM = 5, 7, 6, 4


class Passages:
    """Embeddings in memory."""

    def __init__(self, vectors):
        self.vectors = vectors

    def take(self, rows):
        return self.vectors[rows]


def entropy(p):
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)


def oracle(logits, exists, temperature):
    """Float64, entropies as the paper writes them."""
    found = []
    for line, there in zip(np.asarray(logits, np.float64), exists, strict=True):
        if not there.any():
            found.append(0.0)
            continue
        z = line[:, there] / temperature
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        information = entropy(p.mean(axis=0)) - entropy(p).mean()
        found.append(1 - information / np.log(len(p)))
    return np.array(found)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(MEMBERS, QUERIES, DIM)).astype(np.float32)
    vectors = rng.normal(size=(40, DIM)).astype(np.float32)
    rows = np.stack([rng.permutation(40)[:K] for _ in range(QUERIES)]).astype(np.int32)
    rows[1, 4:], rows[2] = -1, -1
    return members, vectors, SearchResult(rows, np.zeros(rows.shape, np.float32))


def test_by_hand():
    p = jnp.array([[0.75, 0.25], [0.25, 0.75]])
    assert float(mutual_information(p)) == pytest.approx(0.130812, abs=1e-6)
    found = confidence(jnp.log(p)[None], jnp.ones((1, 2), bool), temperature=1.0)
    assert float(found[0]) == pytest.approx(0.811278, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_equals_float64(temperature):
    members, vectors, result = problem()
    exists = result.rows >= 0
    logits = np.einsum("mqd,qkd->qmk", members, vectors[result.rows], dtype=np.float64)
    found = confidence(
        member_logits(jnp.array(members), jnp.array(vectors[result.rows])),
        jnp.array(exists),
        temperature=temperature,
    )
    np.testing.assert_allclose(found, oracle(logits, exists, temperature), atol=2e-5)


def test_blocks_and_temperatures_change_nothing():
    members, vectors, result = problem()
    queries = np.arange(QUERIES, dtype=np.float32)[:, None].repeat(DIM, axis=1)

    def embed(block):
        return jnp.array(members)[:, block[:, 0].astype(int)]

    def found(block_bytes):
        return query_confidence(
            embed,
            queries,
            Passages(vectors),
            result,
            members=MEMBERS,
            temperatures=(0.1, 1.0),
            k=K,
            block_bytes=block_bytes,
        )

    whole = found(1 << 20)
    exists = result.rows >= 0
    logits = np.einsum("mqd,qkd->qmk", members, vectors[result.rows], dtype=np.float64)
    for line, temperature in enumerate((0.1, 1.0)):
        np.testing.assert_allclose(whole[line], oracle(logits, exists, temperature), atol=2e-5)
    np.testing.assert_allclose(found(4 * K * DIM * 3), whole, atol=1e-6)
    assert (whole[:, 2] == 0).all()


def test_members_that_agree_have_confidence_1_for_any_distribution():
    members, vectors, result = problem()
    same = jnp.array(np.repeat(members[:1], MEMBERS, axis=0))
    candidates = jnp.array(vectors[np.maximum(result.rows, 0)])
    exists = jnp.ones((QUERIES, K), bool)
    for temperature in (1e-3, 1.0):
        logits = member_logits(same, candidates)
        np.testing.assert_allclose(
            confidence(logits, exists, temperature=temperature), 1, atol=1e-6
        )


def test_members_that_disagree_wholly_are_as_unsure_as_can_be():
    logits = 100.0 * jnp.eye(4)[None]
    found = confidence(logits, jnp.ones((1, 4), bool), temperature=1.0)
    np.testing.assert_allclose(found, 0, atol=1e-6)


def test_the_order_of_members_does_not_matter_and_w_stays_between_0_and_1():
    rng = np.random.default_rng(1)
    logits = jnp.array(rng.normal(scale=30, size=(200, MEMBERS, K)))
    exists = jnp.ones((200, K), bool)
    for temperature in (1e-3, 0.1, 10.0):
        found = confidence(logits, exists, temperature=temperature)
        assert bool(((found >= 0) & (found <= 1)).all())
        permuted = confidence(logits[:, ::-1], exists, temperature=temperature)
        np.testing.assert_allclose(permuted, found, atol=1e-6)


def test_multiplying_by_the_temperature_would_make_every_query_sure():
    """Why T divides: read to the letter, the paper's λ = 1e-3 leaves nothing of w."""
    members, vectors, result = problem()
    logits = member_logits(jnp.array(members), jnp.array(vectors[np.maximum(result.rows, 0)]))
    exists = jnp.ones((QUERIES, K), bool)
    assert float(confidence(logits, exists, temperature=1000.0).min()) > 0.9999
    assert float(confidence(logits, exists, temperature=1e-3).mean()) < 0.6


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"members": 1}, "an ensemble has 1 members"),
        ({"temperatures": ()}, "give at least one, each a positive number"),
        ({"temperatures": (0.0,)}, "give at least one, each a positive number"),
        ({"temperatures": (float("nan"),)}, "give at least one, each a positive number"),
        ({"k": K + 1}, "search deeper, or lower k"),
    ],
)
def test_bad_settings(changed, words):
    members, vectors, result = problem()
    settings = {"members": MEMBERS, "temperatures": (1.0,), "k": K}
    with pytest.raises(ConfigError, match=words):
        query_confidence(
            lambda block: jnp.array(members),
            np.zeros((QUERIES, DIM), np.float32),
            Passages(vectors),
            result,
            **(settings | changed),
        )


def test_embeddings_that_are_not_numbers_name_the_query():
    members, vectors, result = problem()
    members[0, 3] = np.nan
    with pytest.raises(DataError, match="the confidence of query 3 is not a number"):
        query_confidence(
            lambda block: jnp.array(members),
            np.zeros((QUERIES, DIM), np.float32),
            Passages(vectors),
            result,
            members=MEMBERS,
            temperatures=(1.0,),
            k=K,
        )
