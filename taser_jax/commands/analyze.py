"""`taser analyze`: which parameters of trained models serve which task."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.tree_util import DictKey, KeyPath, SequenceKey, tree_leaves_with_path, tree_map_with_path
from jaxtyping import PyTree

from taser_jax.assembly import model_directory
from taser_jax.assembly.data import DeviceBatches, fit_vocabulary, training_queries
from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices import hosts
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner, parameter_path, placed
from taser_jax.evaluation import commitment, specialty, specialty_report
from taser_jax.evaluation.reports import save_figure
from taser_jax.models.batch import Batch
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, logical_axes
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage import BiasCorrection
from taser_jax.storage.artifacts import write_json, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase, track
from taser_jax.storage.typed_files import Checked, Positive, PositiveNumber
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.checkpoints import restore_params_from
from taser_jax.training.objective import ObjectiveConfig

# Among a training's settings.
_BIAS_CORRECTION = "training.multitask.combiner.tsage.bias_correction"


@dataclasses.dataclass(frozen=True)
class AnalysisConfig(Checked):
    """What is measured.

    Attributes:
        num_batches: batches of each task at each checkpoint.
        temperature: τ of the softmax over tasks.
        median_over: entries over which medians are taken.
    """

    num_batches: Positive = 16
    temperature: PositiveNumber = 2.0
    median_over: MedianOver = MedianOver.ALL


@hosts.writes("{output_dir}", kinds=[])
def analyze(
    *,
    model_dirs: Mapping[str, str] | str,
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
) -> specialty_report.Findings:
    """Task-specific sensitivities, task entropy and commitment of trained models.

    For each checkpoint, averages |g·θ| of every parameter and task over training batches, without
    dropout, and divides by the task's median. Writes to `output_dir` analysis.md, sensitivity.png,
    entropy.png and, with all counts, analysis.json. The files are rewritten after every model.

    Commitment is that of T-SAGE's moving averages, where the training saved them.

    Args:
        model_dirs: name -> directory that `taser train` wrote; or one directory.
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
        Counts and rates of every model.
    """
    partitioner = Partitioner(make_mesh(mesh))
    store = TokenStore.open(token_store)
    queries = training_queries(store, task_names=tasks, negatives_dirs=negatives_dirs)
    if len(queries) < 2:
        problem = f"{len(queries)} of two tasks or more: {', '.join(queries) or 'none'}"
        fix = "take a token store with several tasks, or name two or more in TASKS"
        raise ConfigError(problem, where="TASKS", fix=fix)
    stream = TaskBatchStream(
        store,
        queries,
        batching,
        num_devices=partitioner.batch_devices,
        num_chunks=num_chunks,
        share=partitioner.host_share,
    )
    batches = DeviceBatches(stream, queries, partitioner)
    named = {"model": model_dirs} if isinstance(model_dirs, str) else model_dirs
    models = [
        _open(name, directory, steps, store=store, partitioner=partitioner)
        for name, directory in named.items()
    ]
    losses = {
        model.model: _task_losses(model.model, list(queries), objective, num_chunks)
        for model in models
    }
    # Batches that do not fit a model fail before any compute.
    _, first_batch = next(iter(batches.iterate(0, 1)))
    for model in models:
        for task, loss in losses[model.model].items():
            jax.eval_shape(loss, model.params, first_batch[task])
    hosts.require_same({"data": stream.fingerprint, "settings": repr((config, model_dirs, steps))})

    # Models of one configuration share compiled programs.
    measures = {
        module: specialty.make_measures(of_tasks, over=config.median_over)
        for module, of_tasks in losses.items()
    }
    findings = specialty_report.Findings(list(queries), config.temperature)
    with jax.set_mesh(partitioner.mesh):
        for model in models:
            counted, samples = _specialties(model, measures[model.model], batches, config)
            committed = _commitments(model, samples, config.temperature)
            of_model = {model.name: committed} if committed else {}
            findings = dataclasses.replace(
                findings,
                specialties=(*findings.specialties, *counted),
                commitments={**findings.commitments, **of_model},
            )
            if hosts.is_first():
                _write(findings, pathlib.Path(output_dir), _measured(stream, store, config))
    logger.info("tables and figures: %s", pathlib.Path(output_dir) / "analysis.md")
    return findings


@dataclasses.dataclass(frozen=True)
class AnalyzedModel:
    """One model directory and the steps to analyse.

    Attributes:
        name: its name in tables and figures.
        directory: the model directory, from `taser train`.
        model: the dual encoder; equal ones share compiled programs.
        params: shapes, dtypes and shardings of its parameters.
        steps: steps of the checkpoints to analyse, ascending.
    """

    name: str
    directory: epath.Path
    model: DualEncoder
    params: PyTree
    steps: tuple[int, ...]

    def checkpoint(self, step: int) -> epath.Path:
        """The directory of a step's checkpoint."""
        return model_directory.checkpoint_path(self.directory, step)


