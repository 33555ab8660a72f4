"""Encoding of passages and queries: one by one, resumed after a kill, on several processes."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest

from taser_jax.data.token_store.arrays import Ragged, TokenArray, TokenizedQueries, pack_tokens
from taser_jax.retrieval.embeddings import (
    EmbeddingDtype,
    Embeddings,
    QueryEmbeddings,
    encoded_splits,
)
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows, encode_texts
from taser_jax.storage.errors import DataError, FingerprintError

TABLE = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
CONFIG = EncodeConfig(batch_tokens=128, batch_multiple=2, length_multiple=8, shard_rows=40)
FINGERPRINTS = {"model": "m1", "collection": "c1", "vocabulary": "v1", "passages": "p1"}


class Encoder:
    """Sum of the real tokens' vectors, weighted by position; remembers the shapes it saw."""

    def __init__(self, stop_after=None):
        self.shapes = []
        self.stop_after = stop_after

    def __call__(self, tokens):
        if self.stop_after is not None and len(self.shapes) == self.stop_after:
            raise KeyboardInterrupt
        self.shapes.append(tokens.ids.shape)
        weights = tokens.mask / (1.0 + np.arange(tokens.ids.shape[1]))
        return np.einsum("bl,bld->bd", weights, TABLE[tokens.ids]).astype(np.float32)


RNG = np.random.default_rng(1)
LENGTHS = RNG.integers(1, 31, 150).astype(np.int32)
IDS = RNG.integers(1, 50, (150, 30)) * (np.arange(30) < LENGTHS[:, None])
TOKENS = TokenArray(ids=IDS.astype(np.int32), lengths=LENGTHS)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)


def one_by_one(texts):
    """Σ_l table[id_l] / (1 + l) in float64."""
    real = [ids[:length] for ids, length in zip(texts.ids, texts.lengths, strict=True)]
    weights = 1 / (1.0 + np.arange(texts.ids.shape[1]))
    return np.stack([weights[: len(ids)] @ TABLE[ids] for ids in real])


EXPECTED = one_by_one(TOKENS)


def encode(directory, encoder=None, tokens=TOKENS, config=CONFIG):
    encoder = encoder or Encoder()
    assert encode_texts(encoder, tokens, directory, fingerprints=FINGERPRINTS, config=config)
    return Embeddings(directory)


def test_buckets_equal_one_by_one_in_few_shapes(tmp_path):
    encoder = Encoder()
    np.testing.assert_allclose(encode(tmp_path / "e", encoder)[:], EXPECTED, atol=1e-5)
    assert set(encoder.shapes) <= {(4, 30), (4, 24), (8, 16), (16, 8)}
    computed = sum(batch * length for batch, length in encoder.shapes)
    assert computed < 0.8 * 150 * 30


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (3, [4]), (4, [4]), (9, [8, 8])])
def test_few_texts_take_a_power_of_two_of_rows_and_more_full_batches(count, sizes):
    encoder = Encoder()
    shortest = np.argsort(LENGTHS, kind="stable")[:count]
    config = dataclasses.replace(CONFIG, batch_tokens=64)
    embeddings = encode_rows(encoder, TOKENS, shortest, config=config)
    np.testing.assert_allclose(embeddings, EXPECTED[shortest], atol=1e-5)
    assert encoder.shapes == [(size, 8) for size in sizes]


def test_batches_hold_as_many_tokens_as_the_platform_likes():
    config = EncodeConfig(batch_multiple=8)
    assert config.batch_size(64, platform="cpu") == 2048 // 64
    assert config.batch_size(64, platform="tpu") == 16384 // 64
    assert config.batch_size(100, platform="cpu") == 16
    assert config.batch_size(512, platform="cpu") == 8
    assert EncodeConfig(batch_tokens=640).batch_size(64, platform="tpu") == 8


def test_files_are_row_aligned_and_named(tmp_path):
    embeddings = encode(tmp_path / "e")
    names = sorted(path.name for path in (tmp_path / "e").glob("*.npy"))
    assert names == [f"embeddings-0000{i}-of-00004.npy" for i in range(4)]
    assert [len(np.load(tmp_path / "e" / name)) for name in names] == [40, 40, 40, 30]
    for start, stop in [(0, 1), (39, 41), (35, 125), (150, 150), (100, 999)]:
        np.testing.assert_allclose(embeddings[start:stop], EXPECTED[start:stop], atol=1e-5)
    rows = np.array([149, 0, 40, 40, 7])
    np.testing.assert_allclose(embeddings.take(rows), EXPECTED[rows], atol=1e-5)


