"""Retriever: the same embeddings and results as the commands and sentence-transformers give."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
from capitals import PASSAGES

from taser_jax import Passage, Retriever
from taser_jax.data.collections.store import PassageStore, write_collection
from taser_jax.data.prepare.detection import given_passages
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Role
from taser_jax.retrieval.bm25 import Bm25Index, title_and_text
from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.retrieval.fusion import DEFAULT_SHARE, ScoreNormalization
from taser_jax.retrieval.passages import Collection, Passages, Sparse
from taser_jax.retrieval.runs import SearchResult
from taser_jax.retriever_parts import RETRIEVER_FILE, RetrieverParts, read_parts, write_parts
from taser_jax.serving.engine import Engine, Work
from taser_jax.storage.errors import ConfigError, DataError, TaserError

CAPITALS = [Passage(id=id, title=title, text=text) for id, (title, text) in PASSAGES.items()]


@pytest.fixture(scope="module")
def parts(compared, small_world):
    """A model of the small comparison with the index of its second round."""
    return RetrieverParts(
        model_dir=str(compared / "taser-2" / "model"),
        index_dir=str(compared / "taser-2" / "index"),
        data_dir=str(small_world.data_dir),
        collection="small",
    )


def load(parts: RetrieverParts) -> Retriever:
    """The retriever of a model and collection that are named one by one."""
    names = ("index_dir", "data_dir", "collection")
    return Retriever.load(parts.model_dir, **{name: getattr(parts, name) for name in names})


@pytest.fixture(scope="module")
def trained(parts):
    return load(parts)


@pytest.fixture
def hybrid_dir(parts, compared, tmp_path):
    """A retriever's folder with BM25, whose weight is 0.3."""
    plain = {"alpha": 0.3, "normalization": ScoreNormalization.NONE}
    beside = dataclasses.replace(parts, bm25_dir=str(compared / "bm25" / "index"), **plain)
    write_parts(tmp_path, beside)
    return tmp_path


def scores_of(result: SearchResult, ids: Sequence[str], query: int) -> dict[str, float]:
    """Passage -> score of a query's results."""
    found = zip(result.rows[query], result.scores[query], strict=True)
    return {ids[row]: float(score) for row, score in found if row >= 0}


@pytest.fixture
def collection(tmp_path):
    """The capitals on disk, the first with a duplicate merged into it; embeddings are unit axes."""
    store = write_collection(tmp_path, "capitals", CAPITALS, aliases={"twin": 0})
    return Collection(store, ExactSearcher(np.eye(len(CAPITALS), dtype=np.float32)))


@pytest.fixture
def on_disk(collection):
    return Passages(collection)


def test_texts_are_encoded_as_the_token_store_has_them(trained, parts, small_world):
    tokens = TokenStore.open(small_world.token_store)
    passages = PassageStore.open(parts.data_dir, parts.collection)
    rows = np.array([0, 3, len(tokens) - 1])
    of_tokens = trained.model.encode_fn(Role.PASSAGE)(tokens.passages.tokens(rows))
    of_texts = trained.encode_passages(passages.get_many(rows.tolist()))
    np.testing.assert_allclose(of_texts, of_tokens, atol=1e-5)


def test_a_hybrid_search_adds_bm25s_scores(parts, compared, hybrid_dir):
    alpha, k = 0.3, 7
    retriever = Retriever.load(hybrid_dir)
    assert retriever.has_hybrid
    questions = ["how is a list sorted", "zzzz"]
    hybrid = retriever.search(questions, k=k, hybrid=True)
    dense = retriever.search(questions, k=100)
    assert np.abs([hit.score for hits in dense for hit in hits]).max() > 1, "cosines are scaled"
    sparse = Bm25Index(compared / "bm25" / "index").search(questions, 100)
    store = PassageStore.open(parts.data_dir, parts.collection)
    for number, hits in enumerate(hybrid):
        by_dense = {hit.passage.id: hit.score for hit in dense[number]}
        by_bm25 = scores_of(sparse, store.ids, number)
        # What a list lacks has its least score; BM25 knows no word of the second question.
        least_dense, least_bm25 = min(by_dense.values()), min(by_bm25.values(), default=0.0)
        sums = {
            id: by_dense.get(id, least_dense) + alpha * by_bm25.get(id, least_bm25)
            for id in by_dense.keys() | by_bm25.keys()
        }
        expected = sorted(sums.values(), reverse=True)[:k]
        np.testing.assert_allclose([hit.score for hit in hits], expected, atol=1e-5)
        for hit in hits:
            assert hit.score == pytest.approx(sums[hit.passage.id], abs=1e-5)
            assert hit.dense == pytest.approx(by_dense.get(hit.passage.id), abs=1e-5)
            assert hit.sparse == pytest.approx(by_bm25.get(hit.passage.id), abs=1e-5)
    assert not by_bm25


