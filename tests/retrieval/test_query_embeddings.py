"""Queries encoded beside passages: equal to the encoder, resumable, refused where they misfit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.retrieval.embeddings import (
    EmbeddingDtype,
    Embeddings,
    QueryEmbeddings,
    encoded_splits,
    queries_directory,
)
from taser_jax.retrieval.encoding import EncodeConfig, encode_queries, encode_texts
from taser_jax.storage.errors import DataError, FingerprintError

TABLE = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
PASSAGES = {"model": "m1", "collection": "c1", "vocabulary": "v1", "passages": "p1"}
CONFIG = EncodeConfig(batch_tokens=64, batch_multiple=2, length_multiple=8, shard_rows=7)


class Encoder:
    """Sum of the real tokens' vectors, weighted by position; counts the batches it saw."""

    def __init__(self, stop_after: int | None = None):
        self.batches, self.stop_after = 0, stop_after

    def __call__(self, tokens):
        if self.batches == self.stop_after:
            raise KeyboardInterrupt
        self.batches += 1
        weights = tokens.mask / (1.0 + np.arange(tokens.ids.shape[1]))
        return np.einsum("bl,bld->bd", weights, TABLE[tokens.ids]).astype(np.float32)


def make_queries(task: str = "nq", *, count: int = 24, seed: int = 1) -> TokenizedQueries:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(1, 50, rng.integers(1, 20)).tolist() for _ in range(count)]
    return TokenizedQueries.from_lists(
        task,
        "test",
        query_ids=[f"{task}/{number}" for number in range(count)],
        tokens=lists,
        positives=[[0]] * count,
        length=20,
        vocabulary_size=50,
    )


def encode(queries, directory, encoder=None, **changes) -> bool:
    options = {"fingerprints": PASSAGES, "config": CONFIG, **changes}
    return encode_queries(encoder or Encoder(), queries, directory, **options)


def one_by_one(queries: TokenizedQueries) -> np.ndarray:
    """Σ_l table[id_l] / (1 + l) in float64."""
    rows = [
        sum(TABLE[id].astype(np.float64) / (1 + place) for place, id in enumerate(ids[:length]))
        for ids, length in zip(queries.ids, queries.lengths, strict=True)
    ]
    return np.array(rows)


def test_two_queries_by_hand(tmp_path):
    queries = TokenizedQueries.from_lists(
        "nq",
        "test",
        query_ids=["b", "a"],
        tokens=[[3], [4, 5]],
        positives=[[0], [1]],
        length=4,
        vocabulary_size=50,
    )
    assert encode(queries, tmp_path)
    found = QueryEmbeddings.of_split(tmp_path, "nq", "test")
    np.testing.assert_allclose(found.rows(0, 2), [TABLE[3], TABLE[4] + TABLE[5] / 2], rtol=1e-6)
    assert found.query_ids == ["b", "a"]
    assert sorted(path.name for path in (tmp_path / "queries" / "nq.test").iterdir()) == [
        "checksums.txt",
        *("embeddings-00000-of-00001.npy", "metadata.json", "plan.json", "query_ids.json"),
    ]


def test_sharded_on_several_processes_equals_whole(tmp_path):
    queries = make_queries()
    assert encode(queries, tmp_path / "whole", config=EncodeConfig())
    for process in (2, 0):
        assert not encode(queries, tmp_path / "e", process_index=process, process_count=3)
    assert encode(queries, tmp_path / "e", process_index=1, process_count=3)
    whole, sharded = (
        QueryEmbeddings.of_split(tmp_path / name, "nq", "test") for name in ("whole", "e")
    )
    assert len(list(sharded.directory.glob("embeddings-*.npy"))) == 4
    np.testing.assert_allclose(sharded.rows(0, 24), whole.rows(0, 24), atol=1e-6)
    np.testing.assert_allclose(sharded.rows(0, 24), one_by_one(queries), atol=1e-5)
    rows = np.array([23, 0, 7, 7])
    np.testing.assert_array_equal(sharded.take(rows), sharded.rows(0, 24)[rows])


