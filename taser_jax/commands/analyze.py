"""`taser analyze`: which parameters of trained models serve which task."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from taser_jax.assembly.data import DeviceBatches, training_queries
from taser_jax.commands.analyzed_models import AnalyzedModel, open_models
from taser_jax.commands.checkpoint_commitment import CheckpointCommitments, steps_to_compare
from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices import hosts
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.evaluation.specialty.commitment import Averages, make_advance
from taser_jax.evaluation.specialty.config import AnalysisConfig
from taser_jax.evaluation.specialty.figures import figures
from taser_jax.evaluation.specialty.findings import Findings, Specialties
from taser_jax.evaluation.specialty.noise import Agreement, agreements
from taser_jax.evaluation.specialty.sensitivity import Sample, Sensitivities, TaskLoss, make_measure
from taser_jax.evaluation.specialty.specialty import (
    Bounds,
    LeafCounts,
    count_leaf,
    entropy_edges,
    on_host,
)
from taser_jax.evaluation.specialty.tables import csv_files, to_markdown
from taser_jax.models.batch import Batch
from taser_jax.models.parameters import parameter_count
from taser_jax.storage.artifacts import replacing, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase, track
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.objective import ObjectiveConfig

_FLOAT_BYTES = 4


@hosts.writes("{output_dir}")
def analyze(
    *,
    model_dirs: Mapping[str, str] | Sequence[str] | str,
    token_store: str,
    output_dir: str,
    steps: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    negatives_dirs: Sequence[str] = (),
    config: AnalysisConfig = AnalysisConfig(),
    batching: TaskBatchingConfig = TaskBatchingConfig(),
    objective: ObjectiveConfig = ObjectiveConfig(),
    num_chunks: int = 1,
    mesh: MeshConfig = MeshConfig(),
) -> Findings:
    """Task-specific sensitivities, task entropy and commitment of trained models.

    For each checkpoint, averages |g·θ| of every parameter and task over training batches, without
    dropout, and divides by the task's median. Writes to `output_dir` analysis.md and, as PNG and
    CSV, sensitivity (and sensitivity_log), entropy, temperature, specialty and, for models with
    several checkpoints, commitment. The files are rewritten after every model.

    Commitment is measured with moving averages that start from zero and continue over the
    checkpoints in order: each adds `num_batches` further batches, as if training had paused there.
    No batch is used twice. "own" is T-SAGE's moving average, where the training saved it.

    Args:
        model_dirs: directories that `taser train` wrote: name -> directory, or a list, or one.
        token_store: source of training queries; must have the models' vocabulary.
        output_dir: directory of tables and figures.
        steps: steps of the checkpoints to analyse; None means all that were kept.
        tasks: two or more; None means all of the token store with a train split.
        negatives_dirs: hard negatives from `taser mine`, as in training.
        config: what is measured.
        batching: sizes of the tasks' batches; should be those of the training.
        objective: the training's loss; its routing regulariser, if any, is left out.
        num_chunks: GradCache chunks of each batch, to bound memory.
        mesh: devices along each mesh axis.

    Returns:
        Counts, rates and agreements of every model.
    """
    partitioner = Partitioner(make_mesh(mesh))
    store = TokenStore.open(token_store)
    queries = training_queries(store, task_names=tasks, negatives_dirs=negatives_dirs)
    _check_tasks(list(queries), config)
    stream = TaskBatchStream(
        store,
        queries,
        batching,
        num_devices=partitioner.batch_devices,
        num_chunks=num_chunks,
        share=partitioner.host_share,
    )
    batches = DeviceBatches(
        stream, queries, partitioner, vocabulary_size=store.metadata.vocabulary_size
    )
    models = open_models(model_dirs, steps=steps, store=store, partitioner=partitioner)
    pairs = {model.name: steps_to_compare(model, config) for model in models}
    # Models of one configuration share compiled programs.
    programs = {
        model.configuration: _programs(
            _task_losses(model, list(queries), objective=objective, num_chunks=num_chunks), config
        )
        for model in models
    }
    _check_losses(models, programs, batches)
    hosts.require_same({"data": stream.fingerprint, "settings": repr((config, model_dirs, steps))})

    findings = Findings(
        tasks=list(queries),
        bounds=config.bounds,
        temperatures=config.all_temperatures,
        specialties=(),
        batch_sizes=stream.batch_sizes,
        judged_at=config.judged_at,
        largest_shown=config.largest_shown,
    )
    with jax.set_mesh(partitioner.mesh):
        for model in models:
            _log_memory_and_data(model, stream, config)
            draw = functools.partial(_draw, batches, model.name)
            program = programs[model.configuration]
            specialties, samples = _specialties(model, program.measure, draw, config)
            found = CheckpointCommitments(model, pairs[model.name], config, samples)
            commitments = (
                [*found.saved(), *found.measured(program.advance, draw, tasks=findings.tasks)]
                if found.pairs
                else []
            )
            findings = dataclasses.replace(
                findings,
                specialties=(*findings.specialties, *specialties),
                commitments=(*findings.commitments, *commitments),
            )
            if hosts.is_first():
                _write(findings, pathlib.Path(output_dir), _measured(stream, store, config))
    logger.info("tables and figures: %s", pathlib.Path(output_dir) / "analysis.md")
    return findings


def _check_tasks(tasks: Sequence[str], config: AnalysisConfig) -> None:
    if len(tasks) < 2:
        raise ConfigError(
            f"{len(tasks)} task{'' if len(tasks) == 1 else 's'}: {', '.join(tasks) or 'none'}",
            where="TASKS",
            expected="two or more tasks to compare",
            fix="take a token store with several tasks, or name more in TASKS",
        )
    entropy_edges(len(tasks), config.bounds)


def _task_losses(
    model: AnalyzedModel, tasks: Sequence[str], *, objective: ObjectiveConfig, num_chunks: int
) -> dict[str, TaskLoss]:
    """The contrastive loss of each task's batch, without dropout or regulariser."""
    plain = dataclasses.replace(objective, regularizer=None)
    loss = make_loss(model.model, objective=plain, num_chunks=num_chunks, train=False)

    def of_task(params: PyTree, batch: Batch, *, task: str) -> jax.Array:
        return loss(params, batch, step=jnp.zeros((), jnp.int32), task=task)[0]

    return {task: functools.partial(of_task, task=task) for task in tasks}