@pytest.mark.parametrize("normalization", [ScoreNormalization.NONE, ScoreNormalization.MIN_MAX])
def test_a_hybrid_search_adds_scores_as_they_were_when_alpha_was_chosen(
    collection, tmp_path, normalization
):
    """Whatever its own scores are, which are small, and those of the questions beside it."""
    index = Bm25Index.build(map(title_and_text, CAPITALS), tmp_path / "bm25")
    sparse = Sparse(index, 0.5, normalization)
    passages = Passages(dataclasses.replace(collection, sparse=sparse))
    vectors = np.stack([np.linspace(0, 0.9, len(CAPITALS)), np.linspace(0, 90, len(CAPITALS))])
    questions = ["the Seine in Paris", "Berlin"]
    both = passages.hybrid_search(questions, vectors, k=3)
    alone = [passages.hybrid_search([q], vectors[[n]], k=3) for n, q in enumerate(questions)]
    assert both == [hits for (hits,) in alone]
    assert (both[0][0].score < 1) is (normalization is ScoreNormalization.MIN_MAX)


def test_a_hybrid_search_of_changed_passages_is_bm25_built_anew(
    parts, compared, tmp_path, hybrid_dir
):
    config = Bm25Index(compared / "bm25" / "index").config
    retriever = Retriever.load(hybrid_dir)
    store = list(PassageStore.open(parts.data_dir, parts.collection))
    retriever.remove([store[0].id, store[5].id])
    retriever.add(CAPITALS)
    changed = dataclasses.replace(store[7], text="Paris and the Seine, list by list")
    retriever.update([changed])
    others = [*store[1:5], store[6], *store[8:], *CAPITALS]
    live = {passage.id: passage for passage in [*others, changed]}
    assert len(retriever) == len(live)
    texts = [title_and_text(passage) for passage in live.values()]
    index = Bm25Index.build(texts, tmp_path / "bm25", config=config)
    question = "which list is on the Seine in Paris"
    expected = scores_of(index.search([question], len(live)), list(live), 0)
    (hits,) = retriever.search([question], k=len(live), hybrid=True)
    assert {hit.passage.id: hit.passage for hit in hits} == live
    assert {hit.passage.id: hit.sparse for hit in hits if hit.sparse is not None} == expected
    saved = tmp_path / "saved"
    retriever.save(saved)
    again = Retriever.load(saved)
    assert again.has_hybrid
    (after,) = again.search([question], k=len(live), hybrid=True)
    ranked, reloaded = ([(hit.passage.id, round(hit.score, 4)) for hit in h] for h in (hits, after))
    assert reloaded == ranked


def test_without_a_comparison_alpha_is_the_default(minilm, tmp_path):
    retriever = Retriever.from_pretrained(minilm, passage_length=16)
    retriever.add(CAPITALS)
    (hits,) = retriever.search(["the Seine in Paris"], k=8, hybrid=True)
    first, second, *others = (hit for hit in hits if hit.sparse is not None)
    widths = [
        np.ptp([hit.dense for hit in hits]),
        np.ptp([hit.sparse for hit in (first, second, *others)]),
    ]
    # Both lists are scaled to a width of 1.
    dense, sparse = (first.dense - second.dense, first.sparse - second.sparse) / np.array(widths)
    assert first.score - second.score == pytest.approx(dense + DEFAULT_SHARE * sparse, abs=1e-5)
    retriever.save(tmp_path / "saved")
    again = Retriever.load(tmp_path / "saved")
    assert not again.has_hybrid
    assert again.model.fingerprint == retriever.model.fingerprint
    assert again.texts == retriever.texts
    assert again.search(["Paris"], k=8) == retriever.search(["Paris"], k=8)
    with pytest.raises(ConfigError, match="there is a retriever here"):
        retriever.save(tmp_path / "saved")


