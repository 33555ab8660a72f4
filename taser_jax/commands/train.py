"""`taser train`: trains a dual encoder on a token store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pkgutil
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from etils import epath
from jaxtyping import PyTree

from taser_jax.assembly import model_directory
from taser_jax.assembly.data import DeviceBatches, TrainingData, open_store
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.assembly.program import TrainingJob, step_cost, training_job, without_frozen
from taser_jax.assembly.run_record import check_settings, make_writers, settings_of
from taser_jax.assembly.text_sources import SHARED_EMBEDDINGS, EmbeddedSource, frozen_texts
from taser_jax.assembly.validator import Validator
from taser_jax.data.batches.stream import TextSource
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices import hosts
from taser_jax.devices.partitioning import bytes_per_device
from taser_jax.interop.pretrained import drawn_without, place_pretrained
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.parameters import config_to_json, parameter_count
from taser_jax.optim.optimizers import trainable
from taser_jax.storage.artifacts import MODEL, fingerprint, is_remote, storage_errors
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import flatten
from taser_jax.training import loop
from taser_jax.training.checkpoints import (
    Checkpoints,
    check_whole,
    restore_params_from,
    saved_params,
    saved_steps,
    set_aside_damaged,
)
from taser_jax.training.state import init_state, named_key

_TIED = "encoder"
_QUERY = "query_encoder"


@dataclasses.dataclass(frozen=True)
class TrainSummary:
    """The outcome of a training.

    Attributes:
        parameters: number of parameters.
        validation: metrics after the last step.
        steps_per_second: mean, compilation excluded; 0 where nothing was left to train.
        seconds: total time, from reading to the last save.
    """

    parameters: int
    validation: Mapping[str, float]
    steps_per_second: float
    seconds: float


@hosts.writes("{model_dir}", kinds=[MODEL], may_be_remote=True)
def train(
    *,
    model_dir: str,
    data: TrainingData,
    model: ModelConfig,
    training: TrainingConfig,
    initial_checkpoint: str | None = None,
    config_text: str = "",
    dry_run: bool = False,
) -> TrainSummary | None:
    """Trains a dual encoder; if interrupted, rerun the command to resume.

    Writes to `model_dir` checkpoint_N/, config.gin, model.json, model-info.txt (parameters with
    shapes, axes and shardings), run.json (all settings, negatives per query, fingerprints),
    metrics.jsonl, train/ (TensorBoard), the vocabulary and compilation_cache/.

    Args:
        model_dir: directory of all outputs, local or gs://.
        data: the token store, and which of its tasks, negatives and documents.
        model: the dual encoder; a vocab_size of 1 is replaced by the vocabulary's size.
        training: optimiser, batches, objective and periods.
        initial_checkpoint: a `checkpoint_N` directory of taser_jax whose parameters to copy; a tied
            model's tower is copied into each of several.
        config_text: content of config.gin.
        dry_run: resolve the configuration, trace and print the step, but do not train.

    Returns:
        A summary; None from a dry run.
    """
    begin = time.monotonic()
    if initial_checkpoint and training.pretrained is not None:
        raise ConfigError(
            f"a checkpoint to start from, {initial_checkpoint}, and pretrained weights, "
            f"{training.pretrained.source}",
            where="INITIAL_CHECKPOINT_PATH",
            fix="drop PRETRAINED: a checkpoint of ours has all parameters",
        )
    with storage_errors(model_dir or ""):
        if not dry_run:
            hosts.keep_compiled_programs(model_dir)
        store = open_store(data.token_store, dry_run=dry_run)
        if initial_checkpoint and store is not None:
            model_directory.check_vocabulary(
                epath.Path(initial_checkpoint).parent / model_directory.VOCABULARY, store
            )
        job = training_job(model, training, data, store=store)
        for name, value in job.facts.items():
            logger.info("%s: %s", name.replace("_", " "), value)
        if dry_run:
            if store is not None:
                _validator(job, store, store)
            steps = saved_steps(epath.Path(model_dir)) if model_dir else []
            if steps and store is not None:
                check_whole(model_directory.checkpoint_path(model_dir, max(steps)))
                with contextlib.closing(
                    Checkpoints(model_dir, training.checkpoints, cleans_up=False)
                ) as checkpoints:
                    _check_goes_on(job, epath.Path(model_dir), checkpoints, initial_checkpoint)
            # A run that resumes does not read it.
            if initial_checkpoint and not any(steps):
                restore_initial_params(initial_checkpoint, abstract_params=job.program.state.params)
            program = job.program
            jax.eval_shape(program.train_step, program.state, dict(program.plan.batches))
            print(program.parameter_table)
            gib = sum(map(bytes_per_device, jax.tree.leaves(program.state))) / 2**30
            told = "GiB per device of parameters and optimiser; `taser compile` has the rest"
            print(f"{gib:.2f} {told}")
            return None
        hosts.first_host_only(set_aside_damaged)(model_dir)
        checkpoints = Checkpoints(model_dir, training.checkpoints)
        # Orbax's threads end here, also those of a run that is refused.
        with contextlib.closing(checkpoints):
            result = _run(job, epath.Path(model_dir), checkpoints, config_text, initial_checkpoint)
        if is_remote(model_dir):
            # The launchers read it: a TPU whose results are elsewhere may be deleted.
            logger.info("the model is in %s", model_dir)
        return TrainSummary(
            parameters=parameter_count(job.program.state.params),
            validation=result.validation,
            steps_per_second=result.steps_per_second,
            seconds=time.monotonic() - begin,
        )


def _run(
    job: TrainingJob,
    model_dir: epath.Path,
    checkpoints: Checkpoints,
    config_text: str,
    initial_checkpoint: str | None,
) -> loop.TrainResult:
    training, program, stream = job.training, job.program, job.program.plan.stream
    store, queries = program.texts.store, program.texts.queries
    assert store is not None
    assert stream is not None
    settings, about = _check_goes_on(job, model_dir, checkpoints, initial_checkpoint)
    resume_step = checkpoints.latest_step or 0
    if hosts.is_first():
        model_directory.write_run_record(
            model_dir,
            model_config=program.model.config,
            facts={**job.facts, "settings": settings},
            parameter_table=program.parameter_table,
            config_text=config_text,
            vocabulary=store.vocabulary_directory,
        )
    with phase("initialise"):
        key, initialise = named_key(training.seed, "init"), program.initialise
        if job.pretrained is not None:
            initialise = drawn_without(job.pretrained, initialise)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.state.params)
        state = init_state(initialise, program.optimizer, key, param_shardings=shardings)
        params = state.params
        if initial_checkpoint and not resume_step:
            abstract = program.state.params
            params = restore_initial_params(initial_checkpoint, abstract_params=abstract)
        elif job.pretrained is not None and not resume_step:
            params = place_pretrained(job.pretrained, params=params)
        state = dataclasses.replace(state, params=params)
    if resume_step and (training.states_dir or job.inputs.shared_embeddings):
        params = checkpoints.restore_params(program.state.params, step=resume_step)
    texts = _texts(job, store, params)
    with jax.set_mesh(program.partitioner.mesh):
        return loop.train(
            state,
            train_step=program.train_step,
            batches=DeviceBatches(stream.on_texts(texts), queries, program.partitioner),
            checkpoints=checkpoints,
            config=training.loop,
            about=about,
            cost=step_cost(program),
            validate=_validator(job, store, texts),
            writers=make_writers(
                model_dir, resume_step=resume_step, is_first_process=hosts.is_first()
            ),
        )


def _check_goes_on(
    job: TrainingJob,
    model_dir: epath.Path,
    checkpoints: Checkpoints,
    initial_checkpoint: str | None,
) -> tuple[dict[str, object], dict[str, object]]:
    """Settings of a run, and what its checkpoints are about.

    Raises:
        FingerprintError: the newest checkpoint in the directory has others.
        ConfigError: it is of more steps than the run, or of a model that no training began, or
            hosts differ.
    """
    training, model, texts = job.training, job.program.model.config, job.program.texts
    store, stream = texts.store, job.program.plan.stream
    assert store is not None
    assert stream is not None
    config, own = config_to_json(model), json.dumps(flatten(training=training))
    hosts.require_same({"model": config, "training": own, "data": stream.fingerprint})
    about = {"data": stream.fingerprint, "model": fingerprint([config]), "seed": training.seed}
    settings = settings_of(model, training, store=store, queries=texts.queries)
    # It is not read again, so that it may have moved.
    settings["initial_checkpoint"] = bool(initial_checkpoint)
    settings |= flatten(batch_sizes=job.facts.get("batch_sizes"))
    if checkpoints.latest_step == 0 and not model_directory.read_settings(model_dir):
        problem = "a model that no training began: its weights would be replaced by others"
        fix = f"train into a new MODEL_DIR, with INITIAL_CHECKPOINT_PATH={model_dir}/checkpoint_0"
        raise ConfigError(problem, where=str(model_dir), fix=fix)
    if step := checkpoints.latest_step:
        training.loop.check_done(step)
        check_settings(model_dir, settings, step=step)
        checkpoints.check(step=step, about=about)
    return settings, about


def _texts(job: TrainingJob, store: TokenStore, params: Params) -> TextSource:
    """What the model reads: the store's tokens, or documents, states or embeddings for them.

    Raises:
        ConfigError: the passage tower is trained, and passages come as embeddings.
    """
    training, program, config = job.training, job.program, job.program.model.config
    texts: TextSource = store if job.augmentation is None else job.augmentation
    if training.states_dir:
        texts = frozen_texts(
            training.states_dir,
            dtype=training.states_dtype,
            model=program.model,
            params=params,
            store=store,
            queries=[*program.texts.queries.values(), *job.validation_queries.values()],
            augmentation=job.augmentation,
        )
    if directory := job.inputs.shared_embeddings:
        name = config.tower_name(Role.PASSAGE, None)
        if any(jax.tree.leaves(trainable(without_frozen(training, config), params)[name])):
            problem = f"{name} is trained, and passages come as embeddings"
            fix = f"freeze ('{name}/.*', 'freeze') in OptimizerConfig.updates, or drop it"
            raise ConfigError(problem, where="SHARED_EMBEDDINGS", fix=fix)
        tower = model_directory.passage_fingerprint(config, params)
        passages = pkgutil.resolve_name(SHARED_EMBEDDINGS)(directory, store, tower=tower)
        texts = EmbeddedSource(passages, texts.of_queries)
    return texts


def _validator(job: TrainingJob, store: TokenStore, texts: TextSource) -> Validator | None:
    training = job.training
    if training.validation is None:
        return None
    batching = training.batching if training.multitask is None else training.multitask.batching
    return Validator(
        job.program.model,
        store,
        job.validation_queries,
        training.validation,
        objective=training.objective,
        partitioner=job.program.partitioner,
        false_negatives=batching.false_negatives,
        texts=texts,
        buckets=training.length_buckets,
    )


def restore_initial_params(
    checkpoint: str | os.PathLike[str], *, abstract_params: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """Parameters of one `checkpoint_N` directory; a model with more towers gets copies.

    A tower that the checkpoint lacks is copied: a task's query tower from `query_encoder`, and
    any tower from `encoder` if there is no other source.

    Example:
        checkpoint: encoder -> model: query_encoder_nq, query_encoder_fever, passage_encoder,
        all three copies of it.

    Args:
        checkpoint: a directory that a training of ours wrote.
        abstract_params: tower -> shapes, dtypes and shardings of its parameters
            (jax.ShapeDtypeStruct).

    Returns:
        tower -> parameters; no two towers share a buffer.

    Raises:
        ConfigError: no checkpoint, a tower of it that is not used, or parameters that do not fit.
    """
    saved = saved_params(checkpoint)
    sources = {tower: _source(tower, saved) for tower in abstract_params}
    # Towers of one source have the same shapes and shardings: the first one's serve all.
    params_of_source = {
        source: abstract_params[tower] for tower, source in reversed(sources.items())
    }
    restored = restore_params_from(checkpoint, abstract_params=params_of_source)
    params, taken = {}, set()
    for tower, source in sources.items():
        # An array of its own for every parameter: the optimiser donates them.
        is_copy = source in taken
        params[tower] = jax.tree.map(jnp.copy, restored[source]) if is_copy else restored[source]
        taken.add(source)
    return params


def _source(tower: str, saved: Mapping[str, PyTree]) -> str:
    """The saved tower that a tower starts from; its own name where there is none."""
    if tower in saved:
        return tower
    if tower.startswith(f"{_QUERY}_") and _QUERY in saved:
        return _QUERY
    return _TIED if _TIED in saved else tower
