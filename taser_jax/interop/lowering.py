"""A dual encoder's `encode` as one portable StableHLO program, for any batch size and platform."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxtyping import PyTree

from taser_jax.interop.export_source import ExportSource
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.parameters import abstract_params
from taser_jax.storage.errors import ConfigError

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


class Lengths(enum.Enum):
    """Sequence lengths that a program accepts: exactly one, or all up to it."""

    FIXED = "fixed"
    UP_TO = "up_to"


def lower_encoder(
    config: ModelConfig,
    role: Role,
    *,
    length: int,
    lengths: Lengths = Lengths.FIXED,
    task: str | None = None,
) -> export.Exported:
    """Lowers (params, ids, mask) -> embeddings of one role, as at inference.

    BERT's attention kernel becomes EINSUM, since cuDNN's exists on one platform only; values agree
    to rounding. The dtype of activations is unchanged. Relative positions are computed during
    tracing, so T5's program with UP_TO pads to `length`, and shorter sequences cost as much.

    Args:
        config: the dual encoder.
        role: static: selects the tower, and the experts of Det-R.
        length: tokens of every sequence, or the largest number.
        lengths: which of the two.
        task: the task whose encoder to lower, if encoders differ by task.

    Returns:
        The program. Batch sizes are 1 or more; params have the shapes of `abstract_params`, ids are
        int32 and mask is bool [batch, length], embeddings are float32 [batch, dim].
    """
    model = DualEncoder(config.portable())
    pads = lengths is Lengths.UP_TO and config.max_length is None

    def encode(params: PyTree, ids: jax.Array, mask: jax.Array) -> jax.Array:
        if pads:
            rest = ((0, 0), (0, length - ids.shape[1]))
            ids, mask = jnp.pad(ids, rest), jnp.pad(mask, rest)
        encoded: Any = model.apply(
            {"params": params}, Tokens(ids=ids, mask=mask), role=role, task=task, method="encode"
        )
        return encoded.embeddings

    if lengths is Lengths.UP_TO:
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


def check_source(source: ExportSource) -> None:
    """Refuses unsupported lengths, a missing task, and parameters that do not fit the model.

    Raises:
        ConfigError: naming the value found and the one expected.
    """
    check_task(source.config, source.task)
    limit = source.config.max_length
    for name in ("query_length", "passage_length"):
        length = getattr(source, name)
        if length < 1 or (limit is not None and length > limit):
            many = "1 or more" if limit is None else f"1 to {limit}, the rows of the position table"
            raise ConfigError(f"{name} is {length}", where="export", expected=many)
    expected = abstract_params(DualEncoder(source.config.portable()))
    check_params(source.params, expected, where="export, parameters")


def check_task(config: ModelConfig, task: str | None) -> None:
    """Refuses a missing or unknown task for a model with one query encoder per task.

    Raises:
        ConfigError: naming the tasks.
    """
    tasks = config.query_tasks
    if tasks and task not in tasks:
        raise ConfigError(
            "no task" if task is None else f"task {task!r}",
            where="export_model.task",
            expected=f"one of {', '.join(tasks)}: each has a query encoder, an export has one",
            fix=f"--gin.export_model.task={tasks[0]!r}",
        )


def check_params(params: PyTree, expected: PyTree, *, where: str) -> None:
    """Refuses a tree with unexpected names, shapes or dtypes.

    Raises:
        ConfigError: naming the first parameter that differs.
    """
    found, wanted = named_leaves(params), named_leaves(expected)
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found or name not in wanted:
            what = "is missing" if name not in found else "is not one of the model's"
            raise ConfigError(f"parameter {name} {what}", where=where)
        if _kind(found[name]) != _kind(wanted[name]):
            raise ConfigError(
                f"parameter {name} is {_kind(found[name])}",
                where=where,
                expected=_kind(wanted[name]),
            )


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of nested dicts by path, in JAX's order: {"encoder/embeddings/...": leaf}."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _kind(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _portable(module: str) -> bytes:
    stablehlo.register_stablehlo_passes()
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        passmanager.PassManager.parse(_PASSES).run(parsed.operation)
        return stablehlo.serialize_portable_artifact_str(str(parsed), STABLEHLO_VERSION)
