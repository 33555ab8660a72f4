"""Dual encoders as TensorFlow SavedModels with the tokenizer inside: string in, embedding out."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from flax.traverse_util import unflatten_dict

# The only Python access to the op that runs a StableHLO program; jax2tf uses it, too.
from tensorflow.compiler.tf2xla.python import xla

from taser_jax.data.text import preprocessors, text_graph
from taser_jax.data.token_store.store import Titles
from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.interop.export_source import CardTexts, ExportSource
from taser_jax.interop.stablehlo import lower_encoder
from taser_jax.models.batch import Role

# 10 (TensorFlow builds since May 2025) adds the choice of a partitioner for sharded programs;
# these are not sharded, and read the same as 9.
_CALLING_CONVENTION = 9


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
    preprocessors.check_length(source.passage_length)
    vocabulary = source.vocabulary
    preprocessors.query_room(vocabulary, source.query_length, prompt=source.query_settings.prompt)
    variables = {
        name: tf.Variable(np.asarray(leaf), trainable=False)
        for name, leaf in leaves_by_path(source.params).items()
    }
    # The checkpoint names variables by their paths from here.
    module = tf.Module()
    module.params = unflatten_dict(variables, sep="/")
    module.texts = text_graph.TextGraph(vocabulary)
    signatures = {
        f"encode_{role.value}": _signature(source, tuple(variables.values()), module.texts, role)
        for role in Role
    }
    signatures["serving_default"] = signatures["encode_query"]
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


def _signature(
    source: ExportSource,
    variables: Sequence[tf.Variable],
    graph: text_graph.TextGraph,
    role: Role,
) -> tf.types.experimental.ConcreteFunction:
    """Texts -> {"embedding": [batch, dim]} of one role, as a concrete function."""
    length = source.length(role)
    embed = _embed_fn(source, variables, role, length)
    strings = tf.TensorSpec([None], tf.string)

    def encode_query(queries: tf.Tensor) -> dict[str, tf.Tensor]:
        settings = source.query_settings
        queries = text_graph.normalize_queries(queries, settings.normalization)
        ids = graph.query_ids(queries, length, prompt=settings.prompt)
        return embed(ids)

    def encode_passage(titles: tf.Tensor, texts: tf.Tensor) -> dict[str, tf.Tensor]:
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
        return embed(graph.passage_ids(titles, texts, length, prompt=prompt))

    encode, inputs = {
        Role.QUERY: (encode_query, [strings]),
        Role.PASSAGE: (encode_passage, [strings, strings]),
    }[role]
    return tf.function(encode, input_signature=inputs, autograph=False).get_concrete_function()


def _embed_fn(
    source: ExportSource, variables: Sequence[tf.Variable], role: Role, length: int
) -> Callable[[tf.RaggedTensor], dict[str, tf.Tensor]]:
    """Ids -> {"embedding": [batch, dim]}; variables in JAX's order of the parameters."""
    program = lower_encoder(source.config, role, length=length, task=source.task)
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