def test_killed_it_resumes_at_the_shard_it_was_in(tmp_path):
    queries, every = make_queries(), Encoder()
    encode(queries, tmp_path / "whole", every)
    with pytest.raises(KeyboardInterrupt):
        encode(queries, tmp_path / "e", Encoder(stop_after=every.batches // 2))
    with pytest.raises(DataError, match="run `taser encode` for this task and split"):
        QueryEmbeddings.of_split(tmp_path / "e", "nq", "test")
    assert encoded_splits(tmp_path / "e") == []
    rest = Encoder()
    assert encode(queries, tmp_path / "e", rest)
    assert 0 < rest.batches < every.batches
    found = QueryEmbeddings.of_split(tmp_path / "e", "nq", "test")
    whole = QueryEmbeddings.of_split(tmp_path / "whole", "nq", "test")
    np.testing.assert_array_equal(found.rows(0, 24), whole.rows(0, 24))
    assert found.query_ids == queries.query_ids
    idle = Encoder(stop_after=0)
    assert encode(queries, tmp_path / "e", idle)


def test_queries_stay_float32_beside_bfloat16_passages(tmp_path):
    encode(make_queries(), tmp_path, config=EncodeConfig(dtype=EmbeddingDtype.BFLOAT16))
    found = QueryEmbeddings.of_split(tmp_path, "nq", "test").rows(0, 24)
    assert found.dtype == np.float32
    assert not np.array_equal(found, found.astype(EmbeddingDtype.BFLOAT16.numpy).astype("f4"))


@pytest.mark.parametrize("changed", PASSAGES)
def test_another_model_or_token_store_than_the_passages_is_refused(tmp_path, changed):
    encode(make_queries(), tmp_path)
    others = {**PASSAGES, changed: "other"}
    message = rf"(?s)queries/nq\.test was made from {changed} {PASSAGES[changed]}.*{changed} other"
    with pytest.raises(FingerprintError, match=message + ".*fix: encode queries and passages"):
        QueryEmbeddings.of_split(tmp_path, "nq", "test", fingerprints=others)
    with pytest.raises(FingerprintError, match="begun with fingerprints"):
        encode(make_queries(), tmp_path, fingerprints=others)
    QueryEmbeddings.of_split(tmp_path, "nq", "test", fingerprints=PASSAGES)


def test_queries_that_were_tokenised_otherwise_since_are_refused(tmp_path):
    encode(make_queries(), tmp_path)
    with pytest.raises(FingerprintError, match=r"nq\.test: begun with fingerprints"):
        encode(make_queries(seed=2), tmp_path)


def test_what_is_not_encoded_is_refused_with_what_is(tmp_path):
    encode(make_queries("a task"), tmp_path)
    encode(make_queries("fever"), tmp_path)
    assert encoded_splits(tmp_path) == [("a task", "test"), ("fever", "test")]
    message = r"(?s)nq\.test: no embeddings of task 'nq'.*; encoded: a task test, fever test"
    with pytest.raises(DataError, match=message):
        QueryEmbeddings.of_split(tmp_path, "nq", "test")
    with pytest.raises(DataError, match="split 'test'; encoded: none"):
        QueryEmbeddings.of_split(tmp_path / "nowhere", "nq", "test")


def test_passages_and_queries_are_not_taken_for_each_other(tmp_path):
    queries = make_queries()
    encode_texts(Encoder(), queries, tmp_path, fingerprints=PASSAGES)
    encode(queries, tmp_path)
    with pytest.raises(DataError, match="kind 'query embeddings'"):
        Embeddings.open(queries_directory(tmp_path, "nq", "test"))
    shutil.rmtree(tmp_path / "queries" / "nq.test")
    (tmp_path / "queries" / "nq.test").mkdir()
    shutil.copy(tmp_path / "metadata.json", tmp_path / "queries" / "nq.test")
    with pytest.raises(DataError, match="kind 'embeddings'"):
        QueryEmbeddings.of_split(tmp_path, "nq", "test")


def test_damaged_query_ids_are_named(tmp_path):
    encode(make_queries(), tmp_path)
    path = tmp_path / "queries" / "nq.test" / "query_ids.json"
    path.write_text(json.dumps(["one"]))
    (path.parent / "checksums.txt").unlink()
    with pytest.raises(DataError, match=r"query_ids\.json: 1 query ids for 24 embeddings"):
        _ = QueryEmbeddings.of_split(tmp_path, "nq", "test").query_ids


def test_no_queries_are_refused(tmp_path):
    with pytest.raises(DataError, match="no texts"):
        encode(make_queries(count=0), tmp_path)