def _open(
    name: str,
    model_dir: str,
    steps: Sequence[int] | None,
    *,
    store: TokenStore,
    partitioner: Partitioner,
) -> AnalyzedModel:
    """Opens and checks a model; reads no parameters yet."""
    directory = epath.Path(model_dir)
    config = model_directory.read_model_config(directory)
    model_directory.check_vocabulary(directory / model_directory.VOCABULARY, store)
    fit_vocabulary(config, store)
    model = DualEncoder(config)
    shapes = abstract_params(model)
    return AnalyzedModel(
        name=name,
        directory=directory,
        model=model,
        params=placed(shapes, partitioner.param_shardings(logical_axes(model), shapes)),
        steps=_steps(directory, steps),
    )


def _steps(directory: epath.Path, requested: Sequence[int] | None) -> tuple[int, ...]:
    saved = model_directory.checkpoint_steps(directory)
    missing = [step for step in requested or () if step not in saved]
    if missing:
        raise ConfigError(
            f"no checkpoint of step {', '.join(map(str, missing))}",
            where=str(directory),
            expected=f"some of {', '.join(map(str, saved))}",
            fix="correct analyze.steps; `--gin.CheckpointConfig.keep_latest=1000` makes "
            "`taser train` keep all checkpoints, one every CHECKPOINT_PERIOD steps",
        )
    return tuple(sorted(set(requested or saved)))


def _task_losses(
    model: DualEncoder, tasks: Sequence[str], objective: ObjectiveConfig, num_chunks: int
) -> dict[str, specialty.TaskLoss]:
    """The contrastive loss of each task's batch, without dropout or regulariser."""
    plain = dataclasses.replace(objective, regularizer=None).for_model(
        dim=model.config.embedding_dim, normalization=model.config.normalization
    )
    loss = make_loss(model, objective=plain, num_chunks=num_chunks, train=False)

    def of_task(params: PyTree, batch: Batch, *, task: str) -> jax.Array:
        return loss(params, batch, step=jnp.zeros((), jnp.int32), task=task)[0]

    return {task: functools.partial(of_task, task=task) for task in tasks}


def _specialties(
    model: AnalyzedModel,
    measures: specialty.Measures,
    batches: DeviceBatches,
    config: AnalysisConfig,
) -> tuple[list[specialty_report.Specialties], dict[int, commitment.Sample]]:
    """Counts and samples at every step of a model, all from the same batches."""
    specialties, samples = [], {}
    for step in model.steps:
        checkpoint = model.checkpoint(step)
        with phase(f"{model.name}, step {step}: sensitivities"):
            drawn = track(
                (batch for _, batch in batches.iterate(0, config.num_batches)),
                f"{model.name}: batches of every task",
                total=config.num_batches,
            )
            sensitivities = specialty.total_sensitivities(
                measures,
                restore_params_from(checkpoint, abstract_params=model.params),
                drawn,
                checkpoint=str(checkpoint),
                over=config.median_over,
            )
            counts = {
                path: specialty.count_leaf(
                    leaf,
                    sensitivities.medians,
                    temperature=config.temperature,
                    sharding=leaf[0].sharding,
                )
                for path, leaf in sensitivities.leaves().items()
            }
            # Fetched first: what else a CPU computes may keep fake devices from their collectives.
            leaves = jax.device_get(counts)
            samples[step] = sensitivities.sample
            noise = commitment.noise_specialty(
                samples[step], temperature=config.temperature, over=config.median_over
            )
            specialties.append(specialty_report.Specialties(model.name, step, leaves, noise))
    return specialties, samples


