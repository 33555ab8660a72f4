"""Dual encoders as TensorFlow SavedModels with the tokenizer inside: string in, embedding out."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_text as tf_text
from flax.traverse_util import unflatten_dict

# The only Python access to the op that runs a StableHLO program; jax2tf uses it, too.
from tensorflow.compiler.tf2xla.python import xla

from taser_jax.data.text.preprocessors import check_length, query_room
from taser_jax.data.text.vocabularies import SentencePieceVocabulary, Vocabulary
from taser_jax.data.text.wordpiece import MAX_WORD_CHARACTERS, WordPieceVocabulary
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.interop.export_source import CardTexts, ExportSource
from taser_jax.interop.stablehlo import lower_encoder
from taser_jax.models.batch import Role
from taser_jax.storage.errors import ConfigError

# 10 (TensorFlow builds since May 2025) adds the choice of a partitioner for sharded programs;
# these are not sharded, and read the same as 9.
_CALLING_CONVENTION = 9
# RE2's \s is ASCII only: other white space becomes a space first.
_DELIMITERS = r"\s+"
# BERT treats ASCII symbols such as $ and ^ as punctuation, and each CJK ideograph as a word.
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
_IDEOGRAPHS = (
    r"[\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}"
    r"\x{20000}-\x{2A6DF}\x{2A700}-\x{2CEAF}\x{2F800}-\x{2FA1F}]"
)


def export_saved_model(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes a SavedModel whose signatures take texts of any batch size.

    `encode_query` (and `serving_default`, the same): queries -> embedding [batch, dim].
    `encode_passage`: titles, texts -> embedding; a passage without a title has an empty one.

    Texts become tokens as in training: queries are normalised and prompted, titles are included or
    not, and texts are truncated and padded to the training's lengths, so that TensorFlow compiles
    once per batch size. Both signatures share the variables. The program runs on cpu, cuda and tpu.
    Tokenizer ops are TensorFlow Text's: a Python process imports `tensorflow_text` before it loads
    the model.

    Args:
        source: the model; learned routing is exported as at inference.
        output_dir: an existing, empty directory.

    Raises:
        ConfigError: lengths without room for special tokens and prompt.
        DataError: the vocabulary is missing or damaged.
    """
    variables = {
        name: tf.Variable(np.asarray(leaf), trainable=False)
        for name, leaf in leaves_by_path(source.params).items()
    }
    # The checkpoint names variables by their paths from here.
    module = tf.Module()
    module.params = unflatten_dict(variables, sep="/")
    module.texts = graph = TextGraph(source.vocabulary)
    embed_query, embed_passage = (_embed_fn(source, tuple(variables.values()), r) for r in Role)

    def query(queries: tf.Tensor) -> dict[str, tf.Tensor]:
        return embed_query(graph.query_ids(queries, source.query_length, source.query_settings))

    def passage(titles: tf.Tensor, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        message = "titles and texts differ in number: a passage without a title has an empty one"
        same = tf.debugging.assert_equal(tf.size(titles), tf.size(texts), message)
        with tf.control_dependencies([same]):
            titles = tf.identity(titles)
        if source.titles is Titles.JOIN:
            joined = tf.strings.join([titles, texts], separator=" ")
            texts = tf.where(tf.strings.length(titles) > 0, joined, texts)
        if source.titles is not Titles.INCLUDE:
            titles = tf.zeros_like(titles)
        prompt = source.passage_prompt
        return embed_passage(graph.passage_ids(titles, texts, source.passage_length, prompt=prompt))

    text = tf.TensorSpec([None], tf.string)
    encode_query = tf.function(query, input_signature=[text], autograph=False)
    encode_passage = tf.function(passage, input_signature=[text, text], autograph=False)
    signatures = {
        "encode_query": encode_query,
        "serving_default": encode_query,
        "encode_passage": encode_passage,
    }
    tf.saved_model.save(module, str(output_dir), signatures=signatures)


def card_texts(source: ExportSource) -> CardTexts:
    """Model-card texts of a SavedModel, for TensorFlow and TensorFlow Serving."""
    contents = (
        "A TensorFlow SavedModel with the tokenizer inside, for any batch size. Signatures "
        "`encode_query` (and `serving_default`, the same) take `queries`, `encode_passage` takes "
        "`titles` and `texts`, all strings; a passage without a title has an empty one. The output "
        f"is `embedding`, float32 [batch, {source.config.embedding_dim}]. The tokenizer's ops are "
        "TensorFlow Text's: import it first. TensorFlow Serving has them built in; put this "
        "directory under a version number, such as `model/1`.\n"
    )
    code = """
import tensorflow as tf
import tensorflow_text  # the tokenizer's ops

model = tf.saved_model.load(".")
queries = tf.constant(["on which river lies Paris"])
titles, texts = tf.constant(["Paris", ""]), tf.constant(["It lies on the Seine.", "No title."])
query_embeddings = model.signatures["encode_query"](queries=queries)["embedding"]
passages = model.signatures["encode_passage"](titles=titles, texts=texts)
passage_embeddings = passages["embedding"]
scores = tf.matmul(query_embeddings, passage_embeddings, transpose_b=True)
"""
    return CardTexts("saved_model", contents, code, ("tensorflow",))


def _embed_fn(
    source: ExportSource, variables: Sequence[tf.Variable], role: Role
) -> Callable[[tf.RaggedTensor], dict[str, tf.Tensor]]:
    """Ids -> {"embedding": [batch, dim]}; variables in JAX's order of the parameters."""
    length = source.length(role)
    program = lower_encoder(source, role)
    (embeddings,) = program.out_avals

    def embed(ids: tf.RaggedTensor) -> dict[str, tf.Tensor]:
        rows = ids.nrows()
        # Programs need at least one row: an empty batch gets a row of padding, removed below.
        extra = [[0, tf.cast(tf.equal(rows, 0), tf.int64)], [0, 0]]
        mask = tf.sequence_mask(ids.row_lengths(), length)
        padded = ids.to_tensor(shape=[None, length])
        arguments = [*variables, tf.pad(padded, extra), tf.pad(mask, extra)]
        (embedding,) = xla.call_module(
            [arguments[i] for i in program.module_kept_var_idx],
            version=_CALLING_CONVENTION,
            module=program.mlir_module_serialized,
            Tout=[tf.as_dtype(embeddings.dtype)],
            Sout=[[None, embeddings.shape[1]]],
            platforms=[platform.upper() for platform in program.platforms],
        )
        return {"embedding": embedding[:rows]}

    return embed


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
            self.encode = _wordpiece_graph(vocabulary)
        else:
            problem = "TensorFlow has no tokenizer for a tokenizer.json that is not BERT's"
            fix = "export as sentence_transformers, onnx or stablehlo"
            raise ConfigError(problem, where="vocabulary", fix=fix)

    def query_ids(self, texts: tf.Tensor, length: int, settings: QuerySettings) -> tf.RaggedTensor:
        """`[CLS] prompt text [SEP]`, with the text normalised, and truncated to fit.

        Args:
            texts: strings. Shape [queries].
            length: maximum tokens, special ones and the prompt included.
            settings: normalisation, and the prompt's ids, which are never truncated.

        Returns:
            Ids. Shape [queries, (tokens)], int32.

        Raises:
            ConfigError: the prompt leaves no room for the text.
        """
        if settings.normalization is QueryNormalization.CURLY_APOSTROPHE:
            texts = tf.strings.regex_replace(texts, "’", "'")
        tokens, prompt = self.encode(texts), settings.prompt
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


def _wordpiece_graph(vocabulary: WordPieceVocabulary) -> tf.types.experimental.GenericFunction:
    """Texts to ids, without special tokens: [texts] -> [texts, (pieces)], int32.

    Accents are removed before lower-casing, which never folds: ß stays ß, and Σ always becomes σ
    (the graph's lower-casing would make a final Σ ς).
    """
    tokenizer = tf_text.FastWordpieceTokenizer(
        list(vocabulary.pieces),
        token_out_type=tf.int32,
        unknown_token="[UNK]",
        no_pretokenization=True,
        # In bytes. BERT's limit is in characters and is applied here.
        max_bytes_per_word=4 * MAX_WORD_CHARACTERS,
    )
    single = f"{_PUNCTUATION}|{_IDEOGRAPHS}"

    def ids_of(texts: tf.Tensor) -> tf.RaggedTensor:
        shown = _normalize(texts, lower_case=vocabulary.lower_case)
        words = tf_text.regex_split(shown, f"{_DELIMITERS}|{single}", single)
        characters = tf.strings.length(words.values, unit="UTF8_CHAR")
        short = tf.where(characters > MAX_WORD_CHARACTERS, "[UNK]", words.values)
        return tokenizer.tokenize(words.with_values(short)).merge_dims(1, 2)

    # Traced once for all exports: building the graph takes most of a second.
    return tf.function(ids_of, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)


def _normalize(texts: tf.Tensor, *, lower_case: bool) -> tf.Tensor:
    # Control, format, private and replacement characters are removed; tabs and line ends
    # separate words.
    texts = tf.strings.regex_replace(texts, r"[^\P{C}\t\n\r]|\x{FFFD}", "")
    texts = tf.strings.regex_replace(texts, r"\p{Z}", " ")
    if lower_case:
        texts = tf_text.normalize_utf8(texts, "NFD")
        texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        texts = tf.strings.regex_replace(texts, "Σ", "σ")
        texts = tf.strings.lower(texts, encoding="utf-8")
    return texts
