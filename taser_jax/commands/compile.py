"""`taser compile`: a recipe for a TPU pod, without TPUs; `taser plan`: for a few meshes of each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from taser_jax.assembly.data import check_lengths, lengths, open_store, training_queries
from taser_jax.assembly.plans import TextLengths, TrainingConfig, TrainingTexts, lengths_in
from taser_jax.assembly.program import make_program, step_cost
from taser_jax.devices.compiler import CompilerEffort, OutOfMemory, compile_step
from taser_jax.devices.mesh import MeshConfig, Topology, make_mesh, open_topology
from taser_jax.devices.partitioning import Partitioner, placed
from taser_jax.devices.step_report import RealWork, StepReport
from taser_jax.evaluation.reports import markdown_table
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.stack import Remat
from taser_jax.storage.artifacts import fingerprint_json, storage_errors, write_json, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import flatten

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
        ConfigError: no such topology, a mesh or batch that does not fit its devices, no libtpu,
            lengths of one side alone, or a step that needs more memory than a chip has; the message
            says what would fit.
    """
    if text_lengths is not None:
        _check_text_lengths(text_lengths)
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
        TrainingTexts(
            *lengths(store, feature_lengths or {}), store, queries, task_sizes, text_lengths
        ),
        partitioner=partitioner,
        documents=documents if model.fuses else 0,
    )
    logger.info(
        "compiling for %d devices with %s effort: this takes minutes",
        partitioner.mesh.size,
        compiler_effort.value,
    )
    batches = placed(dict(program.plan.batches), partitioner.batch_sharding)
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
        needed, available, fits = error.needed, error.available, False
        sizes = f"{needed / 2**30:.2f} of {available / 2**30:.2f} GiB per device"
        text = f"training step on {target.name}: does not fit, {sizes}"
        facts = {"fits": False, "memory": {"peak": needed, "hbm": available}}
    else:
        planned, flops, real = program.plan.batches, step_cost(program).flops, None
        if text_lengths is not None:
            typical = program.plan.with_real_lengths(text_lengths)
            real = RealWork(
                tokens=sum(batch.tokens for batch in typical.values()),
                padded_tokens=sum(batch.tokens for batch in planned.values()),
                share=flops(typical) / flops(planned),
            )
        report = StepReport(
            about=f"{sum(len(batch.query_rows) for batch in planned.values())} queries and "
            f"{sum(len(batch.passage_rows) for batch in planned.values())} passages over "
            f"{partitioner.batch_devices} parts",
            topology=target,
            mesh=dict(partitioner.mesh.shape),
            compiled=compiled,
            model_flops=flops(planned) / partitioner.mesh.size,
            real=real,
            copied=program.copied_axes,
        )
        text, facts = str(report), report.as_json()
        # The compiler accepts programs that need more than the chip's published memory.
        needed, available, fits = compiled.memory.peak, target.chip.hbm_bytes, report.fits
    print(f"{text}\n", flush=True)
    if output_dir:
        with storage_errors(output_dir):
            output = epath.Path(output_dir)
            output.mkdir(parents=True, exist_ok=True)
            write_text(output / REPORT_TEXT, text + "\n")
            write_json(output / REPORT_JSON, facts)
    if fits:
        return report
    raise ConfigError(
        f"the training step needs {needed / 2**30:.2f} GiB per device, and the chip leaves "
        f"{available / 2**30:.2f} GiB to it",
        where=target.name,
        fix=what_would_fit(model, training),
    )


def _check_text_lengths(given: TextLengths) -> None:
    example = "{'query': {0: 8, 1: 27}, 'passage': {0: 80, 1: 256}}"
    check_lengths(given, "TEXT_LENGTHS", example)
    for side, quantiles in given.items():
        if not quantiles or (min(quantiles), max(quantiles)) != (0, 1):
            problem = f"quantiles of {side}: {', '.join(map(str, quantiles)) or 'none'}"
            expected = "0, the shortest text, to 1, the longest"
            fix = f'write --gin.TEXT_LENGTHS="{example}"'
            raise ConfigError(problem, where="TEXT_LENGTHS", expected=expected, fix=fix)


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


_HEAD = (
    "mesh (data, fsdp, model)",
    "peak GiB",
    "bound by",
    "ms",
    "MFU ≤",
    "of real tokens",
    "$ per 1,000 steps",
)
# The recipe's own mesh is taken unless another is faster by more than compiled figures can tell.
_WORTH_A_CHANGE = 0.05
_MESHES = 3


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """A step on one mesh of a topology, by the compiler.

    Attributes:
        topology: the chips.
        mesh: devices along each axis.
        peak: bytes on one device.
        fits: whether the chip has that much memory.
        roofline: of a report: bounds of the step's time and of its MFU; empty if it does not fit.
    """

    topology: Topology
    mesh: MeshConfig
    peak: int
    fits: bool
    roofline: Mapping[str, Any]

    def cells(self) -> list[str]:
        """The row of the printed table."""
        _, data, fsdp, model = self.mesh.shape(len(self.topology.devices))
        figures = [f"{data}, {fsdp}, {model}", f"{self.peak / 2**30:.2f}"]
        if not self.fits:
            return [*figures, "does not fit", *[""] * (len(_HEAD) - len(figures) - 1)]
        seconds, price = self.roofline["step_seconds"], self.topology.dollars_an_hour
        shares = (self.roofline[name] for name in ("mfu", "mfu_of_real_tokens"))
        return [
            *figures,
            self.roofline["bound"],
            f"{1e3 * seconds:.2f}",
            *("" if share is None else f"{share:.0%}" for share in shares),
            "" if price is None else f"{1000 * seconds / 3600 * price:.2f}",
        ]


