"""What a lookup learns from attention: positives, negatives, and the store it trains on."""

import dataclasses

import numpy as np
import pytest
import tiny_training

from taser_jax.data.collections.store import write_collection
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, TokenStore
from taser_jax.retrieval.runs import Run, SearchResult
from taser_jax.storage.records import Passage
from taser_jax.systems.moma.augment import documents_shown
from taser_jax.systems.moma.distillation import attention_shares, distil, write_joined_store
from taser_jax.systems.moma.memories import Manifest, Memory, Mixture

# Two queries, six documents looked up, of which three are fused.
ROWS = np.array([[7, 3, 5, 9, 1, 8], [2, 4, 6, -1, -1, -1]], np.int32)
LOOKUP = Run(["a", "b"], ROWS, np.zeros((2, 6), np.float32))
ATTENTION = np.array([[0.1, 0.5, 0.2], [0.3, 0.3, 0.4]], np.float32)
GOLD = [np.array([5]), np.array([11, 12])]


@pytest.fixture
def mixture(tmp_path):
    memories = []
    for name, passages in (("source", 48), ("more", 60)):
        store = tiny_training.write_token_store(tmp_path / name, num_passages=passages)
        content = store.metadata.passages_fingerprint
        memories.append(Memory(name, str(store.directory), "tiny", content, len(store)))
    return Mixture(Manifest({}, tuple(memories), str(tmp_path / "parts")))


def test_positives_are_gold_and_most_attended_and_negatives_the_rest():
    positives, negatives = distil(GOLD, LOOKUP, ATTENTION, learned=2)
    assert [rows.tolist() for rows in positives] == [[5, 3], [11, 12, 6, 2]]
    assert [sorted(rows.tolist()) for rows in negatives] == [[1, 7, 8, 9], [4]]
    (gold, few), (_, again) = (
        distil(GOLD, LOOKUP, ATTENTION, learned=0, negatives=2) for _ in range(2)
    )
    assert [rows.tolist() for rows in gold] == [[5], [11, 12]]
    assert few.lengths.tolist() == [2, 2]
    np.testing.assert_array_equal(few.values, again.values)


def test_the_lookup_trains_on_all_memories(mixture, tmp_path):
    source = mixture.stores[0]
    queries = source.queries("first", "validation")
    data = dataclasses.replace(
        queries,
        positives=Ragged.from_lists([*rows, 50] for rows in mixture.gold("source", queries)),
        hard_negatives=Ragged.from_lists([[51, 52, 53]] * len(queries)),
    )
    joined = write_joined_store(tmp_path / "joined", mixture, source, [data])
    assert len(joined) == 60
    stores, rows = (joined, mixture.stores[1]), np.array([0, 47, 59])
    np.testing.assert_array_equal(*(store.passages.tokens(rows).ids for store in stores))
    read = TokenStore.open(tmp_path / "joined").queries(queries.task, queries.split)
    np.testing.assert_array_equal(read.ids, queries.ids)
    assert read.query_ids == queries.query_ids
    assert read.positives[0].tolist() == [queries.positives[0][0], 50]
    assert read.hard_negatives[0].tolist() == [51, 52, 53]


def test_a_trained_lookup_knows_the_prompts_of_the_source(mixture, tmp_path):
    """`taser ask` puts them before typed questions."""
    settings = QuerySettings(QueryNormalization.CURLY_APOSTROPHE, (7, 3))
    form = {"titles": "join", "passage_prompt": (9,)}
    writer = tiny_training.store_writer(tmp_path / "prompted", **form)
    writer.vocabulary_directory.mkdir(parents=True)
    writer.write_passages([[2, 9, 5, 3]], count=1)
    texts = {"query_ids": ["q"], "tokens": [[2, 7, 3, 5, 3]], "positives": [[0]]}
    writer.write_queries("first", "train", **texts, settings=settings)
    source = writer.finish()
    queries = [source.queries("first", "train")]
    about = write_joined_store(tmp_path / "joined", mixture, source, queries).metadata
    assert (about.titles, about.passage_prompt) == ("join", (9,))
    [entry] = about.queries
    assert (entry.normalization, entry.prompt) == ("curly_apostrophe", (7, 3))


def test_attention_is_shared_among_memories(mixture):
    rows = np.array([[0, 1, 50, 2], [55, 56, -1, -1]], np.int32)
    attention = np.array([[9.0, 0.2, 0.1, 0.3], [9.0, 0.3, 0.1, 0.0]], np.float32)
    split = attention_shares(mixture, rows, attention, gold=[np.array([1]), np.array([0])])
    # One of the first query's three documents of the source is relevant, none of the second's.
    shares = {"source, other": 0.2, "more": 0.7, "source, relevant": 0.1}
    assert split["attention"] == pytest.approx(shares)
    assert split["queries_with_gold"] == 0.5
    shares = {"source, other": 0.2, "more": 0.6, "source, relevant": 0.2}
    assert split["documents"] == pytest.approx(shares)


def test_documents_are_named_and_ordered_by_attention(mixture, tmp_path):
    """As `taser ask` prints those behind a question; 48 texts are of both memories."""
    texts = [Passage(id=f"p{i}", text=f"text {i}", title="title") for i in range(60)]
    write_collection(tmp_path / "data", "tiny", texts)
    rows = np.array([[3, 50, 7, 9], [55, -1, -1, -1]], np.int32)
    result = SearchResult(rows, np.array([[4, 3, 2, 1], [5, 0, 0, 0]], np.float32))
    # Three of the four are fused; the first column is the query's own tokens.
    attention = np.array([[9.0, 0.1, 0.3, 0.1], [9.0, 0.2, 0.0, 0.0]], np.float32)
    assert documents_shown(mixture, result, attention, data_dir=str(tmp_path / "data")) == [
        [
            "  from memory:",
            "    60%  more  [3.00]  title: text 50",
            "    20%  source  [4.00]  title: text 3",
            "    20%  source  [2.00]  title: text 7",
        ],
        ["  from memory:", "   100%  more  [5.00]  title: text 55"],
    ]
