"""`taser ensemble`: networks on a specialist's embeddings that measure its confidence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
from etils import epath

from taser_jax.assembly.metric_writers import make_writers
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices import hosts
from taser_jax.devices.topologies import peak_flops
from taser_jax.models.parameters import parameters_fingerprint
from taser_jax.optim.optimizers import build_optimizer
from taser_jax.storage.artifacts import (
    fingerprint_json,
    follow_plan,
    storage_errors,
    write_text,
)
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import to_plain
from taser_jax.systems.muf.ensemble_files import (
    KIND,
    Ensemble,
    EnsembleBatches,
    EnsembleTraining,
    SpecialistVectors,
)
from taser_jax.systems.muf.members import (
    MemberPlacement,
    init_ensemble_state,
    init_members,
    make_ensemble_eval,
    make_ensemble_step,
)
from taser_jax.training import loop
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints
from taser_jax.training.state import Params
from taser_jax.training.watch import StepCost

# A warm-up of DPR's 1,237 steps may be longer than the whole run on a small task.
_WARMUP_SHARE = 10
# The split whose queries choose the checkpoint, and how many of their batches.
_VALIDATION, _VALIDATION_BATCHES = "validation", 20
# Steps between lines in metrics.jsonl.
_LOG_PERIOD = 100


@hosts.writes("{output_dir}", kinds=[KIND])
def ensemble(
    *,
    embeddings_dir: str,
    token_store: str,
    output_dir: str,
    tasks: Sequence[str],
    training: EnsembleTraining = EnsembleTraining(),
    negatives_dirs: Sequence[str] = (),
    config_text: str = "",
) -> Ensemble:
    """Trains a specialist's ensemble; if interrupted, rerun the command to resume.

    Members read the specialist's query embeddings and learn to give each query a vector whose dot
    product with its positive's embedding is high; both are frozen. `output_dir` then holds
    members.npz and metadata.json beside checkpoints, metrics.jsonl and config.gin.

    Args:
        embeddings_dir: the specialist's, from `taser encode`: passages, and the training and
            validation queries of `tasks`.
        token_store: the one they were encoded from; positives and negatives come from there.
        output_dir: the ensemble's directory.
        tasks: those that the specialist was trained on.
        training: how members are trained.
        negatives_dirs: hard negatives from `taser mine`, instead of those in the token store.
        config_text: written to config.gin.

    Returns:
        The ensemble.

    Raises:
        ConfigError: no task, one that the token store lacks, or too few queries for a batch.
        DataError: the tasks' queries are not encoded.
        FingerprintError: embeddings and token store do not belong together, or `output_dir` holds
            an ensemble of others.
    """
    if isinstance(tasks, str) or not tasks:
        fix = """list those that the specialist was trained on: --gin.TASKS="['squad']\""""
        raise ConfigError(f"the tasks are {tasks!r}", where="TASKS", fix=fix)
    store = TokenStore.open(token_store)
    read = functools.partial(SpecialistVectors.read, embeddings_dir, store, tasks=tasks)
    vectors = read(split="train", negatives_dirs=negatives_dirs)
    stream = vectors.stream(store, training.batching)
    about = {
        "data": stream.fingerprint,
        "specialist": fingerprint_json(vectors.passages.fingerprints),
        "training": fingerprint_json(to_plain(training)),
    }
    hosts.require_same(about)
    with storage_errors(output_dir):
        hosts.first_host_only(follow_plan)(output_dir, {"kind": "ensemble", **about})
        hosts.first_host_only(_write_config)(output_dir, config_text)
    job = _Job(
        training=training,
        vectors=vectors,
        stream=stream,
        validation=read(split=_VALIDATION),
        placement=MemberPlacement.over(jax.devices(), training.model.members),
    )
    logger.info(
        f"{training.model.members} members of {training.model.parameters(job.dim):,} parameters, "
        f"{job.steps} steps of {training.batching.batch_size} queries each, over "
        f"{job.placement.mesh.size} devices"
    )
    checkpoints = Checkpoints(output_dir, CheckpointConfig())
    _train(job, store, checkpoints, about, output_dir)
    step = checkpoints.best_step
    assert step is not None
    trained = _finished(job, checkpoints, step)
    facts = {"step": step, "steps": job.steps, "validation": checkpoints.metrics(step)}
    checkpoints.close()
    if hosts.is_first():
        trained.save(output_dir, facts={**facts, "seed": training.seed})
    hosts.wait_for_all("ensemble saved")
    logger.info("ensemble of step %d: %s", step, output_dir)
    return trained