def test_killed_in_the_second_shard_resumes_without_the_first(tmp_path):
    undisturbed = Encoder()
    whole = encode(tmp_path / "whole", undisturbed)
    with pytest.raises(KeyboardInterrupt):
        encode(tmp_path / "e", Encoder(stop_after=len(undisturbed.shapes) // 2 - 1))
    finished = sorted((tmp_path / "e").glob("*.npy"))
    assert 1 <= len(finished) < 4
    with pytest.raises(DataError, match="no finished embeddings"):
        Embeddings(tmp_path / "e")
    written_at = finished[0].stat().st_mtime_ns

    again = Encoder()
    np.testing.assert_array_equal(encode(tmp_path / "e", again)[:], whole[:])
    assert len(again.shapes) < len(undisturbed.shapes)
    assert finished[0].stat().st_mtime_ns == written_at
    assert not list((tmp_path / "e").glob("*.partial"))

    idle = Encoder()
    encode(tmp_path / "e", idle)
    assert idle.shapes == []


def test_bfloat16_is_the_rounded_float32(tmp_path):
    exact = encode(tmp_path / "float32")[:]
    config = dataclasses.replace(CONFIG, dtype=EmbeddingDtype.BFLOAT16)
    rounded = encode(tmp_path / "bfloat16", config=config)
    assert rounded[:].dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(rounded[:].astype(np.float32), exact, rtol=2**-8)
    size = (tmp_path / "bfloat16" / "embeddings-00000-of-00004.npy").stat().st_size
    assert size == 128 + 40 * 6 * 2


def test_other_model_or_collection_is_refused(tmp_path):
    encode(tmp_path / "e")
    with pytest.raises(FingerprintError, match="model m1"):
        Embeddings(tmp_path / "e", fingerprints={"model": "m2"})
    with pytest.raises(FingerprintError, match="shard_rows 40"):
        encode(tmp_path / "e", config=EncodeConfig(shard_rows=50))


def test_nan_names_the_row_and_nothing_is_kept_and_no_texts_are_refused(tmp_path):
    def broken(batch):
        bad = (batch.ids == IDS[17, : batch.ids.shape[1]]).all(axis=1)
        return np.where(bad[:, None], np.nan, Encoder()(batch))

    with pytest.raises(DataError, match="row 17: the model's embedding has NaN"):
        encode(tmp_path / "e", broken)
    assert not list((tmp_path / "e").glob("*.npy*"))
    nothing = TokenArray(ids=np.zeros((0, 4), np.int32), lengths=np.zeros(0, np.int32))
    with pytest.raises(DataError, match="no texts"):
        encode(tmp_path / "e", tokens=nothing)


def make_queries(task="nq"):
    rng = np.random.default_rng(1)
    tokens = [rng.integers(1, 50, rng.integers(1, 20)).tolist() for _ in range(24)]
    packed, rows = pack_tokens(tokens, 20, 50, str), Ragged.from_lists([[0]] * 24)
    ids = [f"{task}/{number}" for number in range(24)]
    return TokenizedQueries(packed.ids, packed.lengths, rows, rows, ids, task, "test", f"t {task}")


def encode_split(queries, directory, **changes):
    options = {"fingerprints": FINGERPRINTS, "config": CONFIG, **changes}
    return encode_texts(Encoder(), queries, directory, queries=queries, **options)


def test_queries_on_several_processes_equal_one_by_one(tmp_path, monkeypatch):
    queries, config = make_queries(), dataclasses.replace(CONFIG, shard_rows=7)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for process in (2, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert not encode_split(queries, tmp_path, config=config, among_hosts=True)
        with pytest.raises(DataError, match="run `taser encode` for this task and split"):
            QueryEmbeddings.of_split(tmp_path, "nq", "test")
    assert encoded_splits(tmp_path) == []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert encode_split(queries, tmp_path, config=config, among_hosts=True)
    sharded = QueryEmbeddings.of_split(tmp_path, "nq", "test")
    assert len(list(sharded.directory.glob("embeddings-*.npy"))) == 4
    np.testing.assert_allclose(sharded[:], one_by_one(queries), atol=1e-5)
    assert sharded.query_ids == queries.query_ids


def test_queries_stay_float32_beside_bfloat16_passages(tmp_path):
    encode_split(make_queries(), tmp_path, config=EncodeConfig(dtype=EmbeddingDtype.BFLOAT16))
    vectors = QueryEmbeddings.of_split(tmp_path, "nq", "test")[:]
    assert vectors.dtype == np.float32
    assert not np.array_equal(vectors, vectors.astype(EmbeddingDtype.BFLOAT16.numpy).astype("f4"))


def test_another_token_store_than_the_passages_is_refused(tmp_path):
    encode_split(make_queries(), tmp_path)
    others = {**FINGERPRINTS, "passages": "other"}
    message = r"(?s)queries/nq\.test: made from passages p1.*passages other.*fix: encode queries"
    with pytest.raises(FingerprintError, match=message):
        QueryEmbeddings.of_split(tmp_path, "nq", "test", fingerprints=others)
    with pytest.raises(FingerprintError, match="begun with fingerprints"):
        encode_split(make_queries(), tmp_path, fingerprints=others)


def test_what_is_not_encoded_is_refused_with_what_is(tmp_path):
    encode_split(make_queries("a task"), tmp_path)
    encode_split(make_queries("fever"), tmp_path)
    assert encoded_splits(tmp_path) == [("a task", "test"), ("fever", "test")]
    with pytest.raises(DataError, match=r"task 'nq'.*; encoded: a task test, fever test"):
        QueryEmbeddings.of_split(tmp_path, "nq", "test")


def test_damaged_query_ids_are_named(tmp_path):
    encode_split(make_queries(), tmp_path)
    path = tmp_path / "queries" / "nq.test" / "query_ids.json"
    path.write_text(json.dumps(["one"]))
    (path.parent / "checksums.txt").unlink()
    with pytest.raises(DataError, match=r"query_ids\.json: 1 query ids for 24 embeddings"):
        _ = QueryEmbeddings.of_split(tmp_path, "nq", "test").query_ids
