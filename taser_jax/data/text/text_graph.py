"""Texts to token ids as TensorFlow graphs, for SavedModels: `preprocessors` and vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tensorflow_text as tf_text

from taser_jax.data.text.hugging_face import (
    MAX_WORD_CHARACTERS,
    WordPieceVocabulary,
    WordSplitting,
)
from taser_jax.data.text.preprocessors import check_length, query_room
from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.data.token_store.store import QueryNormalization
from taser_jax.storage.errors import ConfigError

# RE2's \s is ASCII only: other white space becomes a space first.
_DELIMITERS = r"\s+"
# BERT treats ASCII symbols such as $ and ^ as punctuation, and each CJK ideograph as a word.
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
_IDEOGRAPHS = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}"
    r"\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2F800}-\x{2FA1F}]"
)


def normalize_queries(texts: tf.Tensor, normalization: QueryNormalization) -> tf.Tensor:
    """Applies the normalisation to queries. [queries] -> [queries], strings."""
    if normalization is QueryNormalization.CURLY_APOSTROPHE:
        return tf.strings.regex_replace(texts, "’", "'")
    return texts


class TextGraph(tf.Module):
    """The ids that a vocabulary gives texts. A `tf.Module` that uses it must hold it.

    Args:
        vocabulary: splits the texts; without a [CLS] token nothing precedes them.

    Raises:
        ConfigError: TensorFlow has no tokenizer of its kind.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        if isinstance(vocabulary, SentencePieceVocabulary):
            self._tokenizer = tf_text.SentencepieceTokenizer(
                model=vocabulary.content, out_type=tf.int32
            )
            self.encode = self._tokenizer.tokenize
        elif isinstance(vocabulary, WordPieceVocabulary):
            self.encode = _wordpiece_graph(vocabulary.pieces, vocabulary.splitting)
        else:
            problem = "TensorFlow has no tokenizer for a tokenizer.json that is not BERT's"
            fix = "export as sentence_transformers, onnx or stablehlo"
            raise ConfigError(problem, where="vocabulary", fix=fix)

    def query_ids(
        self, texts: tf.Tensor, length: int, *, prompt: Sequence[int] = ()
    ) -> tf.RaggedTensor:
        """`[CLS] prompt text [SEP]`, with the text truncated to fit.

        Args:
            texts: strings. Shape [queries].
            length: maximum tokens, special ones and the prompt included.
            prompt: ids put before every text; never truncated.

        Returns:
            Ids. Shape [queries, (tokens)], int32.

        Raises:
            ConfigError: the prompt leaves no room for the text.
        """
        tokens = self.encode(texts)
        room = query_room(self._vocabulary, length, prompt=prompt)
        tokens = _keep_first(tokens, tf.minimum(tokens.row_lengths(), room))
        return self._framed(tokens, prompt)

    def passage_ids(
        self, titles: tf.Tensor, texts: tf.Tensor, length: int, *, prompt: Sequence[int] = ()
    ) -> tf.RaggedTensor:
        """`[CLS] title [SEP] text [SEP]`, or `[CLS] text [SEP]` where the title is empty.

        Args:
            titles: strings, empty for passages without one. Shape [passages].
            texts: strings. Shape [passages].
            length: maximum tokens, special ones included.
            prompt: ids put before every title or text; never truncated.

        Returns:
            Ids. Shape [passages, (tokens)], int32.
        """
        title, text = self.encode(titles), self.encode(texts)
        titled = tf.cast(tf.strings.length(titles) > 0, tf.int64)
        in_title, in_text = title.row_lengths(), text.row_lengths()
        around = 1 + int(self._vocabulary.cls_id is not None)
        room = check_length(length - len(prompt)) - around - titled
        half = (room + tf.cast(in_title > in_text, tf.int64)) // 2
        in_title = tf.minimum(in_title, tf.maximum(room - in_text, half))
        title = _keep_first(title, in_title)
        text = _keep_first(text, tf.minimum(in_text, room - in_title))
        separator = _ragged(tf.fill([tf.reduce_sum(titled)], self._vocabulary.sep_id), titled)
        return self._framed(tf.concat([title, separator, text], axis=1), prompt)

    def _framed(self, tokens: tf.RaggedTensor, prompt: Sequence[int]) -> tf.RaggedTensor:
        """Adds [CLS], where the vocabulary has it, and the prompt before, and [SEP] after."""
        cls_id, rows = self._vocabulary.cls_id, tokens.nrows()
        start = [*([] if cls_id is None else [cls_id]), *prompt]
        parts = [_rows_of(start, rows), tokens, _rows_of([self._vocabulary.sep_id], rows)]
        return tf.concat(parts, axis=1)


def _keep_first(tokens: tf.RaggedTensor, counts: tf.Tensor) -> tf.RaggedTensor:
    """The first counts[i] tokens of row i."""
    first = tf.ragged.range(tokens.row_lengths()).values < tf.gather(counts, tokens.value_rowids())
    return _ragged(tf.boolean_mask(tokens.values, first), counts)


def _rows_of(ids: Sequence[int], rows: tf.Tensor) -> tf.RaggedTensor:
    """The ids in each of some rows."""
    return tf.RaggedTensor.from_tensor(tf.tile(tf.constant([list(ids)], tf.int32), [rows, 1]))


def _ragged(values: tf.Tensor, counts: tf.Tensor) -> tf.RaggedTensor:
    # The counts are right; checking them is most of the graph, and of the time to build it.
    return tf.RaggedTensor.from_row_lengths(values, counts, validate=False)


def _wordpiece_graph(
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
        short = tf.where(characters > MAX_WORD_CHARACTERS, "[UNK]", words.values)
        return tokenizer.tokenize(words.with_values(short)).merge_dims(1, 2)

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
