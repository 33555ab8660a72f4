"""One door for both kinds of index: same answers, reuse, and refusal of what does not belong."""

import shutil
import sys

import numpy as np
import pytest

from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.models.batch import Tokens
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.retrieval.exact import ExactSearcher, Searcher
from taser_jax.retrieval.index import IndexConfig, IndexKind, build_index, open_index
from taser_jax.retrieval.scann import ScannSearcher
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError

KINDS = [IndexKind.EXACT, pytest.param(IndexKind.SCANN, marks=pytest.mark.needs("scann"))]
TABLE = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)


def encode(directory, *, model="m1", shift=0.0):
    tokens = TokenArray(ids=np.arange(300, dtype=np.int32)[:, None], lengths=np.ones(300, np.int32))

    def encode_fn(batch: Tokens):
        return TABLE[batch.ids[:, 0]] + np.float32(shift)

    encode_texts(
        encode_fn,
        tokens,
        directory,
        fingerprints={"model": model, "collection": "c1"},
        config=EncodeConfig(shard_rows=90),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_built_and_opened_find_the_same(tmp_path, kind):
    encode(tmp_path / "embeddings")
    config = IndexConfig(kind=kind)
    queries = TABLE[:20] * 2
    built = build_index(tmp_path / "embeddings", tmp_path / "index", config=config)
    again = build_index(tmp_path / "embeddings", tmp_path / "index", config=config)
    opened = open_index(tmp_path / "index", fingerprints={"model": "m1", "collection": "c1"})
    expected = np.argsort(-(queries @ TABLE.T), axis=1, kind="stable")[:, :7]
    for searcher in (built, again, opened):
        assert isinstance(searcher, Searcher)
        assert isinstance(searcher, ScannSearcher if kind is IndexKind.SCANN else ExactSearcher)
        np.testing.assert_array_equal(searcher.search(queries, 7).rows, expected)


def test_without_scann_its_extra_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scann", None)
    with pytest.raises(ConfigError, match=r"(?s)not installed.*pip install .*\[scann\]"):
        IndexConfig(kind=IndexKind.SCANN)
    (tmp_path / "metadata.json").write_text('{"kind": "scann index"}')
    with pytest.raises(ConfigError, match=r"\[scann\]"):
        open_index(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_or_collection_is_refused(tmp_path, kind):
    encode(tmp_path / "embeddings")
    encode(tmp_path / "others", model="m2")
    config = IndexConfig(kind=kind)
    build_index(tmp_path / "embeddings", tmp_path / "index", config=config)
    with pytest.raises(FingerprintError, match="model m1"):
        open_index(tmp_path / "index", fingerprints={"model": "m2"})
    with pytest.raises(FingerprintError, match="collection c1"):
        open_index(tmp_path / "index", fingerprints={"collection": "c2"})
    with pytest.raises(FingerprintError, match="'model': 'm1'"):
        build_index(tmp_path / "others", tmp_path / "index", config=config)


def test_embeddings_replaced_under_an_exact_index_are_refused(tmp_path):
    encode(tmp_path / "embeddings")
    build_index(tmp_path / "embeddings", tmp_path / "index")
    shutil.rmtree(tmp_path / "embeddings")
    with pytest.raises(DataError, match="no finished embeddings"):
        open_index(tmp_path / "index")
    encode(tmp_path / "embeddings", model="m2")
    with pytest.raises(FingerprintError, match="model m2"):
        open_index(tmp_path / "index")


def test_both_move_together(tmp_path):
    encode(tmp_path / "a" / "embeddings")
    build_index(tmp_path / "a" / "embeddings", tmp_path / "a" / "index")
    (tmp_path / "a").rename(tmp_path / "b")
    assert open_index(tmp_path / "b" / "index").search(TABLE[:1], 1).rows.shape == (1, 1)


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no finished exact index"):
        open_index(tmp_path / "index")
    with pytest.raises(DataError, match="no finished embeddings"):
        build_index(tmp_path / "embeddings", tmp_path / "index")