def test_passages_of_every_form_are_the_same(trained, tmp_path):
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    rows = [
        {"doc-id": passage.id, "Headline": passage.title, "Body": passage.text}
        for passage in CAPITALS
    ]
    (tmp_path / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [rows, CAPITALS, iter(CAPITALS), tmp_path, str(tmp_path / "capitals.jsonl")]
    for source in (*sources, pandas.DataFrame(rows), polars.DataFrame(rows)):
        assert list(given_passages(source)) == CAPITALS
    texts = ["a text", "another", "a text"]
    first, second, third = given_passages(texts)
    assert first == third != second
    assert list(given_passages(pandas.Series([*texts, " "]))) == [first, second, third]
    with pytest.raises(DataError, match=r"no table of Arrow(.|\n)*one type"):
        list(given_passages(pandas.DataFrame({"id": [1, "b"], "text": texts[:2]})))
    retriever = Retriever(trained.model, trained.vocabulary, facts=trained.facts)
    retriever.add(texts)
    retriever.add(texts)
    assert len(retriever) == len(retriever.search(["a text"], k=9)[0]) == 2
    assert len(retriever.search(text for text in texts)) == 3
    retriever.remove(iter([second.id]))
    assert len(retriever) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/file", "no such file or folder"),
        ([3], "passage 0: found 3"),
        ([{"title": "no text"}], "no field 'text'"),
        (None, "found one NoneType"),
        ([Passage("1", "a"), Passage("1", "b")], "another passage has the id '1'"),
    ],
)
def test_what_is_no_passage_is_refused(trained, source, message):
    retriever = Retriever(trained.model, trained.vocabulary, facts=trained.facts)
    with pytest.raises(TaserError, match=message):
        retriever.add(source)
    with pytest.raises(DataError, match="no passage 'x'"):
        retriever.remove(["x"])
    with pytest.raises(ConfigError, match="there are no passages"):
        retriever.save("nowhere")
    with pytest.raises(ConfigError, match="there are no passages"):
        retriever.search(["Paris"])


def test_bm25_and_its_weight_belong_together(parts, tmp_path):
    write_parts(tmp_path, dataclasses.replace(parts, alpha=0.5))
    with pytest.raises(DataError, match="without the other"):
        Retriever.load(tmp_path)


def test_an_engine_serves_a_retriever_of_the_disk(parts, hybrid_dir):
    engine = Engine(lambda: Retriever.load(hybrid_dir), warm_batches=(1, 4))
    questions = ["how is a list sorted", "read a file"]
    work = Work("search", k=10, hybrid=True)
    assert engine.compute(work, questions) == engine.retriever.search(questions, k=10, hybrid=True)
    passages = engine.compute(Work("encode_passages"), questions)
    np.testing.assert_array_equal(passages, engine.retriever.encode_passages(questions))
    # A retriever that cannot be read is none.
    (hybrid_dir / RETRIEVER_FILE).write_text("{")
    assert not engine.reload()
    assert engine.compute(work, questions)
    write_parts(hybrid_dir, parts)
    assert engine.reload()
    assert not engine.retriever.has_hybrid


def test_an_id_that_is_taken_is_refused(parts):
    retriever = load(parts)
    stored = PassageStore.open(parts.data_dir, parts.collection)[0]
    retriever.add(CAPITALS[:1])
    for new, twice in ((stored, False), (CAPITALS[0], False), (CAPITALS[1], True)):
        retriever.add([new])
        changed = dataclasses.replace(new, text="other")
        with pytest.raises(DataError, match="another passage has the id"):
            retriever.add([new, changed] if twice else [changed])
        assert len(retriever.search(["Paris"], k=len(retriever))[0]) == len(retriever)
        retriever.update([changed])
        (hits,) = retriever.search(["Paris"], k=len(retriever))
        assert [hit.passage for hit in hits if hit.passage.id == new.id] == [changed]


