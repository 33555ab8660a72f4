"""`taser train`: from a token store and a configuration to checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from taser_jax import hosts
from taser_jax.artifacts import fingerprint, storage_errors
from taser_jax.assembly.batch_shapes import chunk_shapes
from taser_jax.assembly.config import CONFIGURABLES as CONFIGURABLES
from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.data import (
    check_query_towers,
    fit_vocabulary,
    lengths,
    open_store,
    training_queries,
)
from taser_jax.assembly.metric_writers import make_writers
from taser_jax.assembly.model_directory import data_facts, write_run_record
from taser_jax.assembly.plans import make_plan
from taser_jax.assembly.pretrained import place_pretrained, read_pretrained
from taser_jax.assembly.program import make_step_program
from taser_jax.assembly.validator import Validator
from taser_jax.batch import BatchShape
from taser_jax.compilation.chips import peak_flops
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.models import config_io
from taser_jax.models.dual_encoder import (
    DualEncoder,
    ModelConfig,
    parameter_count,
)
from taser_jax.partitioning import Partitioner, make_mesh
from taser_jax.progress import logger, phase
from taser_jax.settings import flatten
from taser_jax.training import loop
from taser_jax.training.checkpoints import Checkpoints, restore_state_from
from taser_jax.training.initial_checkpoint import restore_initial_params
from taser_jax.training.keys import named_key
from taser_jax.training.parameters import memory_estimate, parameter_table
from taser_jax.training.state import init_state


@dataclasses.dataclass(frozen=True)
class TrainSummary:
    """What a training came to.

    Attributes:
        parameters: number of parameters.
        validation: metrics after the last step.
        steps_per_second: mean, compilation excluded; 0 where nothing was left to train.
    """

    parameters: int
    validation: Mapping[str, float]
    steps_per_second: float


def train(
    *,
    model_dir: str,
    token_store: str,
    model: ModelConfig,
    training: TrainingConfig,
    tasks: Sequence[str] | None = None,
    negatives_dirs: Sequence[str] = (),
    initial_checkpoint: str | None = None,
    continued_checkpoint: str | None = None,
    feature_lengths: Mapping[str, int] | None = None,
    config_text: str = "",
    dry_run: bool = False,
) -> TrainSummary | None:
    """Trains a dual encoder; rerun after any interruption, it goes on.

    `model_dir` then holds checkpoint_N/, config.gin, model.json, model-info.txt (parameters with
    shapes, axes and shardings), run.json (negatives per query, fingerprints), metrics.jsonl,
    train/ (TensorBoard) and the vocabulary.

    Args:
        model_dir: where all of that goes; a directory or a gs:// address.
        token_store: tokens of passages and queries, from `taser tokenize`.
        model: the dual encoder; a vocab_size of 1 is replaced by the vocabulary's size.
        training: how.
        tasks: tasks to train on; None means all of the token store with a train split.
        negatives_dirs: hard negatives from `taser mine`, instead of those in the token store;
            of several, a query's negatives are joined.
        initial_checkpoint: a `checkpoint_N` directory of ours to take parameters from; a tied
            model's tower is copied into each of several.
        continued_checkpoint: a `checkpoint_N` directory to go on from with optimiser, schedule and
            step, on other data: `loop.train_steps` counts its steps too.
        feature_lengths: {"query": ..., "passage": ...}; checked against the token store.
        config_text: what is written to config.gin.
        dry_run: resolve, trace the step and print all of it, but train nothing.

    Returns:
        A summary; None from a dry run.
    """
    with storage_errors(model_dir or ""):
        return _train(
            model_dir=epath.Path(model_dir) if model_dir else None,
            store=open_store(token_store, dry_run=dry_run),
            model_config=model,
            training=training,
            task_names=tasks,
            negatives_dirs=negatives_dirs,
            initial_checkpoint=initial_checkpoint,
            continued_checkpoint=continued_checkpoint,
            feature_lengths=dict(feature_lengths or {}),
            config_text=config_text,
            dry_run=dry_run,
        )


def _train(
    *,
    model_dir: epath.Path | None,
    store: TokenStore | None,
    model_config: ModelConfig,
    training: TrainingConfig,
    task_names: Sequence[str] | None,
    negatives_dirs: Sequence[str],
    initial_checkpoint: str | None,
    continued_checkpoint: str | None,
    feature_lengths: dict[str, int],
    config_text: str,
    dry_run: bool,
) -> TrainSummary | None:
    # 1. Everything that can be wrong is looked at before anything is computed.
    partitioner = Partitioner(make_mesh(training.mesh), training.rules)
    query_length, passage_length = lengths(store, feature_lengths)
    model_config = fit_vocabulary(model_config, store)
    model = DualEncoder(model_config)
    if initial_checkpoint and training.pretrained is not None:
        raise ConfigError(
            f"a checkpoint to start from, {initial_checkpoint}, and pretrained weights, "
            f"{training.pretrained.source}",
            where="INITIAL_CHECKPOINT_PATH",
            expected="one of the two",
            fix="drop PRETRAINED: a checkpoint of ours has all parameters",
        )
    queries, validation_tasks = {}, None
    if store is not None:
        queries = training_queries(store, task_names=task_names, negatives_dirs=negatives_dirs)
        if training.validation is not None:
            validation_tasks = training_queries(
                store,
                task_names=task_names,
                negatives_dirs=negatives_dirs,
                split=training.validation.split,
            )
        for split, read in (("train", queries), ("validation", validation_tasks or {})):
            check_query_towers(model_config, read, where=f"{split} queries of the token store")
    elif not dry_run:
        raise ConfigError("no token store", where="TOKEN_STORE", fix="run `taser tokenize` first")
    plan = make_plan(
        training.batching,
        training.multitask,
        num_chunks=training.num_chunks,
        query_length=query_length,
        passage_length=passage_length,
        partitioner=partitioner,
        store=store,
        queries=queries,
        query_tasks=model_config.query_tasks,
    )

    # 2. Shapes, shardings, the step: nothing is allocated yet.
    program = make_step_program(
        model,
        plan,
        partitioner=partitioner,
        optimizer=training.optimizer,
        objective=training.objective,
        total_steps=training.total_steps,
        seed=training.seed,
        query_length=query_length,
        passage_length=passage_length,
    )
    shapes, shardings = program.params, program.param_shardings
    table = parameter_table(shapes, logical_axes=program.logical_axes, shardings=shardings)
    facts = {
        "parameters": f"{parameter_count(shapes):,}",
        "pretrained": None if training.pretrained is None else training.pretrained.source,
        "query_length": query_length,
        "passage_length": passage_length,
        "train_steps": training.loop.train_steps,
        "selection": training.checkpoints.selection.value,
        "jax": f"{jax.__version__} on {jax.devices()[0].device_kind}",
        **plan.facts,
    }
    if store is not None:
        facts |= data_facts(plan, store, train_steps=training.loop.train_steps)
    for name, value in facts.items():
        logger.info("%s: %s", name.replace("_", " "), value)
    # Read before anything is allocated: weights that do not fit cost nothing but this message.
    pretrained = None
    if training.pretrained is not None:
        pretrained = read_pretrained(
            training.pretrained,
            config=model_config,
            params=shapes,
            vocabulary=None if store is None else store.vocabulary_directory,
        )
    if dry_run:
        jax.eval_shape(program.train_step, program.state, plan.abstract_batch())
        print(table)
        # Tasks are computed one after another: the largest decides.
        activations = max(
            model_config.activation_bytes(shape, batch_devices=partitioner.batch_devices)
            for shape in chunk_shapes(plan.shapes, training.num_chunks)
        )
        print(memory_estimate(shapes, shardings=shardings, activation_bytes=activations))
        return None
    assert store is not None
    assert model_dir is not None

    # On several hosts: all read the same, or none goes on.
    hosts.require_same(
        {
            "model": config_io.to_json(model_config),
            "training": json.dumps(flatten(training=training)),
            "data": plan.fingerprint,
        }
    )

    # 3. What a run leaves behind besides checkpoints, unless those here are another model's.
    checkpoints = Checkpoints(model_dir, training.checkpoints)
    resume_step = checkpoints.latest_step or 0
    about = {
        "data": plan.fingerprint,
        "model": fingerprint([config_io.to_json(model_config)]),
        "seed": training.seed,
    }
    if resume_step:
        checkpoints.check(step=resume_step, about=about)
    is_first = hosts.is_first()
    if is_first:
        write_run_record(
            model_dir,
            model_config=model_config,
            facts=facts,
            parameter_table=table,
            config_text=config_text,
            vocabulary=store.vocabulary_directory,
        )

    # 4. Train.
    with phase("initialise"):
        key = named_key(training.seed, "init")
        state = init_state(program.initialise, program.optimizer, key, param_shardings=shardings)
        if pretrained is not None and not resume_step:
            params = place_pretrained(pretrained, params=state.params)
            state = dataclasses.replace(state, params=params)
        if initial_checkpoint and not resume_step:
            params = restore_initial_params(
                initial_checkpoint, abstract_params=program.placed_state.params
            )
            state = dataclasses.replace(state, params=params)
        if continued_checkpoint and not resume_step:
            state = restore_state_from(continued_checkpoint, abstract_state=program.placed_state)
    validator = None
    if training.validation is not None:
        validator = Validator(
            model,
            store,
            validation_tasks or {},
            training.validation,
            objective=training.objective,
            partitioner=partitioner,
            query_tasks=model_config.query_tasks,
        )
    with jax.set_mesh(partitioner.mesh):
        result = loop.train(
            state,
            train_step=program.train_step,
            batches=plan.device_batches(),
            checkpoints=checkpoints,
            config=training.loop,
            about=about,
            cost=_step_cost(model_config, plan.shapes),
            validate=validator,
            writers=make_writers(model_dir, resume_step=resume_step, is_first_process=is_first),
        )
    checkpoints.close()
    return TrainSummary(
        parameters=parameter_count(shapes),
        validation=result.validation,
        steps_per_second=result.steps_per_second,
    )


def _step_cost(model_config: ModelConfig, shapes: Sequence[BatchShape]) -> loop.StepCost:
    return loop.StepCost(
        tokens=sum(
            shape.queries * shape.query_length + shape.passages * shape.passage_length
            for shape in shapes
        ),
        flops=float(sum(model_config.training_flops(shape) for shape in shapes)),
        peak_flops=peak_flops(),
    )
