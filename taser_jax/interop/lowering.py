"""A dual encoder's `encode` as one portable StableHLO program, for any batch size and platform."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from taser_jax.batch import Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.interop.export_source import ExportSource
from taser_jax.models.attention import AttentionKernel
from taser_jax.models.bert import Remat
from taser_jax.models.dual_encoder import DualEncoder, DualEncoderConfig, abstract_params

PLATFORMS = ("cpu", "cuda", "tpu")
# The first version with a promise of compatibility: consumers older than this JAX read it too
# (TensorFlow 2.20 stops at 1.12, JAX 0.10 writes 1.15 left to itself).
STABLEHLO_VERSION = "1.0.0"
# erf would be a composite, whose body TensorFlow leaves with dynamic shapes: calls are refined.
# Locations would carry the paths of this machine.
_PASSES = (
    "builtin.module(func.func(stablehlo-legalize-composite-to-call),inline,symbol-dce,"
    "strip-debuginfo)"
)


def lower_encoder(
    config: DualEncoderConfig, role: Role, *, length: int | None, task: str | None = None
) -> export.Exported:
    """Lowers (params, ids, mask) -> embeddings of one role, as at inference.

    The attention kernel becomes EINSUM, since cuDNN's exists on one platform only; values agree to
    rounding. The dtype of activations stays.

    Args:
        config: the dual encoder.
        role: static: picks the tower, and the experts of Det-R.
        length: tokens of every sequence; None for any, up to the position table's length.
        task: whose encoder, where encoders differ by task.

    Returns:
        The program. Batch sizes are 1 or more; params as `abstract_params` says, ids int32 and
        mask bool [batch, length], embeddings float32 [batch, dim].
    """
    model = _portable_model(config)

    def encode(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        tokens = Tokens(ids=ids, mask=mask)
        encoded: Any = model.apply(
            {"params": params}, tokens, role=role, task=task, method="encode"
        )
        return encoded.embeddings

    if length is None:
        limit = f"length <= {config.bert.max_length}"
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


def check_source(source: ExportSource) -> None:
    """Refuses lengths that the model cannot take and parameters that are not the model's.

    Raises:
        ConfigError: naming what was found and what was expected.
    """
    limit = source.config.bert.max_length
    for name in ("query_length", "passage_length"):
        length = getattr(source, name)
        if not 1 <= length <= limit:
            raise ConfigError(
                f"{name} is {length}",
                where="export",
                expected=f"1 to {limit}, the rows of the model's position table",
            )
    expected = abstract_params(_portable_model(source.config))
    check_params(source.params, expected, where="export, parameters")


def check_params(params: Any, expected: Any, *, where: str) -> None:
    """Refuses a tree whose names, shapes or dtypes are not those expected.

    Raises:
        ConfigError: naming the first parameter that differs.
    """
    found, wanted = named_leaves(params), named_leaves(expected)
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            what = "is missing" if name not in found else "is none of the model's"
            raise ConfigError(f"parameter {name} {what}", where=where)
        if _kind(found[name]) != _kind(wanted[name]):
            raise ConfigError(
                f"parameter {name} is {_kind(found[name])}",
                where=where,
                expected=_kind(wanted[name]),
            )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts by path, in JAX's order: {"encoder/embeddings/...": leaf}."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The nested dicts that `named_leaves` took apart."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _portable_model(config: DualEncoderConfig) -> DualEncoder:
    bert = dataclasses.replace(config.bert, attention=AttentionKernel.EINSUM, remat=Remat.NONE)
    return DualEncoder(dataclasses.replace(config, bert=bert))


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _portable(module: str) -> bytes:
    stablehlo.register_stablehlo_passes()
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        passmanager.PassManager.parse(_PASSES).run(parsed.operation)
        return stablehlo.serialize_portable_artifact_str(str(parsed), STABLEHLO_VERSION)