def _commitments(
    model: AnalyzedModel, samples: Mapping[int, commitment.Sample], temperature: float
) -> list[commitment.Commitment]:
    """Rates of T-SAGE's own averages from step to step; none for other trainings."""
    beta = model_directory.read_facts(model.directory).get("tsage_beta")
    if beta is None or len(model.steps) < 2:
        return []
    settings = model_directory.read_settings(model.directory)
    with phase(f"{model.name}: commitment"):
        averages = (
            (step, _saved_averages(model.checkpoint(step), model.params)) for step in model.steps
        )
        return commitment.commitments(
            averages,
            samples,
            beta=beta,
            temperature=temperature,
            correction=BiasCorrection(settings.get(_BIAS_CORRECTION) or "none"),
        )


def _saved_averages(checkpoint: epath.Path, abstract_params: PyTree) -> commitment.Averages:
    """The averages that T-SAGE took its weights from, as a checkpoint's optimiser state has them.

    Args:
        checkpoint: the `checkpoint_N` directory of a training with T-SAGE.
        abstract_params: shapes and shardings of the parameters.

    Returns:
        Averages of the trainable parameters.
    """
    shardings = {
        parameter_path(path): leaf.sharding for path, leaf in tree_leaves_with_path(abstract_params)
    }
    directory = checkpoint / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(directory).item_metadata.tree
        paths = (tuple(map(_name, path)) for path, _ in tree_leaves_with_path(tree))
        # Keys down to the field `average` of `TSageState`.
        above = next(path[: path.index("average") + 1] for path in paths if "average" in path)

        def requested(path: KeyPath, leaf: PyTree) -> PyTree:
            """The average's shape and sharding; a placeholder for leaves that are not read."""
            if tuple(map(_name, path[: len(above)])) != above:
                return ocp.PLACEHOLDER
            sharding = shardings[parameter_path(path[len(above) + 1 :])]
            return jax.ShapeDtypeStruct(tuple(leaf.shape), jnp.float32, sharding=sharding)

        item = tree_map_with_path(requested, tree)
        arguments = ocp.checkpoint_utils.construct_restore_args(item)
        restored = reader.restore(
            directory, args=ocp.args.PyTreeRestore(item=item, restore_args=arguments)
        )
    for key in above:
        restored = restored[key]
    return restored


def _name(key: SequenceKey | DictKey) -> str | int:
    """A dictionary's key or a list's place, from a JAX path."""
    return key.idx if isinstance(key, SequenceKey) else key.key


def _measured(stream: TaskBatchStream, store: TokenStore, config: AnalysisConfig) -> str:
    sizes = ", ".join(f"{task} {size}" for task, size in stream.batch_sizes.items())
    return (
        f"Mean |g·θ| over the first {config.num_batches} batches per task of the training's stream "
        f"of {store.metadata.collection}, without dropout, divided by each task's median over "
        f"{config.median_over.value} parameters. Queries per batch: {sizes}."
    )


def _write(findings: specialty_report.Findings, directory: pathlib.Path, measured: str) -> None:
    write_json(directory / "analysis.json", specialty_report.to_json(findings))
    save_figure(directory / "sensitivity.png", specialty_report.sensitivity_figure(findings))
    save_figure(directory / "entropy.png", specialty_report.entropy_figure(findings))
    write_text(directory / "analysis.md", specialty_report.to_markdown(findings, measured=measured))