@dataclasses.dataclass(frozen=True)
class _Job:
    """A training whose settings are consistent.

    Attributes:
        training: how members are trained.
        vectors: embeddings of the training queries.
        stream: rows of their batches.
        validation: embeddings of the validation queries.
        placement: members over devices.
    """

    training: EnsembleTraining
    vectors: SpecialistVectors
    stream: BatchStream
    validation: SpecialistVectors
    placement: MemberPlacement

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self.vectors.passages.shape[1]

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.training.epochs * self.stream.steps_per_epoch

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The chain of one member."""
        config = self.training.optimizer
        warmup = min(config.warmup_steps, self.steps // _WARMUP_SHARE)
        member = jax.eval_shape(lambda key: self.init(key, members=1), jax.random.key(0))
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), member)
        return build_optimizer(
            dataclasses.replace(config, warmup_steps=warmup), shapes, total_steps=self.steps
        )

    def init(self, key: jax.Array, *, members: int) -> Params:
        """Parameters of the first members."""
        return init_members(key, dim=self.dim, config=self.training.model, members=members)


def _train(
    job: _Job,
    store: TokenStore,
    checkpoints: Checkpoints,
    about: Mapping[str, str],
    output_dir: str,
) -> None:
    """Trains up to the last step; does nothing if that is done."""
    training, placement, optimizer = job.training, job.placement, job.optimizer
    init = functools.partial(job.init, members=placement.padded)
    batch = training.batching
    flops = training.model.training_flops(
        job.dim, queries=batch.batch_size, passages=batch.batch_size * (1 + batch.num_negatives)
    )
    loop.train(
        init_ensemble_state(init, optimizer, training.seed, placement),
        train_step=make_ensemble_step(optimizer, placement),
        batches=EnsembleBatches(job.vectors, job.stream, placement, seed=training.seed),
        checkpoints=checkpoints,
        config=loop.LoopConfig(
            train_steps=job.steps,
            evaluation_period=-(-job.steps // training.evaluations),
            log_period=_LOG_PERIOD,
        ),
        about=about,
        cost=StepCost(lambda _: flops * placement.padded, peak_flops=peak_flops()),
        validate=_validator(job, store),
        writers=make_writers(
            output_dir, resume_step=checkpoints.latest_step or 0, is_first_process=hosts.is_first()
        ),
    )


def _validator(job: _Job, store: TokenStore) -> Callable[[Params], dict[str, float]]:
    """Mean loss over members and batches of validation queries, the same for every member."""
    batching, members = job.training.batching, job.training.model.members
    fewest = min(len(queries) for queries in job.validation.tokenized.values())
    size = min(batching.batch_size, fewest)
    stream = job.validation.stream(store, dataclasses.replace(batching, batch_size=size, rates={}))
    evaluate = make_ensemble_eval(members)
    count = min(_VALIDATION_BATCHES, stream.steps_per_epoch)

    def validate(params: Params) -> dict[str, float]:
        batches = (job.validation.batch([stream], step) for step in range(count))
        losses = [
            np.asarray(evaluate(params, jax.tree.map(lambda leaf: leaf[0], batch)))
            for batch in batches
        ]
        return {"nll": float(np.mean(losses))}

    return validate


def _finished(job: _Job, checkpoints: Checkpoints, step: int) -> Ensemble:
    """The ensemble of a checkpoint, without the members added to fill the devices."""
    members = job.training.model.members
    shapes = jax.eval_shape(
        lambda key: job.init(key, members=job.placement.padded), jax.random.key(0)
    )
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=job.placement.replicated
        ),
        shapes,
    )
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf)[:members], checkpoints.restore_params(placed, step=step)
    )
    specialist = job.vectors.passages.fingerprints
    fingerprints = {**specialist, "ensemble": parameters_fingerprint(params)}
    return Ensemble(job.training.model, params, fingerprints, tuple(job.vectors.tokenized))


def _write_config(output_dir: str, config_text: str) -> None:
    write_text(epath.Path(output_dir) / "config.gin", config_text)
