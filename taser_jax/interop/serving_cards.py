"""What the model cards of SavedModels and StableHLO programs say of loading them."""

from __future__ import annotations

from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.model_card import CardTexts, left_to_the_reader


def saved_model_card(source: ExportSource) -> CardTexts:
    """Strings in, embeddings out, in TensorFlow or TensorFlow Serving."""
    contents = (
        "A TensorFlow SavedModel with the tokenizer inside, for any batch size. Signatures "
        "`encode_query` (and `serving_default`, the same) take `queries`, `encode_passage` takes "
        "`titles` and `texts`, all strings; a passage without a title has an empty one. The output "
        f"is `embedding`, float32 [batch, {source.config.embedding_dim}]. The tokenizer's ops are "
        "TensorFlow Text's: import it first. TensorFlow Serving has them built in; put this "
        "directory under a version number there, as `model/1`.\n"
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


def stablehlo_card(source: ExportSource) -> CardTexts:
    """Token ids in, embeddings out, in JAX or another runtime of StableHLO."""
    from taser_jax.interop.stablehlo import LOAD_SNIPPET

    contents = (
        "`encode_query.stablehlo` and `encode_passage.stablehlo` are programs of `jax.export` for "
        "cpu, cuda and tpu, for any batch size and length. Both take the parameters in "
        "`params.safetensors`, `ids` (int32 [batch, length]) and `mask` (bool, True at tokens); "
        f"the output is float32 [batch, {source.config.embedding_dim}]. `signature.json` tells "
        "the same to programs. Texts become ids outside, by the vocabulary in `vocabulary/`; with "
        "taser_jax installed, by `taser_jax.data.text.preprocessors.encode_queries` and "
        "`encode_passages`.\n"
    ) + left_to_the_reader(source)
    example = """
import numpy as np

directory = "."
ids = np.array([[2, 7, 8, 3], [2, 7, 3, 0]], np.int32)  # of two queries, padded with 0
mask = ids != 0
"""
    return CardTexts("stablehlo", contents, f"{example.strip()}\n\n{LOAD_SNIPPET}", ("jax",))
