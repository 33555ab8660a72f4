import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from taser_jax.data.text.preprocessors import (
    QueryNormalization,
    Titles,
    encode_passages,
    encode_queries,
    normalize_queries,
    passage_ids,
    query_ids,
)
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.text_settings import QuerySettings
from taser_jax.errors import ConfigError
from taser_jax.records import Passage

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, "'", "’"]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return WordPieceVocabulary(PIECES)


def ids(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text.split()]


def test_passages_by_hand(vocabulary):
    """Length 8 leaves room for 5 tokens beside a title's three special ones, 6 beside two."""
    cases = [
        ("t u", "a b", [CLS, *ids("t u"), SEP, *ids("a b"), SEP]),
        ("", "a b", [CLS, *ids("a b"), SEP]),
        ("  ", "a b c d e f g", [CLS, *ids("a b c d e f"), SEP]),
        ("t", "a b c d e f", [CLS, *ids("t"), SEP, *ids("a b c d"), SEP]),
        ("t u v w x y", "a", [CLS, *ids("t u v w"), SEP, *ids("a"), SEP]),
        ("t u v w x y", "a b c d e f", [CLS, *ids("t u v"), SEP, *ids("a b"), SEP]),
        ("t", "", [CLS, *ids("t"), SEP, SEP]),
        ("", "", [CLS, SEP]),
    ]
    titles, texts, expected = zip(*cases, strict=True)
    found = passage_ids(tf.constant(titles), tf.constant(texts), vocabulary, 8)
    assert found.to_list() == list(expected)


def test_queries_by_hand(vocabulary):
    texts = tf.constant(["a b c d e f", "a b", ""])
    assert query_ids(texts, vocabulary, 5).to_list() == [
        [CLS, *ids("a b c"), SEP],
        [CLS, *ids("a b"), SEP],
        [CLS, SEP],
    ]
    assert query_ids(texts, vocabulary, None).row_lengths().numpy().tolist() == [8, 4, 2]


def test_longest_first_drops_a_token_at_a_time(vocabulary):
    """Against the loop that the closed form stands for."""
    rng = np.random.default_rng(0)
    for length in (4, 5, 8, 9, 16):
        counts = rng.integers(0, 14, [60, 2])
        texts = [[" ".join(LETTERS[:n]) for n in column] for column in counts.T]
        found = passage_ids(tf.constant(texts[0]), tf.constant(texts[1]), vocabulary, length)
        for (title, text), row in zip(counts, found.to_list(), strict=True):
            special = 3 if title else 2
            while title + text > length - special:
                if title > text:
                    title -= 1
                else:
                    text -= 1
            middle = [*ids(" ".join(LETTERS[:title])), SEP] if special == 3 else []
            assert row == [CLS, *middle, *ids(" ".join(LETTERS[:text])), SEP]


def test_pairs_are_cut_as_tokenizers_cuts_them(vocabulary):
    """`tokenizers` gives the odd token of two long segments to the text; even room has no ties."""
    oracle = tokenizers.Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]")
    )
    oracle.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    oracle.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    oracle.enable_truncation(11, strategy="longest_first")
    rng = np.random.default_rng(1)
    pairs = [
        [" ".join(rng.choice(list(LETTERS), n)) for n in rng.integers(1, 14, 2)] for _ in "x" * 99
    ]
    titles, texts = zip(*pairs, strict=True)
    found = passage_ids(tf.constant(titles), tf.constant(texts), vocabulary, 11).to_list()
    assert found == [encoding.ids for encoding in oracle.encode_batch(pairs)]


def test_vocabulary_without_cls_puts_nothing_first(vocabulary):
    class NoCls(WordPieceVocabulary):
        """As T5's."""

        def __init__(self) -> None:
            super().__init__(PIECES)
            self.cls_id = None

    found = passage_ids(tf.constant(["t", ""]), tf.constant(["a b c d", "a b c d"]), NoCls(), 5)
    assert found.to_list() == [[*ids("t"), SEP, *ids("a b"), SEP], [*ids("a b c d"), SEP]]


def test_normalisation_is_by_name(vocabulary):
    texts = tf.constant(["who’s a"])
    curly = normalize_queries(texts, QueryNormalization.CURLY_APOSTROPHE)
    assert curly.numpy()[0].decode() == "who's a"
    assert normalize_queries(texts, QueryNormalization("none")).numpy()[0].decode() == "who’s a"
    tokens = encode_queries(
        ["b’s"],
        vocabulary,
        length=7,
        settings=QuerySettings(QueryNormalization.CURLY_APOSTROPHE, prompt=(SEP,)),
    )
    assert tokens.ids.tolist() == [[CLS, SEP, *ids("b ' s"), SEP, 0]]
    assert encode_queries(["b’s"], vocabulary, length=6).ids[0, 2] == PIECES.index("’")


def test_eager_tokens_are_padded_and_masked(vocabulary):
    passages = [Passage("1", "a b", "t"), Passage("2", "c")]
    tokens = encode_passages(passages, vocabulary, length=7)
    assert tokens.ids.tolist() == [
        [CLS, *ids("t"), SEP, *ids("a b"), SEP, 0],
        [CLS, *ids("c"), SEP] + [0] * 4,
    ]
    assert tokens.mask.sum(axis=1).tolist() == [6, 3]
    assert tokens.ids.dtype == np.int32
    bare = encode_passages(passages, vocabulary, length=7, titles=Titles.OMIT)
    assert bare.ids[0].tolist() == [CLS, *ids("a b"), SEP, 0, 0, 0]
    assert encode_queries([], vocabulary, length=7).ids.shape == (0, 7)


def test_too_short_a_length_is_refused(vocabulary):
    with pytest.raises(ConfigError, match="length 3"):
        encode_queries(["a"], vocabulary, length=3)
