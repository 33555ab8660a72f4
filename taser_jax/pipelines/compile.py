"""`taser compile`: a recipe, compiled for a TPU pod on a machine that has none."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath

from taser_jax.batch import Role, Tokens
from taser_jax.compilation.ahead_of_time import (
    CompiledStep,
    CompilerEffort,
    OutOfMemory,
    compile_step,
)
from taser_jax.compilation.report import StepReport
from taser_jax.compilation.topologies import Topology, one_host, open_topology
from taser_jax.data.token_store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.models.build import ModelConfig, build_model
from taser_jax.models.dual_encoder import abstract_params
from taser_jax.models.flops import forward_flops, training_flops
from taser_jax.partitioning import Partitioner, make_mesh
from taser_jax.pipelines import train
from taser_jax.pipelines.batch_plans import BatchPlan, make_plan
from taser_jax.pipelines.compile_advice import what_would_fit
from taser_jax.pipelines.models import embed
from taser_jax.pipelines.step_program import StepProgram, make_step_program
from taser_jax.pipelines.training_config import TrainingConfig
from taser_jax.pipelines.training_data import (
    fit_vocabulary,
    lengths,
    open_store,
    training_queries,
)
from taser_jax.progress import logger, phase
from taser_jax.retrieval.embeddings import EncodeConfig
from taser_jax.storage import storage_errors

REPORT_JSON, REPORT_TEXT = "report.json", "report.txt"


def compile_recipe(
    *,
    topology: str | None,
    model: ModelConfig,
    training: TrainingConfig,
    feature_lengths: Mapping[str, int] | None = None,
    num_slices: int = 1,
    task_sizes: Mapping[str, int] | None = None,
    token_store: str = "",
    tasks: Sequence[str] | None = None,
    encoding: EncodeConfig | None = EncodeConfig(),
    compiler_effort: CompilerEffort = CompilerEffort.FULL,
    output_dir: str = "",
) -> list[StepReport]:
    """Compiles the steps of a training recipe for a TPU topology, with no TPU and no data.

    The TPU compiler comes with libtpu (the extra `tpu`). Prints for each step, the training step
    and the encoding of passages: memory of a device against the chip's, FLOPs against the model's
    formulas, bytes, collectives, float32 products, and a roofline estimate. Nothing is run: times
    are bounds, not measurements.

    Args:
        topology: "<generation>:<chips along each axis>", such as v5e:4x4.
        model: the dual encoder.
        training: how it is trained; mesh, batch and chunks are what matters here.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        num_slices: slices of the topology.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        token_store: in place of `task_sizes` and `feature_lengths`, tokens to take them from.
        tasks: tasks to train on, of those in the token store.
        encoding: batches of passages to encode; None compiles the training step alone.
        compiler_effort: full, as a training run gets, or quick.
        output_dir: where report.json and report.txt go; empty writes no files.

    Returns:
        A report for each step.

    Raises:
        ConfigError: no such topology, a mesh or batch that does not fit its devices, no libtpu, or
            a step that needs more memory than a chip has; the message says what would fit.
    """
    # Nothing runs: the TPU of this machine, if it had one, is left alone.
    jax.config.update("jax_platforms", "cpu")
    target = open_topology(topology, num_slices=num_slices)
    store = open_store(token_store, dry_run=not token_store)
    model_config = fit_vocabulary(model, store)
    query_length, passage_length = lengths(store, _known_lengths(feature_lengths, store))
    partitioner = Partitioner(make_mesh(training.mesh, devices=target.devices), training.rules)
    module = build_model(model_config)
    plan = make_plan(
        training.batching,
        training.multitask,
        num_chunks=training.num_chunks,
        query_length=query_length,
        passage_length=passage_length,
        partitioner=partitioner,
        store=store,
        queries={} if store is None else training_queries(store, task_names=tasks),
        query_tasks=model_config.query_tasks,
        task_sizes=task_sizes,
    )
    program = make_step_program(
        module,
        plan,
        partitioner=partitioner,
        optimizer=training.optimizer,
        objective=training.objective,
        total_steps=training.total_steps,
        seed=training.seed,
        query_length=query_length,
        passage_length=passage_length,
    )
    with storage_errors(output_dir):
        output = epath.Path(output_dir) if output_dir else None
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        logger.info(
            "compiling for %d devices with %s effort: this takes minutes",
            partitioner.mesh.size,
            compiler_effort.value,
        )
        reports = [
            _training_report(
                target,
                model_config,
                training,
                plan=plan,
                program=program,
                partitioner=partitioner,
                effort=compiler_effort,
            )
        ]
        if encoding is not None:
            reports.append(
                _encoding_report(
                    target,
                    model_config,
                    module,
                    encoding,
                    length=passage_length,
                    effort=compiler_effort,
                )
            )
        text = "\n\n".join(map(str, reports)) + "\n"
        print(text)
        if output is not None:
            (output / REPORT_TEXT).write_text(text)
            facts = [report.as_json() for report in reports]
            (output / REPORT_JSON).write_text(json.dumps(facts, indent=2) + "\n")
    return reports


def _known_lengths(given: Mapping[str, int] | None, store: TokenStore | None) -> Mapping[str, int]:
    if store is None and not given:
        raise ConfigError(
            "no lengths of queries and passages",
            where="TASK_FEATURE_LENGTHS",
            expected="{'query': 256, 'passage': 256}, or a token store",
            fix="set TASK_FEATURE_LENGTHS in the recipe, or --gin.TOKEN_STORE=...",
        )
    return given or {}


def _training_report(
    target: Topology,
    model_config: ModelConfig,
    training: TrainingConfig,
    *,
    plan: BatchPlan,
    program: StepProgram,
    partitioner: Partitioner,
    effort: CompilerEffort,
) -> StepReport:
    state = program.placed_state
    batch = jax.tree.map(
        lambda leaf: _placed(leaf, partitioner.batch_sharding), plan.abstract_batch()
    )
    try:
        with phase("compile the training step"):
            compiled = compile_step(
                program.train_step, state, batch, mesh=partitioner.mesh, effort=effort
            )
        _check_memory(compiled, target)
    except OutOfMemory as error:
        raise ConfigError(
            f"the training step needs {error.needed / 2**30:.2f} GiB of a device",
            where=target.name,
            expected=f"at most the {error.available / 2**30:.2f} GiB that the chip leaves to it",
            fix=what_would_fit(
                model_config,
                training,
                partitioner=partitioner,
                smallest_batch=min(shape.queries for shape in plan.shapes),
                needed=error.needed,
                available=error.available,
                state_bytes=sum(map(_bytes_of_a_device, jax.tree.leaves(state))),
            ),
        ) from error
    queries = sum(shape.queries for shape in plan.shapes)
    passages = sum(shape.passages for shape in plan.shapes)
    return StepReport(
        name="training step",
        about=f"{queries} queries and {passages} passages over {partitioner.batch_devices} parts",
        topology=target,
        mesh=dict(partitioner.mesh.shape),
        compiled=compiled,
        model_flops=sum(training_flops(model_config, shape) for shape in plan.shapes)
        / partitioner.mesh.size,
    )


def _encoding_report(
    target: Topology,
    model_config: ModelConfig,
    module: nn.Module,
    encoding: EncodeConfig,
    *,
    length: int,
    effort: CompilerEffort,
) -> StepReport:
    """Passages as `taser encode` does them: each host its own, on copies of the parameters."""
    host = one_host(target)
    partitioner = Partitioner(make_mesh(devices=host.devices))
    devices = partitioner.batch_devices
    multiple = devices * -(-max(encoding.batch_multiple, 8) // devices)
    encoding = dataclasses.replace(encoding, batch_multiple=multiple)
    size = encoding.batch_size(length, platform="tpu")
    params = jax.tree.map(
        lambda leaf: _placed(leaf, partitioner.replicated), abstract_params(module)
    )
    tokens = jax.eval_shape(
        lambda: Tokens(
            ids=jnp.zeros((size, length), jnp.int32), mask=jnp.zeros((size, length), bool)
        )
    )
    tokens = jax.tree.map(lambda leaf: _placed(leaf, partitioner.batch_sharding), tokens)
    static = {"model": module, "role": Role.PASSAGE, "task": None}
    try:
        with phase("compile the encoding of passages"):
            compiled = compile_step(
                embed, params, tokens, mesh=partitioner.mesh, effort=effort, **static
            )
        _check_memory(compiled, host)
    except OutOfMemory as error:
        raise ConfigError(
            f"encoding needs {error.needed / 2**30:.2f} GiB of a device",
            where=host.name,
            expected=f"at most the {error.available / 2**30:.2f} GiB that the chip leaves to it",
            fix=f"lower BATCH_TOKENS, now {encoding.batch_tokens:,}; it decides the batch",
        ) from error
    return StepReport(
        name="encoding of passages, on one host",
        about=f"{size} passages of {length} tokens",
        topology=host,
        mesh=dict(partitioner.mesh.shape),
        compiled=compiled,
        model_flops=forward_flops(model_config, batch_size=size, length=length) / devices,
    )


def _check_memory(compiled: CompiledStep, target: Topology) -> None:
    """Raises `OutOfMemory` where the compiler let more pass than the chip is said to have."""
    needed, available = compiled.memory.peak, target.chip.hbm_bytes
    if needed > available:
        raise OutOfMemory(needed=needed, available=available)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes_of_a_device(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


CONFIGURABLES = (train.train, EncodeConfig, *train.CONFIGURABLES)
