"""One door for all kinds of index: same answers, reuse, and refusal of what does not belong."""

import json
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest

from taser_jax.models.batch import Normalization
from taser_jax.retrieval.embeddings import Codes, Coding, Embeddings, write_embeddings
from taser_jax.retrieval.exact import ExactSearcher, Searcher
from taser_jax.retrieval.index import (
    FaissConfig,
    FaissSearcher,
    IndexConfig,
    IndexKind,
    build_index,
    open_index,
)
from taser_jax.retrieval.scann import ScannSearcher
from taser_jax.storage.artifacts import METADATA
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError

LIBRARIES = {IndexKind.SCANN: ScannSearcher, IndexKind.FAISS: FaissSearcher}
KINDS = [
    IndexKind.EXACT,
    *(pytest.param(kind, marks=pytest.mark.needs(kind.value)) for kind in LIBRARIES),
]
RNG = np.random.default_rng(0)
# The first dimensions decide little of the whole norm, so that normalising again matters.
TABLE = (RNG.standard_normal((300, 8)) * ([1.0] * 3 + [4.0] * 5)).astype(np.float32)
QUERIES = RNG.standard_normal((20, 8)).astype(np.float32)
RANKED = np.argsort(-(QUERIES @ TABLE.T), axis=1, kind="stable")


def write(directory, model="m1", normalization="none", table=TABLE):
    write_embeddings(directory, table, {"model": model, "collection": "c1"}, normalization)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_built_and_opened_find_the_same(tmp_path, kind):
    embeddings, config = write(tmp_path / "embeddings"), IndexConfig(kind=kind)
    built = build_index(embeddings, tmp_path / "index", config=config)
    again = build_index(embeddings, tmp_path / "index", config=config)
    opened = open_index(tmp_path / "index", fingerprints={"model": "m1", "collection": "c1"})
    for searcher in (built, again, opened):
        assert isinstance(searcher, Searcher)
        assert isinstance(searcher, LIBRARIES.get(kind, ExactSearcher))
        np.testing.assert_array_equal(searcher.search(QUERIES, 7).rows, RANKED[:, :7])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_are_in_the_order_of_rows(tmp_path, kind):
    twice = write(tmp_path / "embeddings", table=np.concatenate([TABLE, TABLE]))
    searcher = build_index(twice, tmp_path / "index", config=IndexConfig(kind=kind))
    pairs = np.stack([RANKED[:, :4], RANKED[:, :4] + len(TABLE)], axis=2)
    np.testing.assert_array_equal(searcher.search(QUERIES, 8).rows, pairs.reshape(-1, 8))


@pytest.mark.parametrize("kind", LIBRARIES)
def test_without_its_library_its_extra_is_named_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind.value, None)
    with pytest.raises(ConfigError, match=rf"(?s)not installed.*pip install .*\[{kind.value}\]"):
        IndexConfig(kind=kind)
    (tmp_path / "metadata.json").write_text(f'{{"kind": "{kind.value} index"}}')
    with pytest.raises(ConfigError, match=rf"\[{kind.value}\]"):
        open_index(tmp_path)


@pytest.mark.needs("faiss")
def test_faiss_reads_as_many_lists_as_are_probed(tmp_path, caplog):
    embeddings, recalls = write(tmp_path / "embeddings"), []
    for probes in (1, 8):
        faiss = FaissConfig(lists=8, probes=probes)
        config = IndexConfig(kind=IndexKind.FAISS, faiss=faiss)
        with caplog.at_level("INFO", logger="taser"):
            built = build_index(embeddings, tmp_path / str(probes), config=config)
        rows = built.search(QUERIES, 7).rows
        shared = [np.isin(*pair).mean() for pair in zip(RANKED[:, :7], rows, strict=True)]
        recalls.append(float(np.mean(shared)))
    # All eight lists are all passages.
    assert recalls[0] < recalls[1] == 1.0
    assert "recall@100 1.0000 against exact search" in caplog.text
    # One list of eight has not 250 passages: the others are none.
    last = open_index(tmp_path / "1").search(QUERIES, 250)
    assert (last.rows[:, -1] == -1).any()
    assert (last.scores[last.rows == -1] == -np.inf).all()


