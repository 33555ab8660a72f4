"""Dual encoders as StableHLO: one portable `jax.export` program per role, and their parameters."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax import export
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxtyping import PyTree

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.interop.export_source import PASSAGE_INPUTS, CardTexts, ExportSource
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params

PARAMETERS_FILE = "params.safetensors"
VOCABULARY = "vocabulary"
PLATFORMS = ("cpu", "cuda", "tpu")
# The first version with guaranteed compatibility, which consumers older than this JAX can read
# (TensorFlow 2.20 reads up to 1.12; JAX 0.10 writes 1.15 by default).
STABLEHLO_VERSION = "1.0.0"
# erf would be a composite, whose body keeps dynamic shapes in TensorFlow; calls are refined.
# Locations would contain paths of this machine.
_PASSES = (
    "builtin.module(func.func(stablehlo-legalize-composite-to-call),inline,symbol-dce,"
    "strip-debuginfo)"
)

# How to use an export without taser_jax. The reader supplies `directory`, and `ids` (int32) and
# `mask` (bool, True at real tokens), both [batch, length].
LOAD_SNIPPET = """\
import pathlib

import jax
from jax import export
from safetensors.numpy import load_file

directory = pathlib.Path(directory)
params = {}
for name, tensor in load_file(directory / "params.safetensors").items():
    *path, last = name.split("/")
    node = params
    for part in path:
        node = node.setdefault(part, {})
    node[last] = tensor

program = export.deserialize((directory / "encode_query.stablehlo").read_bytes())
embeddings = jax.jit(program.call)(params, ids, mask)  # float32 [batch, dim]
"""

# How to make `ids` and `mask` of queries without taser_jax.
TOKENIZE_SNIPPET = """\
import numpy as np
from tokenizers import Tokenizer

directory = "."
texts = ["which river flows through Paris?"]  # or, with passages' tokenizer: %s
tokenizer = Tokenizer.from_file(f"{directory}/query_tokenizer/tokenizer.json")
tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
tokenizer.enable_truncation(%d)
tokenizer.enable_padding()
encoded = tokenizer.encode_batch(texts)
ids = np.array([text.ids for text in encoded], np.int32)
mask = np.array([text.attention_mask for text in encoded], bool)
"""


def export_stablehlo(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes `encode_query.stablehlo`, `encode_passage.stablehlo` and what they need.

    The programs contain no weights: both take those of `params.safetensors`, under taser_jax's
    parameter paths. They run on cpu, cuda and tpu, for any batch size of 1 or more and any length
    up to that of the position table, or of training for T5. Texts are converted to ids outside the
    programs, by the roles' tokenizers beside them, which add the prompts.

    Args:
        source: the model; learned routing is exported as at inference.
        output_dir: an existing, empty directory.

    Raises:
        ConfigError: the vocabulary is a SentencePiece, but no unigram model.
    """
    leaves = leaves_by_path(source.params).items()
    params = {name: np.ascontiguousarray(leaf) for name, leaf in leaves}
    safetensors.numpy.save_file(params, output_dir / PARAMETERS_FILE)
    shutil.copytree(source.vocabulary_dir, output_dir / VOCABULARY)
    for role in Role:
        length, prompt = source.length(role), source.prompt(role)
        tokenizer = output_dir / f"{role.value}_tokenizer"
        tokenizer.mkdir()
        write_tokenizer(source.vocabulary_dir, tokenizer, max_length=length, prompt=prompt)
        program = lower_encoder(source, role, any_length=True)
        (output_dir / f"encode_{role.value}.stablehlo").write_bytes(program.serialize())


def card_texts(source: ExportSource) -> CardTexts:
    """Model-card texts of a StableHLO export, for JAX and other runtimes."""
    contents = (
        "`encode_query.stablehlo` and `encode_passage.stablehlo` are programs of `jax.export` for "
        "cpu, cuda and tpu, for any batch size and length. Both take the parameters in "
        "`params.safetensors`, `ids` (int32 [batch, length]) and `mask` (bool, True at tokens); "
        f"the output is float32 [batch, {source.config.embedding_dim}]. `export.json` has lengths "
        "and prompts for machines. The code converts queries to ids, with their prompt, without "
        "taser_jax; passages have `passage_tokenizer/` and their own length. With taser_jax, use "
        "`taser_jax.data.text.preprocessors.encode_queries` and `encode_passages`.\n"
    )
    _, example = PASSAGE_INPUTS[source.titles]
    tokenize = TOKENIZE_SNIPPET % (example, source.query_length)
    return CardTexts("stablehlo", contents, f"{tokenize}\n{LOAD_SNIPPET}", ("jax",))


def lower_encoder(source: ExportSource, role: Role, *, any_length: bool = False) -> export.Exported:
    """Lowers (params, ids, mask) -> embeddings of one role, as at inference.

    BERT's attention kernel becomes EINSUM, since cuDNN's exists on one platform only; values agree
    to rounding. The dtype of activations is unchanged. Relative positions are computed during
    tracing, as are rotary ones, so programs of T5, MPNet, ModernBERT and nomic-bert that take any
    length pad to `length`, and shorter sequences cost as much.

    Args:
        source: the dual encoder.
        role: static: selects the tower, and the experts of Det-R.
        any_length: whether sequences of any length that the model can take are accepted, instead
            of those of the role's length.

    Returns:
        The program. Batch sizes are 1 or more; params have the shapes of `abstract_params`, ids are
        int32 and mask is bool [batch, length], embeddings are float32 [batch, dim].
    """
    config, task, length = source.config, source.task, source.length(role)
    if any_length:
        length = config.max_length or length
    model = DualEncoder(config.portable())
    pads = any_length and config.transformer.by_distance

    def encode(params: PyTree, ids: jax.Array, mask: jax.Array) -> jax.Array:
        if pads:
            rest = ((0, 0), (0, length - ids.shape[1]))
            ids, mask = jnp.pad(ids, rest), jnp.pad(mask, rest)
        encoded: PyTree = model.apply(
            {"params": params}, Tokens(ids=ids, mask=mask), role=role, task=task, method="encode"
        )
        return encoded.embeddings

    if any_length:
        limit = f"length <= {length}"
        shape = export.symbolic_shape("batch, length", constraints=[limit])
    else:
        shape = (*export.symbolic_shape("batch"), length)
    exported = export.export(jax.jit(encode), platforms=PLATFORMS)(
        abstract_params(model),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.bool_),
    )
    return dataclasses.replace(
        exported, mlir_module_serialized=_portable(exported.mlir_module()), fun_name=role.value
    )


def _portable(module: str) -> bytes:
    stablehlo.register_stablehlo_passes()
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        passmanager.PassManager.parse(_PASSES).run(parsed.operation)
        return stablehlo.serialize_portable_artifact_str(str(parsed), STABLEHLO_VERSION)
