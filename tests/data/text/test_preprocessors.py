import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from taser_jax.data.text.preprocessors import (
    QueryNormalization,
    Titles,
    encode_passages,
    encode_queries,
    passage_ids,
    query_ids,
)
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.storage.records import Passage

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, "'", "’"]
CLS, SEP = 2, 3
VOCABULARY = WordPieceVocabulary(PIECES)


def ids(text: str) -> list[int]:
    return [PIECES.index(letter) for letter in text.split()]


def test_passages_by_hand():
    """Length 8 leaves room for 5 tokens beside a title's three special ones, 6 beside two."""
    cases = [
        ("t u", "a b", [CLS, *ids("t u"), SEP, *ids("a b"), SEP]),
        ("", "a b", [CLS, *ids("a b"), SEP]),
        ("  ", "a b c d e f g", [CLS, SEP, *ids("a b c d e"), SEP]),
        ("t", "a b c d e f", [CLS, *ids("t"), SEP, *ids("a b c d"), SEP]),
        ("t u v w x y", "a", [CLS, *ids("t u v w"), SEP, *ids("a"), SEP]),
        ("t u v w x y", "a b c d e f", [CLS, *ids("t u"), SEP, *ids("a b c"), SEP]),
        ("t u v w x y", "a b c d", [CLS, *ids("t u v"), SEP, *ids("a b"), SEP]),
        ("t", "", [CLS, *ids("t"), SEP, SEP]),
        ("", "", [CLS, SEP]),
    ]
    titles, texts, expected = zip(*cases, strict=True)
    assert passage_ids(titles, texts, VOCABULARY, 8) == list(expected)
    prompted = passage_ids(titles, texts, VOCABULARY, 10, prompt=(7, 9))
    assert prompted == [[CLS, 7, 9, *row[1:]] for row in expected]


@pytest.fixture(scope="module")
def oracle() -> tokenizers.Tokenizer:
    """Hugging Face's own, not built by this package."""
    pieces = {piece: id for id, piece in enumerate(PIECES)}
    oracle = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    oracle.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    oracle.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return oracle


@pytest.mark.parametrize("length", [4, 5, 8, 9, 16])
def test_pairs_and_texts_are_cut_as_tokenizers_cuts_them(oracle, length):
    """All numbers of tokens in title and text, blank titles and none."""
    oracle.enable_truncation(length, strategy="longest_first")
    counts = [(title, text) for title in range(-1, 15) for text in range(15)]
    titles = ["" if title < 0 else " ".join(LETTERS[:title]) or " " for title, _ in counts]
    texts = [" ".join(LETTERS[:text]) for _, text in counts]
    shown = [pair if pair[0] else pair[1] for pair in zip(titles, texts, strict=True)]
    expected = [encoding.ids for encoding in oracle.encode_batch(shown)]
    assert passage_ids(titles, texts, VOCABULARY, length) == expected


@pytest.mark.parametrize("length", [4, 5, 8, 11])
def test_the_graphs_of_saved_models_do_the_same(length):
    import tensorflow as tf

    from taser_jax.interop import saved_model

    rng = np.random.default_rng(2)
    words = [*LETTERS, "’"]
    columns = [[" ".join(rng.choice(words, n)) for n in rng.integers(0, 14, 60)] for _ in "xy"]
    columns[0][:3] = ["", " ", "\u200b"]
    titles, texts = columns
    tensors = [tf.constant(column) for column in columns]
    graph = saved_model.TextGraph(VOCABULARY)
    for prompt in ((), (7, 9)):
        room = length + len(prompt)
        encoded = graph.passage_ids(*tensors, room, prompt=prompt).to_list()
        assert encoded == passage_ids(titles, texts, VOCABULARY, room, prompt=prompt)
    for normalization in QueryNormalization:
        prompt = () if length == 4 else (7, 8)[: length - 3]
        settings = QuerySettings(normalization, prompt)
        encoded = graph.query_ids(tensors[1], length, settings).to_list()
        assert encoded == query_ids(texts, VOCABULARY, length, settings)


def test_vocabulary_without_cls_puts_nothing_first():
    without_cls = WordPieceVocabulary(PIECES)
    # As in T5's.
    without_cls.cls_id = None
    encoded = passage_ids(["t", ""], ["a b c d", "a b c d"], without_cls, 5)
    assert encoded == [[*ids("t"), SEP, *ids("a b"), SEP], [*ids("a b c d"), SEP]]


def test_normalisation_is_by_name():
    as_it_is = QuerySettings(QueryNormalization("none"))
    assert query_ids(["b’s"], VOCABULARY, None, as_it_is) == [[CLS, *ids("b ’ s"), SEP]]
    settings = QuerySettings(QueryNormalization.CURLY_APOSTROPHE, prompt=(SEP,))
    tokens = encode_queries(["b’s"], VOCABULARY, length=7, settings=settings)
    assert tokens.ids.tolist() == [[CLS, SEP, *ids("b ' s"), SEP, 0]]
    assert encode_queries(["b’s"], VOCABULARY, length=6).ids[0, 2] == PIECES.index("’")


def test_eager_tokens_are_padded_and_masked():
    passages = [Passage("1", "a b", "t"), Passage("2", "c")]
    tokens = encode_passages(passages, VOCABULARY, length=7)
    second = [CLS, *ids("c"), SEP, 0, 0, 0, 0]
    assert tokens.ids.tolist() == [[CLS, *ids("t"), SEP, *ids("a b"), SEP, 0], second]
    assert tokens.mask.sum(axis=1).tolist() == [6, 3]
    assert tokens.ids.dtype == np.int32
    bare = encode_passages(passages, VOCABULARY, length=7, titles=Titles.OMIT)
    assert bare.ids[0].tolist() == [CLS, *ids("a b"), SEP, 0, 0, 0]
    joined = encode_passages(passages, VOCABULARY, length=7, titles=Titles.JOIN)
    assert joined.ids.tolist() == [[CLS, *ids("t"), *ids("a b"), SEP, 0, 0], second]
    assert encode_queries([], VOCABULARY, length=7).ids.shape == (0, 7)