@pytest.mark.needs("faiss")
def test_what_faiss_cannot_make_lists_of_is_named(tmp_path):
    config = IndexConfig(kind=IndexKind.FAISS, faiss=FaissConfig(lists=301))
    with pytest.raises(ConfigError, match="301 lists of 300 passages"):
        build_index(write(tmp_path / "embeddings"), tmp_path / "index", config=config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_embeddings_that_are_not_finite_are_refused_with_their_rows(tmp_path, kind, value):
    bad, config = TABLE.copy(), IndexConfig(kind=kind)
    bad[[3, 17], 1] = value
    with pytest.raises(DataError, match=r"passage embeddings: .* in 2 rows: 3, 17"):
        build_index(write(tmp_path / "bad", table=bad), tmp_path / "bad index", config=config)
    assert not (tmp_path / "bad index" / METADATA).exists()
    index = build_index(write(tmp_path / "whole"), tmp_path / "index", config=config)
    with pytest.raises(DataError, match=r"query embeddings: .*: 3, 17"):
        index.search(bad[:20], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_or_collection_is_refused(tmp_path, kind):
    embeddings, others = write(tmp_path / "embeddings"), write(tmp_path / "others", "m2")
    config = IndexConfig(kind=kind)
    build_index(embeddings, tmp_path / "index", config=config)
    with pytest.raises(FingerprintError, match="model m1"):
        open_index(tmp_path / "index", fingerprints={"model": "m2"})
    with pytest.raises(FingerprintError, match="collection c1"):
        open_index(tmp_path / "index", fingerprints={"collection": "c2"})
    with pytest.raises(FingerprintError, match="'model': 'm1'"):
        build_index(others, tmp_path / "index", config=config)


def test_embeddings_replaced_under_an_exact_index_are_refused(tmp_path):
    embeddings = write(tmp_path / "embeddings")
    build_index(embeddings, tmp_path / "index")
    shutil.rmtree(embeddings)
    with pytest.raises(DataError, match="no finished embeddings"):
        open_index(tmp_path / "index")
    write(embeddings, "m2")
    with pytest.raises(FingerprintError, match="model m2"):
        open_index(tmp_path / "index")
    with pytest.raises(DataError, match="no finished exact index"):
        open_index(tmp_path / "nothing")


@pytest.mark.parametrize("linked", ["index", "embeddings", "."])
def test_an_index_and_its_embeddings_may_be_symbolic_links(tmp_path, linked):
    (tmp_path / "another" / "disk").mkdir(parents=True)
    place = tmp_path / "runs" / linked
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(tmp_path / "another" / "disk")
    embeddings = write(tmp_path / "runs" / "embeddings")
    index = tmp_path / "runs" / "index"
    searchers = [build_index(embeddings, index), build_index(embeddings, index)]
    if linked == ".":
        # Both move together.
        (tmp_path / "another" / "disk").rename(tmp_path / "moved")
        searchers.append(open_index(tmp_path / "moved" / "index"))
    for searcher in searchers:
        assert searcher.search(TABLE[:1], 1).rows.shape == (1, 1)


@pytest.mark.parametrize("normalization", list(Normalization))
@pytest.mark.parametrize("dim", [3, 8])
def test_the_first_dimensions_are_searched_as_cut_vectors(normalization, dim, tmp_path):
    embeddings = write(tmp_path / "embeddings", normalization=normalization.value)
    build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=dim))
    hits = open_index(tmp_path / "index", fingerprints={"model": "m1"}).search(QUERIES, 5)
    sides = [side[:, :dim].astype(np.float64) for side in (QUERIES, TABLE)]
    if normalization is Normalization.L2:
        sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
    scores = sides[0] @ sides[1].T
    expected = np.argsort(-scores, axis=1)[:, :5]
    np.testing.assert_array_equal(hits.rows, expected)
    np.testing.assert_allclose(hits.scores, np.take_along_axis(scores, expected, axis=1), rtol=1e-5)
    is_whole = dim == 8 and normalization is Normalization.NONE
    assert np.array_equal(hits.rows, RANKED[:, :5]) == is_whole


def test_what_cannot_be_cut_is_refused(tmp_path):
    embeddings = write(tmp_path / "embeddings")
    for dim in (0, 9):
        with pytest.raises(ConfigError, match=f"the first {dim} dimensions of 8"):
            build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=dim))
    with pytest.raises(ConfigError, match="a scann index of the first"):
        IndexConfig(kind=IndexKind.SCANN, dim=3)
    unknown = write(tmp_path / "unknown")
    facts = json.loads((unknown / "metadata.json").read_text()) | {"normalization": None}
    (unknown / "metadata.json").write_text(json.dumps(facts))
    (unknown / "checksums.txt").unlink()
    with pytest.raises(DataError, match="not recorded how"):
        build_index(unknown, tmp_path / "index", config=IndexConfig(dim=3))
    assert not (tmp_path / "index").exists()
    build_index(embeddings, tmp_path / "index", config=IndexConfig(dim=3))
    with pytest.raises(FingerprintError, match="begun with dim 3"):
        build_index(embeddings, tmp_path / "index")
    with pytest.raises(ConfigError, match=r"\[queries, 8\]"):
        open_index(tmp_path / "index").search(QUERIES[:, :3], 5)


def test_int8_codes_are_within_half_a_step_of_float32_and_bfloat16():
    scale = float(np.abs(TABLE).max()) / 127
    coding = Coding(Codes.INT8, scale)
    for embeddings in (TABLE, TABLE.astype(ml_dtypes.bfloat16)):
        decoded = coding.decode(coding.encode(embeddings))
        # 127 steps of the scale reach the largest number but for its rounding to bfloat16.
        np.testing.assert_allclose(decoded, embeddings.astype(np.float32), atol=0.5001 * scale)


def test_binary_codes_need_whole_bytes(tmp_path):
    embeddings = Embeddings(write(tmp_path, table=TABLE[:, :6]))
    with pytest.raises(ConfigError, match="binary codes of 6 dimensions"):
        Coding.of(Codes.BINARY, embeddings)
