"""Search by the first dimensions of embeddings."""

import json

import numpy as np
import pytest

from taser_jax.models.batch import Tokens
from taser_jax.models.encoded import Normalization
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.retrieval.index import IndexConfig, IndexKind, build_index, open_index
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError

RNG = np.random.default_rng(0)
# The first dimensions decide little of the whole norm, so that normalising again matters.
PASSAGES = (RNG.normal(size=(60, 8)) * ([1.0] * 3 + [4.0] * 5)).astype(np.float32)
QUERIES = RNG.normal(size=(9, 8)).astype(np.float32)


class Texts:
    lengths = np.ones(len(PASSAGES), np.int32)

    def tokens(self, rows):
        ids = np.asarray(rows, np.int32)[:, None]
        return Tokens(ids, np.ones_like(ids, bool))


def write(directory, normalization):
    encode_texts(
        lambda tokens: PASSAGES[tokens.ids[:, 0]],
        Texts(),
        directory,
        fingerprints={"model": "m"},
        config=EncodeConfig(shard_rows=7, length_multiple=1),
        normalization=normalization,
    )
    return directory


@pytest.mark.parametrize("normalization", list(Normalization))
@pytest.mark.parametrize("dim", [3, 8])
def test_equals_search_among_cut_vectors(normalization, dim, tmp_path):
    embeddings = write(tmp_path / "embeddings", normalization)
    build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=dim))
    found = open_index(tmp_path / "index", fingerprints={"model": "m"}).search(QUERIES, 5)
    first, second = (side[:, :dim].astype(np.float64) for side in (QUERIES, PASSAGES))
    if normalization is Normalization.L2:
        first, second = (
            side / np.linalg.norm(side, axis=1, keepdims=True) for side in (first, second)
        )
    scores = first @ second.T
    expected = np.argsort(-scores, axis=1)[:, :5]
    np.testing.assert_array_equal(found.rows, expected)
    np.testing.assert_allclose(
        found.scores, np.take_along_axis(scores, expected, axis=1), rtol=1e-5
    )
    whole = np.argsort(-(QUERIES @ PASSAGES.T), axis=1)[:, :5]
    assert np.array_equal(found.rows, whole) == (dim == 8 and normalization is Normalization.NONE)


def test_one_directory_has_an_index_for_each_dimension(tmp_path):
    embeddings = write(tmp_path / "embeddings", Normalization.NONE)
    build_index(embeddings, tmp_path / "3", config=IndexConfig(dim=3))
    build_index(embeddings, tmp_path / "all")
    assert "dim" not in json.loads((tmp_path / "all" / "metadata.json").read_text())
    with pytest.raises(FingerprintError, match="begun with dim 3"):
        build_index(embeddings, tmp_path / "3")


def test_refusals(tmp_path):
    embeddings = write(tmp_path / "embeddings", Normalization.NONE)
    for dim in (0, 9):
        with pytest.raises(ConfigError, match=f"the first {dim} dimensions of 8"):
            build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=dim))
    with pytest.raises(ConfigError, match="a scann index of the first"):
        IndexConfig(kind=IndexKind.SCANN, dim=3)
    unknown = write(tmp_path / "unknown", None)
    with pytest.raises(DataError, match="not recorded how"):
        build_index(unknown, tmp_path / "index", config=IndexConfig(dim=3))
    assert not (tmp_path / "index").exists()
    build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=3))
    with pytest.raises(ConfigError, match=r"\[queries, 8\]"):
        open_index(tmp_path / "index").search(QUERIES[:, :3], 5)
