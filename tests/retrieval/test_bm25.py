"""BM25 by hand and against its formula in float64; ties, misses, reuse and refusals."""

import collections
import math
import unicodedata

import numpy as np
import pytest

from taser_jax.retrieval import bm25
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.storage.records import Passage

PLAIN = bm25.Bm25Config(stemming=bm25.Stemming.NONE, stopwords=bm25.Stopwords.NONE)


def oracle(passages, query, k1, b):
    counts = [collections.Counter(text.split()) for text in passages]
    lengths = np.array([count.total() for count in counts])
    scores = np.zeros(len(passages))
    for word in query.split():
        tf = np.array([count[word] for count in counts])
        containing = np.count_nonzero(tf)
        idf = math.log(1 + (len(passages) - containing + 0.5) / (containing + 0.5))
        scores += idf * tf / (tf + k1 * (1 - b + b * lengths / lengths.mean()))
    return scores


def test_by_hand(tmp_path):
    assert bm25.title_and_text(Passage(id="1", title="cat", text="sat")) == "cat sat"
    # Two passages of two words; "cat" is in one: idf = ln(1 + 1.5/1.5) = ln 2, tf = 1, mean
    # length, so the score is ln 2 / (1 + 0.9).
    index = bm25.Bm25Index.build(["cat sat", "dog sat"], tmp_path / "index", config=PLAIN)
    hits = index.search(["cat"], 2)
    assert hits.rows.tolist() == [[0, -1]]
    assert hits.scores[0, 0] == pytest.approx(math.log(2) / 1.9, rel=1e-6)
    assert hits.scores[0, 1] == -np.inf


def test_equals_the_formula_with_ties_by_row(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(30)]
    passages = [" ".join(rng.choice(words, rng.integers(1, 12))) for _ in range(200)]
    passages += passages[:50]  # exact ties
    queries = [" ".join(rng.choice([*words, "unknown"], 4)) for _ in range(30)]
    config = bm25.Bm25Config(k1=1.2, b=0.7, stemming=bm25.Stemming.NONE)
    index = bm25.Bm25Index.build(passages, tmp_path / "index", config=config)
    for k in (5, 40, 300):
        hits = index.search(queries, k)
        for query, rows, scores in zip(queries, hits.rows, hits.scores, strict=True):
            expected = oracle(passages, query, 1.2, 0.7)
            num = min(k, np.count_nonzero(expected))
            assert (rows[num:] == -1).all()
            assert np.isneginf(scores[num:]).all()
            best = np.sort(expected)[::-1][:num]
            np.testing.assert_allclose(scores[:num], best, rtol=1e-5)
            np.testing.assert_allclose(expected[rows[:num]], best, rtol=1e-5)
            same = np.diff(scores[:num]) == 0
            assert same.any() or num < 10
            assert (np.diff(rows[:num])[same] > 0).all()


def test_a_possessive_is_its_word(tmp_path):
    """Lucene's English analyser: "Newton's" is "newton", and 's matches nothing."""
    texts = ["Newton's laws", "Ohm\u2019s law", "the laws of thermodynamics", "it is class s"]
    index = bm25.Bm25Index.build(texts, tmp_path / "index")
    queries = ["newton", "OHM'S", "dog's", "s"]
    assert index.search(queries, 1).rows.tolist() == [[0], [1], [-1], [3]]
    # Lengths count it no more, either: both passages are one word long.
    twice = bm25.Bm25Index.build(["dog's", "dog", "cat"], tmp_path / "twice")
    scores = twice.search(["dog"], 2).scores[0]
    assert scores[0] == scores[1]
    # As a word of its own it was a term, stemmed to nothing, that possessives share.
    split = bm25.Bm25Config(possessives=bm25.Possessives.SPLIT)
    index = bm25.Bm25Index.build(texts, tmp_path / "split", config=split)
    assert set(index.search(["dog's"], 3).rows[0].tolist()) == {0, 1, 3}


def test_stems_and_stopwords(tmp_path):
    # Passages without words keep their rows.
    texts = ["", "The cats were running", "a dog"]
    stemmed = bm25.Bm25Index.build(texts, tmp_path / "stemmed")
    assert stemmed.search(["CAT run", "the a"], 1).rows.tolist() == [[1], [-1]]
    plain = bm25.Bm25Index.build(texts, tmp_path / "plain", config=PLAIN)
    assert plain.search(["CAT run", "the a"], 2).rows.tolist() == [[-1, -1], [2, 1]]


def test_words_of_all_scripts(tmp_path):
    texts = [
        "北京是中国的首都。东京是日本的首都。",
        "上海是中国最大的城市",
        unicodedata.normalize("NFD", "Müller läuft"),
        "กรุงเทพเป็นเมืองหลวงของประเทศไทย",
        "नई दिल्ली भारत",
        "Ｐｙｔｈｏｎ ３",
        "ﾃﾞｰﾀ",
        "mu ller tallinn द ल ร งเทพเป",
    ]
    index = bm25.Bm25Index.build(texts, tmp_path / "index")
    queries = ["日本", "上海", "müller", "กรุงเทพ", "दिल्ली", "python", "3", "データ", "猫"]
    assert index.search(queries, 1).rows.tolist() == [[n] for n in (0, 1, 2, 3, 4, 5, 5, 6, -1)]


@pytest.mark.parametrize("config", [bm25.Bm25Config(), PLAIN])
def test_words_of_queries_are_forgotten(tmp_path, monkeypatch, config):
    monkeypatch.setattr(bm25, "_REMEMBERED", 3)
    index = bm25.Bm25Index.build(["cats", "a dog"], tmp_path / "index", config=config)
    for number in range(9):
        assert index.search([f"cats x{number}", "dog"], 1).rows.tolist() == [[0], [1]]
        assert len(index._tokenizer.word_to_stem) <= 3


def test_opened_equals_built_and_is_not_built_again(tmp_path):
    fingerprints = {"collection": "abc"}
    built = bm25.Bm25Index.build(["one two", "two"], tmp_path / "index", fingerprints=fingerprints)
    # Read again, the texts would be none.
    again = bm25.Bm25Index.build([], tmp_path / "index", fingerprints=fingerprints)
    opened = bm25.Bm25Index(tmp_path / "index", fingerprints=fingerprints)
    for index in (again, opened):
        assert index.config == built.config
        scores = [each.search(["two"], 2).scores for each in (index, built)]
        np.testing.assert_array_equal(*scores)


def test_another_collection_or_configuration_is_refused(tmp_path):
    bm25.Bm25Index.build(["one"], tmp_path / "index", fingerprints={"collection": "abc"})
    with pytest.raises(FingerprintError, match="collection abc"):
        bm25.Bm25Index(tmp_path / "index", fingerprints={"collection": "def"})
    with pytest.raises(FingerprintError, match=r"k1=0.9"):
        bm25.Bm25Index.build(["one"], tmp_path / "index", config=bm25.Bm25Config(k1=2.0))


def test_bad_input(tmp_path):
    with pytest.raises(DataError, match="2 passages without a single word"):
        bm25.Bm25Index.build(["", "!"], tmp_path / "index")
    with pytest.raises(DataError, match="no finished bm25 index"):
        bm25.Bm25Index(tmp_path / "index")
    with pytest.raises(ConfigError, match="k is 0"):
        bm25.Bm25Index.build(["word"], tmp_path / "index").search(["word"], 0)
