"""`taser plan`: chooses mesh, rematerialisation and chunks for a recipe on TPU topologies."""

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

from taser_jax.assembly.candidates import Candidate, Estimate, best_first, candidates, estimate
from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.plans import TextLengths
from taser_jax.assembly.program import Program, make_program
from taser_jax.commands.compile import REPORT_JSON, compile_recipe, real_work
from taser_jax.devices.compiler import CompilerEffort
from taser_jax.devices.mesh import make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.devices.topologies import Topology, open_topology
from taser_jax.evaluation.reports import markdown_table
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.layers import Remat
from taser_jax.models.parameters import parameter_count
from taser_jax.storage.artifacts import fingerprint_json, storage_errors, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import flatten

_STARTED = "started"
_HEAD = (
    "mesh (data, fsdp, model)",
    "remat",
    "chunks",
    "by",
    "peak GiB",
    "bound by",
    "ms",
    "MFU ≤",
    "of real tokens",
    "$ per 1,000 steps",
)
# The recipe's own mesh is taken unless another is faster by more than compiled figures can tell.
_WORTH_A_CHANGE = 0.05


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One way to compute a step, with the figures known for it.

    Attributes:
        topology: the chips that compute it.
        candidate: mesh, rematerialisation, chunks.
        compiled: whether the figures are the compiler's, or from formulas.
        peak: bytes on one device.
        fits: whether the chip has that much memory; False also where the compiler was killed.
        bound: what limits the step; empty if it does not fit.
        step_seconds: lower bound of its time; None if it does not fit.
        mfu: upper bound of its MFU; None if it does not fit.
        real_mfu: the same of the work that is not padding; None where lengths are unknown, too.
    """

    topology: Topology
    candidate: Candidate
    compiled: bool
    peak: int = 0
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
        each = self.candidate
        data = len(self.topology.devices) // (each.fsdp * each.model)
        time = self.step_seconds
        return [
            f"{data}, {each.fsdp}, {each.model}",
            each.remat.value,
            str(each.num_chunks),
            "compiler" if self.compiled else "formula",
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
    num_compiled: int = 2,
    compiler_effort: CompilerEffort = CompilerEffort.QUICK,
    output_dir: str = "plan",
) -> list[PlanRow]:
    """Looks for the fastest mesh, rematerialisation and number of chunks that fit a topology.

    Formulas rank all candidates that divide devices, heads and batch evenly. The best one with the
    recipe's own mesh and the best few others are compiled, and the compiler decides: the recipe's
    own mesh stays unless another is more than 5% faster. Prints a table for each topology with the
    Gin lines of its best row and, for several topologies, compares their steps, chip-hours and
    prices. Nothing is run. Compiled reports are kept in `output_dir`; if interrupted, rerun the
    command to resume.

    Args:
        topologies: names separated by commas: v5e:2x4,v5p:2x2x1.
        model: the dual encoder.
        training: how it is trained; its mesh may, its chunks and rematerialisation are replaced.
        feature_lengths: {"query": ..., "passage": ...}, tokens.
        task_sizes: task -> training queries, for recipes with a batch of every task.
        text_lengths: how long texts are, as `taser compile` takes it.
        num_compiled: candidates to compile for each topology, the recipe's own mesh among them; 0
            uses the formulas alone.
        compiler_effort: quick, or full, as a training run gets.
        output_dir: where compiled reports are kept, by the fingerprint of recipe and candidate.

    Returns:
        The best row of each topology on which something fits.

    Raises:
        ConfigError: nothing fits on any topology; the message names the nearest candidate.
    """
    jax.config.update("jax_platforms", "cpu")
    best, nearest = [], []
    for target in [open_topology(name) for name in topologies.split(",")]:
        program = make_program(
            model,
            dataclasses.replace(training, num_chunks=1),
            partitioner=Partitioner(make_mesh(devices=target.devices), training.rules),
            store=None,
            queries={},
            feature_lengths=feature_lengths or {},
            task_sizes=task_sizes,
            text_lengths=text_lengths,
        )
        real_share = None if text_lengths is None else real_work(program, text_lengths).share
        estimates = _estimates(program, target)
        ranked = best_first(estimates)
        # The best with the recipe's own mesh comes first.
        own = [each for each in ranked if _is_own(each.candidate, training)][:1]
        ranked = own + [each for each in ranked if each not in own]
        rows = [_formula_row(each, target, real_share) for each in ranked[: max(num_compiled, 5)]]
        with storage_errors(output_dir):
            compiled = [
                _compiled_row(
                    each.candidate,
                    target,
                    model=model,
                    training=training,
                    options={
                        "feature_lengths": feature_lengths,
                        "task_sizes": task_sizes,
                        "text_lengths": text_lengths,
                    },
                    effort=compiler_effort,
                    output=epath.Path(output_dir),
                )
                for each in ranked[:num_compiled]
            ]
        rows = sorted(
            [*compiled, *rows[len(compiled) :]],
            key=lambda row: (not row.fits, not row.compiled, _judged_seconds(row, training)),
        )
        if rows and rows[0].fits:
            best.append(rows[0])
        else:
            least = min(estimates, key=lambda each: each.peak)
            nearest.append(_formula_row(least, target, real_share))
        print(f"{target.name}\n\n{markdown_table(_HEAD, [row.cells() for row in rows])}\n")
        if best and best[-1].topology is target:
            print(f"{_gin_lines(best[-1], model)}\n", flush=True)
    if not best:
        raise _nothing_fits(nearest, model)
    if len(best) > 1:
        print(_comparison(best))
    return best


def _is_own(candidate: Candidate, training: TrainingConfig) -> bool:
    return (candidate.fsdp, candidate.model) == (training.mesh.fsdp, training.mesh.model)


def _judged_seconds(row: PlanRow, training: TrainingConfig) -> float:
    """A step's time, by which rows are ordered."""
    share = 1.0 if _is_own(row.candidate, training) else 1 + _WORTH_A_CHANGE
    return share * (row.step_seconds or 0.0)


