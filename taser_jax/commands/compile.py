"""`taser compile`: compiles a recipe for a TPU pod on a machine without TPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from etils import epath

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.data import open_store, training_queries
from taser_jax.assembly.plans import TextLengths, lengths_in
from taser_jax.assembly.program import Program, make_program
from taser_jax.devices.compiler import CompilerEffort, OutOfMemory, compile_step
from taser_jax.devices.mesh import make_mesh
from taser_jax.devices.partitioning import Partitioner, placed
from taser_jax.devices.step_report import RealWork, StepReport
from taser_jax.devices.topologies import open_topology
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.layers import Remat
from taser_jax.storage.artifacts import storage_errors, write_json, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

REPORT_JSON, REPORT_TEXT = "report.json", "report.txt"


def compile_recipe(
    *,
    topology: str | None,
    model: ModelConfig,
    training: TrainingConfig,
    feature_lengths: Mapping[str, int] | None = None,
    num_slices: int = 1,
    task_sizes: Mapping[str, int] | None = None,
    text_lengths: TextLengths | None = None,
    documents: int = 10,
    token_store: str = "",
    tasks: Sequence[str] | None = None,
    compiler_effort: CompilerEffort = CompilerEffort.FULL,
    output_dir: str = "",
) -> StepReport:
    """Compiles the step of a training recipe for a TPU topology, with no TPU and no data.

    The TPU compiler comes with libtpu (the extra `tpu`). The command prints memory per device
    beside the chip's, FLOPs beside the model's formulas, bytes, collectives, float32 products and a
    roofline estimate. Nothing is run: times are bounds, not measurements. The report is printed and
    written before a step that does not fit stops the command.

    Args:
        topology: "<generation>:<chips along each axis>", such as v5e:4x4.
        model: the dual encoder.
        training: how it is trained; mesh, batch and chunks are what matters here.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        num_slices: slices of the topology.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        text_lengths: {"query": {quantile: tokens}, "passage": ...}: how long texts are, which
            decides the groups of `TrainingConfig.length_buckets` and the report's share of padding;
            None pads all to `feature_lengths`.
        documents: documents fused with each query, K, for models that fuse them; 0 compiles
            queries alone.
        token_store: token store to take `task_sizes`, `feature_lengths` and `text_lengths` from.
        tasks: tasks to train on, of those in the token store.
        compiler_effort: full, as a training run gets, or quick.
        output_dir: where report.json and report.txt go; empty writes no files.

    Returns:
        The report of a step that fits.

    Raises:
        ConfigError: no such topology, a mesh or batch that does not fit its devices, no libtpu, or
            a step that needs more memory than a chip has; the message says what would fit.
    """
    # Nothing is run: a TPU of this machine stays unused.
    jax.config.update("jax_platforms", "cpu")
    target = open_topology(topology, num_slices=num_slices)
    store = open_store(token_store, dry_run=not token_store)
    queries = {} if store is None else training_queries(store, task_names=tasks)
    if store is not None:
        text_lengths = lengths_in(store, queries)
    partitioner = Partitioner(make_mesh(training.mesh, devices=target.devices))
    program = make_program(
        model,
        training,
        partitioner=partitioner,
        store=store,
        queries=queries,
        feature_lengths=feature_lengths or {},
        task_sizes=task_sizes,
        text_lengths=text_lengths,
        documents=documents if model.fuses else 0,
    )
    logger.info(
        "compiling for %d devices with %s effort: this takes minutes",
        partitioner.mesh.size,
        compiler_effort.value,
    )
    batches = placed(program.plan.abstract_batches(), partitioner.batch_sharding)
    try:
        with phase("compile the training step"):
            compiled = compile_step(
                program.train_step,
                program.state,
                batches,
                mesh=partitioner.mesh,
                effort=compiler_effort,
            )
    except OutOfMemory as error:
        needed, available = error.needed, error.available
        sizes = f"{needed / 2**30:.2f} of {available / 2**30:.2f} GiB per device"
        facts = {"fits": False, "memory": {"peak": needed, "hbm": available}}
        _show(f"training step on {target.name}: does not fit, {sizes}", facts, output_dir)
    else:
        shapes, config = program.plan.shapes.values(), program.model.config
        report = StepReport(
            about=f"{sum(shape.queries for shape in shapes)} queries and "
            f"{sum(shape.passages for shape in shapes)} passages over "
            f"{partitioner.batch_devices} parts",
            topology=target,
            mesh=dict(partitioner.mesh.shape),
            compiled=compiled,
            model_flops=sum(map(config.training_flops, shapes)) / partitioner.mesh.size,
            real=None if text_lengths is None else _real_work(program, text_lengths),
            copied=program.copied_axes,
        )
        _show(str(report), report.as_json(), output_dir)
        # The compiler accepts programs that need more than the chip's published memory.
        needed, available = compiled.memory.peak, target.chip.hbm_bytes
        if report.fits:
            return report
    raise ConfigError(
        f"the training step needs {needed / 2**30:.2f} GiB per device, and the chip leaves "
        f"{available / 2**30:.2f} GiB to it",
        where=target.name,
        fix=what_would_fit(model, training),
    )


def _show(text: str, facts: Mapping[str, object], output_dir: str) -> None:
    """Prints the report, and writes it where a directory is given."""
    print(f"{text}\n", flush=True)
    if output_dir:
        with storage_errors(output_dir):
            output = epath.Path(output_dir)
            output.mkdir(parents=True, exist_ok=True)
            write_text(output / REPORT_TEXT, text + "\n")
            write_json(output / REPORT_JSON, facts)


def _real_work(program: Program, text_lengths: TextLengths) -> RealWork:
    """What a step computes of typical texts."""
    config, padded = program.model.config, program.plan.shapes.values()
    real = program.plan.real_shapes(text_lengths).values()
    return RealWork(
        tokens=sum(shape.tokens for shape in real),
        padded_tokens=sum(shape.tokens for shape in padded),
        share=sum(map(config.training_flops, real)) / sum(map(config.training_flops, padded)),
    )


def what_would_fit(model: ModelConfig, training: TrainingConfig) -> str:
    """Settings to change where a training step needs too much memory."""
    fixes = [
        "MESH_FSDP splits parameters and optimiser state",
        f"TrainingConfig.num_chunks={2 * training.num_chunks} encodes a part of the batch at a "
        "time",
        "more chips, over which the batch is split",
    ]
    if model.transformer.remat is Remat.NONE:
        name = type(model.transformer).__name__
        fixes.insert(1, f"{name}.remat=block recomputes each block in the backward pass")
    return "; or ".join(fixes)
