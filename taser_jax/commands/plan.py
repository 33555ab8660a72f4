"""`taser plan`: compiles a recipe for a few meshes of each TPU topology, and compares them."""

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

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.plans import TextLengths
from taser_jax.commands.compile import REPORT_JSON, compile_recipe, what_would_fit
from taser_jax.devices.compiler import CompilerEffort
from taser_jax.devices.mesh import MeshConfig
from taser_jax.devices.topologies import Topology, open_topology
from taser_jax.evaluation.reports import markdown_table
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.artifacts import fingerprint_json, storage_errors
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import flatten

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
        bound: what limits the step; empty if it does not fit.
        step_seconds: lower bound of its time; None if it does not fit.
        mfu: upper bound of its MFU; None if it does not fit.
        real_mfu: the same of the work that is not padding; None where lengths are unknown, too.
    """

    topology: Topology
    mesh: MeshConfig
    peak: int
    fits: bool = False
    bound: str = ""
    step_seconds: float | None = None
    mfu: float | None = None
    real_mfu: float | None = None

    @property
    def dollars(self) -> str:
        """Price of 1,000 steps; empty if unknown."""
        price = self.topology.dollars_an_hour
        if price is None or self.step_seconds is None:
            return ""
        return f"{1000 * self.step_seconds / 3600 * price:.2f}"

    def cells(self) -> list[str]:
        """The row of the printed table."""
        _, data, fsdp, model = self.mesh.shape(len(self.topology.devices))
        time = self.step_seconds
        return [
            f"{data}, {fsdp}, {model}",
            f"{self.peak / 2**30:.2f}",
            self.bound if self.fits else "does not fit",
            "" if time is None else f"{1e3 * time:.2f}",
            *("" if share is None else f"{share:.0%}" for share in (self.mfu, self.real_mfu)),
            self.dollars,
        ]


def plan_recipe(
    *,
    topologies: str,
    model: ModelConfig,
    training: TrainingConfig,
    feature_lengths: Mapping[str, int] | None = None,
    task_sizes: Mapping[str, int] | None = None,
    text_lengths: TextLengths | None = None,
    compiler_effort: CompilerEffort = CompilerEffort.QUICK,
    output_dir: str = "plan",
) -> list[PlanRow]:
    """Compiles a recipe for three meshes of each topology: its own, and the usual others.

    These are parameters on every device, parameters split over all devices, and products split over
    two. The recipe's own mesh stays unless another is more than 5% faster. Prints a table for each
    topology with the Gin lines of its best row and, for several topologies, compares their steps,
    chip-hours and prices. Nothing is run. Compiled reports are kept in `output_dir`; if
    interrupted, rerun the command to resume.

    Args:
        topologies: names separated by commas: v5e:2x4,v5p:2x2x1.
        model: the dual encoder.
        training: how it is trained; its mesh may be replaced.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        text_lengths: how long texts are, as `taser compile` takes it.
        compiler_effort: quick, or full, as a training run gets.
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
                _compiled_row(
                    mesh,
                    topology,
                    model=model,
                    training=training,
                    options=options,
                    effort=compiler_effort,
                    output=epath.Path(output_dir),
                )
                for mesh in _meshes(training.mesh, topology, num_heads=model.transformer.num_heads)
            ]
        rows.sort(key=lambda row: (not row.fits, _judged_seconds(row, training.mesh)))
        print(f"{topology.name}\n\n{markdown_table(_HEAD, [row.cells() for row in rows])}\n")
        if rows[0].fits:
            best.append(rows[0])
            print("\n".join(_gin_lines(rows[0])) + "\n", flush=True)
        else:
            unfit += rows
    if not best:
        raise _nothing_fits(unfit, model, training)
    if len(best) > 1:
        print(_comparison(best))
    return best


def _meshes(own: MeshConfig, topology: Topology, *, num_heads: int) -> list[MeshConfig]:
    """The recipe's own mesh, then the usual ones, if they divide devices and heads.

    None splits the batch into more parts than the recipe's own, which divides it.
    """
    devices = len(topology.devices)
    split = own.model if devices % own.model == 0 else 1
    shapes = [(own.fsdp, own.model), (1, split), (devices // split, split), (1, 2 * split)]
    return [
        dataclasses.replace(own, replica=1, data=-1, fsdp=fsdp, model=model)
        for fsdp, model in dict.fromkeys(shapes)
        if devices % (fsdp * model) == 0 and num_heads % model == 0
    ][:_MESHES]


def _judged_seconds(row: PlanRow, own: MeshConfig) -> float:
    """A step's time, by which rows are ordered."""
    is_own = (row.mesh.fsdp, row.mesh.model) == (own.fsdp, own.model)
    return (1.0 if is_own else 1 + _WORTH_A_CHANGE) * (row.step_seconds or 0.0)


def _compiled_row(
    mesh: MeshConfig,
    topology: Topology,
    *,
    model: ModelConfig,
    training: TrainingConfig,
    options: Mapping[str, Any],
    effort: CompilerEffort,
    output: epath.Path,
) -> PlanRow:
    """The compiler's figures, from `output` if they are there already."""
    training = dataclasses.replace(training, mesh=mesh)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    settings = flatten(model=model, training=training, topology=topology.name, effort=effort)
    folder = output / fingerprint_json({**settings, **versions, "options": options})[:16]
    report = folder / REPORT_JSON
    if not report.exists():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                compile_recipe(
                    topology=topology.name,
                    model=model,
                    training=training,
                    compiler_effort=effort,
                    output_dir=str(folder),
                    **options,
                )
        except ConfigError:
            # The report is written before a step that does not fit is an error.
            if not report.exists():
                raise
    step = json.loads(report.read_text())
    row = PlanRow(topology, mesh, peak=step["memory"]["peak"])
    if not step["fits"]:
        return row
    time = {name: step["roofline"][name] for name in ("bound", "step_seconds", "mfu")}
    real_mfu = step["roofline"]["mfu_of_real_tokens"]
    return dataclasses.replace(row, fits=True, real_mfu=real_mfu, **time)


def _gin_lines(row: PlanRow) -> list[str]:
    return [f"MESH_FSDP = {row.mesh.fsdp}", f"NUM_MODEL_PARTITIONS = {row.mesh.model}"]


def _comparison(best: Sequence[PlanRow]) -> str:
    def chip_hours(row: PlanRow) -> float:
        return 1000 * (row.step_seconds or 0.0) * row.topology.num_chips / 3600

    rows = [
        (
            row.topology.name,
            row.topology.num_chips,
            f"{1e3 * (row.step_seconds or 0.0):.2f}",
            f"{chip_hours(row):.2f}",
            row.dollars,
            row.bound,
        )
        for row in sorted(best, key=chip_hours)
    ]
    head = ("topology", "chips", "ms a step", "chip-hours per 1,000 steps", "$", "bound by")
    return markdown_table(head, rows)


def _nothing_fits(
    rows: Sequence[PlanRow], model: ModelConfig, training: TrainingConfig
) -> ConfigError:
    least = min(rows, key=lambda row: row.peak)
    return ConfigError(
        f"nothing fits; nearest is {', '.join(_gin_lines(least))}, with "
        f"{least.peak / 2**30:.2f} GiB per device on {least.topology.name}",
        where=", ".join(dict.fromkeys(row.topology.name for row in rows)),
        fix=what_would_fit(model, training),
    )