def plan_recipe(
    *,
    topologies: str,
    model: ModelConfig,
    training: TrainingConfig,
    feature_lengths: Mapping[str, int] | None = None,
    task_sizes: Mapping[str, int] | None = None,
    text_lengths: TextLengths | None = None,
    output_dir: str = "plan",
) -> list[PlanRow]:
    """Compiles a recipe for three meshes of each topology: its own, and the usual others.

    These are parameters on every device, parameters split over all devices, and products split over
    two, compiled with quick effort. The recipe's own mesh stays unless another is more than 5%
    faster. Prints a table for each topology with the Gin lines of its best row. Nothing is run.
    Compiled reports are kept in `output_dir`; if interrupted, rerun the command to resume.

    Args:
        topologies: names separated by commas: v5e:2x4,v5p:2x2x1.
        model: the dual encoder.
        training: how it is trained; its mesh may be replaced.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        text_lengths: how long texts are, as `taser compile` takes it.
        output_dir: where compiled reports are kept, by the fingerprint of recipe and mesh.

    Returns:
        The best row of each topology on which something fits.

    Raises:
        ConfigError: nothing fits on any topology; the message names the nearest mesh.
    """
    jax.config.update("jax_platforms", "cpu")
    options = {
        "feature_lengths": feature_lengths,
        "task_sizes": task_sizes,
        "text_lengths": text_lengths,
    }
    best, unfit = [], []
    for topology in [open_topology(name) for name in topologies.split(",")]:
        with storage_errors(output_dir):
            rows = [
                _compiled_row(mesh, topology, model, training, options, epath.Path(output_dir))
                for mesh in _meshes(training.mesh, topology, num_heads=model.transformer.num_heads)
            ]
        rows.sort(key=lambda row: (not row.fits, _judged_seconds(row, training.mesh)))
        print(f"{topology.name}\n\n{markdown_table(_HEAD, [row.cells() for row in rows])}\n")
        if rows[0].fits:
            best.append(rows[0])
            print("\n".join(_gin_lines(rows[0])) + "\n", flush=True)
        else:
            unfit += rows
    if best:
        return best
    least = min(unfit, key=lambda row: row.peak)
    raise ConfigError(
        f"nothing fits; nearest is {', '.join(_gin_lines(least))}, with "
        f"{least.peak / 2**30:.2f} GiB per device on {least.topology.name}",
        where=", ".join(dict.fromkeys(row.topology.name for row in unfit)),
        fix=what_would_fit(model, training),
    )


def _meshes(own: MeshConfig, topology: Topology, *, num_heads: int) -> list[MeshConfig]:
    """The recipe's own mesh, then the usual ones, if they divide the devices.

    Heads that the recipe's own does not divide are computed by all devices of its model axis; other
    model axes divide them. None splits the batch into more parts than the recipe's own, which
    divides it.
    """
    devices = len(topology.devices)
    split = own.model if devices % own.model == 0 else 1
    shapes = [(own.fsdp, own.model), (1, split), (devices // split, split), (1, 2 * split)]
    return [
        dataclasses.replace(own, replica=1, data=-1, fsdp=fsdp, model=model)
        for fsdp, model in dict.fromkeys(shapes)
        if devices % (fsdp * model) == 0 and (num_heads % model == 0 or model == own.model)
    ][:_MESHES]


def _judged_seconds(row: PlanRow, own: MeshConfig) -> float:
    """A step's time, by which rows are ordered."""
    is_own = (row.mesh.fsdp, row.mesh.model) == (own.fsdp, own.model)
    return (1.0 if is_own else 1 + _WORTH_A_CHANGE) * row.roofline.get("step_seconds", 0.0)


def _compiled_row(
    mesh: MeshConfig,
    topology: Topology,
    model: ModelConfig,
    training: TrainingConfig,
    options: Mapping[str, Any],
    output: epath.Path,
) -> PlanRow:
    """The compiler's figures, from `output` if they are there already."""
    training = dataclasses.replace(training, mesh=mesh)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    settings = flatten(model=model, training=training, topology=topology.name)
    folder = output / fingerprint_json({**settings, **versions, "options": options})[:16]
    report = folder / REPORT_JSON
    if not report.exists():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                compile_recipe(
                    topology=topology.name,
                    model=model,
                    training=training,
                    compiler_effort=CompilerEffort.QUICK,
                    output_dir=str(folder),
                    **options,
                )
        except ConfigError:
            # The report is written before a step that does not fit is an error.
            if not report.exists():
                raise
    step = json.loads(report.read_text())
    roofline = step["roofline"] if step["fits"] else {}
    return PlanRow(topology, mesh, step["memory"]["peak"], step["fits"], roofline)


def _gin_lines(row: PlanRow) -> list[str]:
    return [f"MESH_FSDP = {row.mesh.fsdp}", f"NUM_MODEL_PARTITIONS = {row.mesh.model}"]