def test_the_id_of_a_merged_duplicate_is_no_passage(on_disk):
    assert on_disk.find("twin") is None
    assert on_disk.find(CAPITALS[0].id) == CAPITALS[0]
    on_disk.remove({"twin"})
    assert len(on_disk) == len(CAPITALS)


def test_no_results_are_asked_for_beside_removed_passages(on_disk):
    on_disk.remove({CAPITALS[0].id})
    with pytest.raises(ConfigError, match="k is 0"):
        on_disk.search(np.eye(1, len(CAPITALS), dtype=np.float32), 0)


def test_a_directory_names_its_parts_and_can_be_moved(parts, tmp_path, trained):
    """What lies in it moves with it; what lies elsewhere stays, and its absence is said."""
    shutil.copytree(parts.data_dir, tmp_path / "out" / "data")
    write_parts(tmp_path / "out", dataclasses.replace(parts, data_dir=str(tmp_path / "out/data")))
    named = json.loads((tmp_path / "out" / RETRIEVER_FILE).read_text())
    assert (named["data_dir"], named["model_dir"]) == ("data", os.path.realpath(parts.model_dir))
    (tmp_path / "other").mkdir()
    moved = (tmp_path / "out").rename(tmp_path / "other" / "place")
    hits = Retriever.load(moved).search(["sort a list"], k=3)
    assert hits == trained.search(["sort a list"], k=3)
    (moved / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"data_dir is 'data', and no such folder(.|\n)*move that"):
        Retriever.load(moved)


def test_a_part_may_be_in_a_bucket(tmp_path):
    parts = RetrieverParts("gs://bucket/model", str(tmp_path), str(tmp_path), "small")
    write_parts(tmp_path, parts)
    assert read_parts(tmp_path) == parts


def test_a_damaged_list_of_parts_is_named(tmp_path):
    (tmp_path / RETRIEVER_FILE).write_text('{"format_version": 1, "model_dir": "model"}')
    with pytest.raises(DataError, match="required field 'index_dir'"):
        Retriever.load(tmp_path)


def test_a_collection_is_named_with_all_its_parts_or_by_its_directory(parts, hybrid_dir):
    cases = {parts.model_dir: "without the others", hybrid_dir: r"beside retriever\.json"}
    for directory, there in cases.items():
        with pytest.raises(ConfigError, match=f"(?s)index_dir {there}.*name index_dir, data_dir"):
            Retriever.load(directory, index_dir=parts.index_dir)


def test_queries_of_mixed_lengths_are_one_call_of_the_model(trained, monkeypatch):
    queries = ["a", "b " * 20, "c d"]
    apart = np.concatenate([trained.encode_queries([query]) for query in queries])
    shapes, encode = [], trained._encode_query
    monkeypatch.setattr(
        trained, "_encode_query", lambda tokens: shapes.append(tokens.ids.shape) or encode(tokens)
    )
    np.testing.assert_allclose(trained.encode_queries(queries), apart, atol=1e-5)
    assert [rows for rows, _ in shapes] == [4]


def test_bad_questions_are_refused(trained):
    with pytest.raises(ConfigError, match="questions is a string"):
        trained.search("what is Python?")
    with pytest.raises(ConfigError, match="an empty question"):
        trained.search(["what is Python?", " "])
    with pytest.raises(ConfigError, match=r"questions has None\n.*fix: write a string"):
        trained.search(["what is Python?", None])
    with pytest.raises(ConfigError, match="k is 0"):
        trained.search(["what is Python?"], k=0)
    # Not as many rows as were asked for.
    assert len(trained.search(["what is Python?"], k=10**15)[0]) == len(trained)
    assert trained.search([]) == []


@pytest.mark.release
def test_pretrained_weights_embed_as_sentence_transformers_do(minilm):
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(str(minilm))
    retriever = Retriever.from_pretrained(minilm)
    texts = ["what is Python?", "Paris lies on the Seine. " * 100, "x"]
    np.testing.assert_allclose(retriever.encode_passages(texts), reference.encode(texts), atol=2e-6)
    short = [texts[0], texts[2]]
    np.testing.assert_allclose(retriever.encode_queries(short), reference.encode(short), atol=2e-6)
    assert retriever.encode_queries([]).shape == (0, 384)
