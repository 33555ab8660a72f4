"""`taser ensemble`: networks on a specialist's embeddings that measure its confidence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from etils import epath

from taser_jax.assembly.run_record import make_writers
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices import hosts
from taser_jax.devices.mesh import peak_flops
from taser_jax.devices.partitioning import placed
from taser_jax.models.parameters import parameters_fingerprint
from taser_jax.optim.optimizers import build_optimizer
from taser_jax.storage.artifacts import fingerprint_json, follow_plan, storage_errors, write_text
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import to_plain
from taser_jax.systems.muf import members
from taser_jax.systems.muf.ensemble_files import (
    KIND,
    Ensemble,
    EnsembleBatches,
    EnsembleTraining,
    SpecialistVectors,
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
        hosts.first_host_only(write_text)(epath.Path(output_dir) / "config.gin", config_text)
    model, batching, validation = training.model, training.batching, read(split=_VALIDATION)
    placement = members.MemberPlacement.over(jax.devices(), model.members)
    steps, dim = training.epochs * stream.steps_per_epoch, vectors.passages.shape[1]
    init = functools.partial(members.init_members, dim=dim, config=model)
    # Added members fill the devices, and are dropped.
    init_all = functools.partial(init, members=placement.padded)
    # Each member has a chain of its own.
    member = jax.eval_shape(functools.partial(init, members=1), jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), member)
    warmup = min(training.optimizer.warmup_steps, steps // _WARMUP_SHARE)
    config = dataclasses.replace(training.optimizer, warmup_steps=warmup)
    optimizer = build_optimizer(config, shapes, total_steps=steps)
    flops = model.training_flops(
        dim,
        queries=batching.batch_size,
        passages=batching.batch_size * (1 + batching.num_negatives),
    )
    logger.info(
        f"{model.members} members of {model.parameters(dim):,} parameters, {steps} steps of "
        f"{batching.batch_size} queries each, over {placement.mesh.size} devices"
    )
    checkpoints = Checkpoints(output_dir, CheckpointConfig())
    loop.train(
        members.init_ensemble_state(init_all, optimizer, training.seed, placement),
        train_step=members.make_ensemble_step(optimizer, placement),
        batches=EnsembleBatches(vectors, stream, placement, seed=training.seed),
        checkpoints=checkpoints,
        config=loop.LoopConfig(
            train_steps=steps,
            evaluation_period=-(-steps // training.evaluations),
            log_period=_LOG_PERIOD,
        ),
        about=about,
        cost=StepCost(lambda _: flops * placement.padded, peak_flops=peak_flops()),
        validate=_validator(training, validation, store),
        writers=make_writers(
            output_dir, resume_step=checkpoints.latest_step or 0, is_first_process=hosts.is_first()
        ),
    )
    step = checkpoints.best_step
    assert step is not None
    shapes = placed(jax.eval_shape(init_all, jax.random.key(0)), placement.replicated)
    restored = checkpoints.restore_params(shapes, step=step)
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[: model.members], restored)
    prints = {**vectors.passages.fingerprints, "ensemble": parameters_fingerprint(params)}
    trained = Ensemble(model, params, prints, tuple(vectors.tokenized))
    facts = {"step": step, "steps": steps, "validation": checkpoints.metrics(step)}
    checkpoints.close()
    if hosts.is_first():
        trained.save(output_dir, facts={**facts, "seed": training.seed})
    hosts.wait_for_all("ensemble saved")
    logger.info("ensemble of step %d: %s", step, output_dir)
    return trained


def _validator(
    training: EnsembleTraining, validation: SpecialistVectors, store: TokenStore
) -> Callable[[Params], dict[str, float]]:
    """Mean loss over members and batches of validation queries, the same for every member."""
    fewest = min(len(queries) for queries in validation.tokenized.values())
    size = min(training.batching.batch_size, fewest)
    batching = dataclasses.replace(training.batching, batch_size=size, rates={})
    stream = validation.stream(store, batching)
    evaluate = members.make_ensemble_eval(training.model.members)
    count = min(_VALIDATION_BATCHES, stream.steps_per_epoch)

    def validate(params: Params) -> dict[str, float]:
        batches = (validation.batch([stream], step) for step in range(count))
        losses = [
            np.asarray(evaluate(params, jax.tree.map(lambda leaf: leaf[0], batch)))
            for batch in batches
        ]
        return {"nll": float(np.mean(losses))}

    return validate
