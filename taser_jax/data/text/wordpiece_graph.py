"""BERT's word pieces as one TensorFlow graph, for SavedModels."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tensorflow_text as tf_text

from taser_jax.data.text.bert_files import MAX_WORD_CHARACTERS, WordSplitting

# RE2's \s is ASCII only: other white space becomes a space first.
_DELIMITERS = r"\s+"
# BERT treats ASCII symbols such as $ and ^ as punctuation, and each CJK ideograph as a word.
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
_IDEOGRAPHS = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}"
    r"\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2F800}-\x{2FA1F}]"
)


def wordpiece_graph(
    pieces: Sequence[str], splitting: WordSplitting
) -> tf.types.experimental.GenericFunction:
    """Texts to ids, without special tokens: [texts] -> [texts, (pieces)], int32.

    Accents are removed before lower-casing, which never folds: ß stays ß, and Σ always becomes σ
    (the graph's lower-casing would make a final Σ ς).

    Args:
        pieces: the pieces in the order of their ids.
        splitting: how texts become words.
    """
    tokenizer = tf_text.FastWordpieceTokenizer(
        list(pieces),
        token_out_type=tf.int32,
        unknown_token="[UNK]",
        no_pretokenization=True,
        # In bytes. BERT's limit is in characters and is applied here.
        max_bytes_per_word=4 * MAX_WORD_CHARACTERS,
    )
    single = f"{_PUNCTUATION}|{_IDEOGRAPHS}" if splitting.split_ideographs else _PUNCTUATION

    def ids_of(texts: tf.Tensor) -> tf.RaggedTensor:
        words = tf_text.regex_split(_normalize(texts, splitting), f"{_DELIMITERS}|{single}", single)
        characters = tf.strings.length(words.values, unit="UTF8_CHAR")
        known = tf.where(characters > MAX_WORD_CHARACTERS, "[UNK]", words.values)
        return tokenizer.tokenize(words.with_values(known)).merge_dims(1, 2)

    # Traced once for all exports: building the graph takes most of a second.
    return tf.function(ids_of, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)


def _normalize(texts: tf.Tensor, splitting: WordSplitting) -> tf.Tensor:
    # Control, format, private and replacement characters are removed; tabs and line ends
    # separate words.
    texts = tf.strings.regex_replace(texts, r"[^\P{C}\t\n\r]|\x{FFFD}", "")
    texts = tf.strings.regex_replace(texts, r"\p{Z}", " ")
    if splitting.strips_accents:
        texts = tf_text.normalize_utf8(texts, "NFD")
        texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
    if splitting.lower_case:
        texts = tf.strings.regex_replace(texts, "Σ", "σ")
        texts = tf.strings.lower(texts, encoding="utf-8")
    return texts