class _Programs(NamedTuple):
    """The compiled functions of one model configuration: losses, means, moving averages."""

    losses: dict[str, TaskLoss]
    measure: Callable[..., Sensitivities]
    advance: Callable[..., Averages]


def _programs(losses: dict[str, TaskLoss], config: AnalysisConfig) -> _Programs:
    return _Programs(
        losses,
        make_measure(losses, over=config.median_over, sampled=config.sampled_parameters),
        make_advance(losses, betas=config.betas, over=config.median_over),
    )


def _check_losses(
    models: Sequence[AnalyzedModel],
    programs: Mapping[str, _Programs],
    batches: DeviceBatches,
) -> None:
    """Traces every loss, so that batches that do not fit a model fail before any compute."""
    _, batch = next(iter(batches.iterate(0, 1)))
    for model in models:
        for task, loss in programs[model.configuration].losses.items():
            jax.eval_shape(loss, model.params, batch[task])


def _draw(batches: DeviceBatches, name: str, start: int, count: int) -> Iterator[dict[str, Batch]]:
    """Batches start .. start + count − 1 of the training's stream, on the devices."""
    found = batches.iterate(start, start + count)
    for _, batch in track(found, f"{name}: batches of every task", total=count):
        yield batch


def _specialties(
    model: AnalyzedModel,
    measure: Callable[..., Sensitivities],
    draw: Callable[[int, int], Iterator[dict[str, Batch]]],
    config: AnalysisConfig,
) -> tuple[list[Specialties], dict[int, Sample]]:
    """Counts and samples at every step of a model, all from the same batches."""
    found, samples = [], {}
    for step in model.steps:
        with phase(f"{model.name}, step {step}: sensitivities"):
            sensitivities = measure(
                model.restore(step),
                draw(config.first_batch, config.num_batches),
                where=str(model.checkpoint(step)),
            )
            agreeing: list[Agreement] = []
            if sensitivities.sample is not None:
                samples[step] = sensitivities.sample
                agreeing = agreements(
                    samples[step], temperature=config.temperature, bounds=config.bounds
                )
            found.append(Specialties(model.name, step, _count(sensitivities, config), agreeing))
    return found, samples


def _count(sensitivities: Sensitivities, config: AnalysisConfig) -> dict[str, LeafCounts]:
    return {
        path: on_host(
            count_leaf(
                leaf,
                sensitivities.medians,
                bounds=config.bounds,
                temperatures=config.all_temperatures,
                sharding=leaf[0].sharding,
            )
        )
        for path, leaf in sensitivities.leaves().items()
    }


def _log_memory_and_data(
    model: AnalyzedModel, stream: TaskBatchStream, config: AnalysisConfig
) -> None:
    """Logs the memory needed, and whether the batches differ from those of the training."""
    size = _FLOAT_BYTES * len(stream.tasks) * parameter_count(model.params)
    logger.info(
        "%s: %.2f GB of sensitivities and %.2f GB of moving averages over all devices",
        *(model.name, size / 1e9, size * len(config.betas) / 1e9),
    )
    trained_on = model.facts.get("data_fingerprint")
    if trained_on is not None and trained_on != stream.fingerprint:
        logger.info(
            "%s: batches are not those it was trained on (another size, seed, task, negatives or "
            "number of devices)",
            model.name,
        )


def _measured(stream: TaskBatchStream, store: TokenStore, config: AnalysisConfig) -> str:
    sizes = ", ".join(f"{task} {size}" for task, size in stream.batch_sizes.items())
    end = config.first_batch + config.num_batches - 1
    return (
        f"Mean |g·θ| over {config.num_batches} batches per task ({config.first_batch} to {end} of "
        f"the training's stream) of {store.metadata.collection}, without dropout, divided by each "
        f"task's median over {config.median_over.value} parameters. Queries per batch: {sizes}."
    )


def _write(findings: Findings, directory: pathlib.Path, measured: str) -> None:
    for name, text in csv_files(findings).items():
        write_text(directory / name, text)
    for name, figure in figures(findings).items():
        with replacing(directory / name) as scratch:
            figure.savefig(scratch, format="png")
    write_text(directory / "analysis.md", to_markdown(findings, measured=measured))


CONFIGURABLES = (AnalysisConfig, Bounds, MeshConfig, ObjectiveConfig, TaskBatchingConfig)