def _estimates(program: Program, target: Topology) -> list[Estimate]:
    config, shapes = program.model.config, list(program.plan.shapes.values())
    heads, param_bytes = config.transformer.num_heads, 4 * parameter_count(program.params)
    return [
        estimate(each, target, config=config, shapes=shapes, param_bytes=param_bytes)
        for each in candidates(len(target.devices), shapes=shapes, num_heads=heads)
    ]


def _formula_row(each: Estimate, target: Topology, real_share: float | None) -> PlanRow:
    return PlanRow(
        topology=target,
        candidate=each.candidate,
        compiled=False,
        peak=each.peak,
        fits=each.fits,
        bound=each.roofline.bound,
        step_seconds=each.roofline.step_seconds,
        mfu=each.roofline.mfu,
        real_mfu=None if real_share is None else real_share * each.roofline.mfu,
    )


def _compiled_row(
    candidate: Candidate,
    target: Topology,
    *,
    model: ModelConfig,
    training: TrainingConfig,
    options: Mapping[str, Any],
    effort: CompilerEffort,
    output: epath.Path,
) -> PlanRow:
    """The compiler's figures, from `output` if they are there already."""
    model = model.with_transformer(remat=candidate.remat)
    mesh = dataclasses.replace(
        training.mesh, replica=1, data=-1, fsdp=candidate.fsdp, model=candidate.model
    )
    training = dataclasses.replace(training, mesh=mesh, num_chunks=candidate.num_chunks)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    settings = flatten(model=model, training=training, topology=target.name, effort=effort)
    folder = output / fingerprint_json({**settings, **versions, "options": options})[:16]
    report = folder / REPORT_JSON
    if not report.exists():
        if (folder / _STARTED).exists():
            logger.warning("the compiler died in %s; delete it to try again", folder)
            return PlanRow(target, candidate, compiled=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / _STARTED, json.dumps(settings, indent=2))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                compile_recipe(
                    topology=target.name,
                    model=model,
                    training=training,
                    encoding=None,
                    compiler_effort=effort,
                    output_dir=str(folder),
                    **options,
                )
        except ConfigError:
            # The report is written before a step that does not fit is an error.
            if not report.exists():
                raise
        finally:
            # Stays only if the compiler takes the process with it.
            (folder / _STARTED).unlink(missing_ok=True)
    (step,) = json.loads(report.read_text())
    row = PlanRow(target, candidate, compiled=True, peak=step["memory"]["peak"])
    if not step["fits"]:
        return row
    time = {name: step["roofline"][name] for name in ("bound", "step_seconds", "mfu")}
    real_mfu = step["roofline"]["mfu_of_real_tokens"]
    return dataclasses.replace(row, fits=True, real_mfu=real_mfu, **time)


def _gin_lines(row: PlanRow, model: ModelConfig) -> str:
    each = row.candidate
    lines = [
        f"MESH_FSDP = {each.fsdp}",
        f"NUM_MODEL_PARTITIONS = {each.model}",
        f"TrainingConfig.num_chunks = {each.num_chunks}",
    ]
    if each.remat is not Remat.NONE or model.transformer.remat is not Remat.NONE:
        lines.append(f"{type(model.transformer).__name__}.remat = '{each.remat.value}'")
    return "\n".join(lines)


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


def _nothing_fits(nearest: Sequence[PlanRow], model: ModelConfig) -> ConfigError:
    least = min(nearest, key=lambda row: row.peak)
    lines = _gin_lines(least, model).replace("\n", ", ")
    return ConfigError(
        f"nothing fits; nearest is {lines}, with {least.peak / 2**30:.2f} GiB per device on "
        f"{least.topology.name} by formula",
        where=", ".join(row.topology.name for row in nearest),
        fix="take more chips, chips with more memory, or a smaller BATCH_SIZE",
    )
