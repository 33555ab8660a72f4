"""What `taser train` runs and `taser compile` compiles: the checked job, and its program."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence

import jax
import optax

from taser_jax.assembly import data
from taser_jax.assembly.plans import BatchPlan, TrainingConfig, TrainingTexts, make_plan
from taser_jax.assembly.run_record import data_facts
from taser_jax.assembly.text_sources import (
    QUERY_DOCUMENTS,
    QueryDocuments,
    check_states_can_be_kept,
)
from taser_jax.assembly.validator import SPLIT, check_validated_tasks
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import make_mesh, peak_flops
from taser_jax.devices.partitioning import Partitioner, copied_axes, placed
from taser_jax.interop.hub import recorded_name
from taser_jax.interop.pretrained import read_pretrained
from taser_jax.models.batch import Batch, States
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig, Params
from taser_jax.models.parameters import abstract_params, init_params, logical_axes, parameter_count
from taser_jax.optim import optimizers
from taser_jax.optim.median import MedianOver, check_median
from taser_jax.optim.multitask import Combiner, build_multitask_optimizer, reads_task_gradients
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.training.multitask_step import TaskGradients, make_multitask_step
from taser_jax.training.state import TrainState, init_state, parameter_table, state_shardings
from taser_jax.training.step import TrainStep, make_train_step
from taser_jax.training.watch import StepCost


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step with everything it is made of; nothing is allocated yet.

    Attributes:
        model: the dual encoder; its vocabulary is the token store's.
        texts: what its batches are drawn from.
        partitioner: the devices.
        plan: the batches of a step.
        parameter_table: every parameter with its shape, axes and sharding.
        copied_axes: which axes are replicated because the mesh cannot divide them, in words.
        optimizer: the optax chain.
        initialise: key -> parameters.
        state: shapes of the whole state, with their shardings, as restoring and compiling take
            them.
        train_step: jitted, (state, {task: batch}) -> (state, metrics).
    """

    model: DualEncoder
    texts: TrainingTexts
    partitioner: Partitioner
    plan: BatchPlan
    parameter_table: str
    copied_axes: Sequence[str]
    optimizer: optax.GradientTransformationExtraArgs
    initialise: Callable[[jax.Array], Params]
    state: TrainState
    train_step: TrainStep


def make_program(
    model_config: ModelConfig,
    training: TrainingConfig,
    texts: TrainingTexts,
    *,
    partitioner: Partitioner,
    documents: int = 0,
) -> Program:
    """Shapes, shardings and the step of a configuration.

    Args:
        model_config: the dual encoder.
        training: how it is trained.
        texts: what its batches are drawn from.
        partitioner: devices, of this machine or of a topology.
        documents: documents fused with each query, K; 0 for queries alone.

    Raises:
        ConfigError: settings that contradict each other or do not fit the devices or the tokens.
    """
    model = DualEncoder(data.fit_vocabulary(model_config, texts.store), training.train_from_block)
    training = dataclasses.replace(training, optimizer=without_frozen(training, model.config))
    data.check_query_towers(model.config, texts.queries, where="train queries of the token store")
    plan = make_plan(
        training,
        texts,
        partitioner=partitioner,
        query_tasks=model.query_tasks,
        memory=model.config.documents_shape(documents, texts.passage_length) if documents else None,
    )
    params, axes = abstract_params(model), logical_axes(model)
    shardings = partitioner.param_shardings(axes, params)
    copied = copied_axes(partitioner.mesh, axes, params)
    for message in copied:
        logger.warning("%s", message)
    optimizer, gradients = _optimizer(training, params, plan)
    length = max(texts.query_length, texts.passage_length)
    initialise = functools.partial(init_params, model, length=length)
    state = jax.eval_shape(lambda key: init_state(initialise, optimizer, key), jax.random.key(0))
    state = placed(state, state_shardings(state, shardings))
    own = jax.tree.map(lambda leaf: leaf.sharding, state)
    make_step: Callable[..., TrainStep] = make_train_step
    if plan.tasks is not None:
        make_step = functools.partial(make_multitask_step, tasks=plan.tasks, gradients=gradients)
    train_step = make_step(
        model,
        optimizer,
        objective=training.objective.for_model(
            dim=model.config.embedding_dim, normalization=model.config.normalization
        ),
        num_chunks=training.num_chunks,
        seed=training.seed,
        schedule=optimizers.build_schedule(training.optimizer, training.loop.train_steps),
        trainable=optimizers.trainable(training.optimizer, params),
        state_shardings=own,
    )
    return Program(
        model=model,
        texts=texts,
        partitioner=partitioner,
        plan=plan,
        parameter_table=parameter_table(params, logical_axes=axes, shardings=shardings),
        copied_axes=copied,
        optimizer=optimizer,
        initialise=initialise,
        state=state,
        train_step=train_step,
    )


def without_frozen(training: TrainingConfig, config: ModelConfig) -> optimizers.OptimizerConfig:
    """The optimiser of the parameters above the frozen blocks.

    Raises:
        ConfigError: no such block, or parameters that are frozen otherwise too.
    """
    blocks, optimizer = training.train_from_block, training.optimizer
    num_layers = config.transformer.num_layers
    # A query tower that fuses documents has a decoder above its blocks.
    if not 0 <= blocks < num_layers + config.fuses:
        problem = f"{blocks} frozen blocks of {num_layers} leave none to train"
        fix = "lower train_from_block; 0 trains all"
        raise ConfigError(problem, where="TrainingConfig.train_from_block", fix=fix)
    if not blocks:
        return optimizer
    if optimizer.updates is not None:
        problem = f"TrainingConfig freezes {blocks} blocks and OptimizerConfig.updates others"
        fix = "drop train_from_block, and freeze the blocks in OptimizerConfig.updates"
        raise ConfigError(problem, where="TrainingConfig.train_from_block", fix=fix)
    frozen = config.frozen_parameters(blocks)
    updates = ((frozen, optimizers.Update.FREEZE), (f"(?!{frozen}$).*", optimizers.Update.TRAIN))
    return dataclasses.replace(optimizer, updates=updates)


def _optimizer(
    training: TrainingConfig, params: Params, plan: BatchPlan
) -> tuple[optax.GradientTransformationExtraArgs, TaskGradients]:
    """The optax chain, and how it takes the gradients of several tasks."""
    steps = training.loop.train_steps
    if training.multitask is None or plan.tasks is None:
        chain = optimizers.build_optimizer(training.optimizer, params, total_steps=steps)
        return chain, TaskGradients.SUMMED
    combiner = training.multitask.combiner
    if combiner.combiner is Combiner.TSAGE and combiner.tsage.median_over is MedianOver.ALL:
        tokens = {task: batch.tokens for task, batch in plan.batches.items()}
        trainable = optimizers.trainable(training.optimizer, params)
        check_median(params, tokens=tokens, trainable=trainable)
    chain = build_multitask_optimizer(
        combiner, training.optimizer, params, tasks=plan.tasks, total_steps=steps
    )
    # A task axis costs one gradient's memory per task, so the naive sum does without.
    return chain, TaskGradients.STACKED if reads_task_gradients(combiner) else TaskGradients.SUMMED


def step_cost(program: Program) -> StepCost:
    """FLOPs and tokens of a step, as functions of its batches."""
    model = program.model

    def flops(batches: Mapping[str, Batch]) -> float:
        return sum(
            model.config.training_flops(
                batch,
                frozen_blocks=model.frozen_blocks,
                has_states=any(isinstance(texts, States) for texts in batch.texts),
            )
            for batch in batches.values()
        )

    def positions(batches: Mapping[str, Batch]) -> int:
        return sum(batch.tokens for batch in batches.values())

    return StepCost(flops, positions, peak_flops())


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A training with checked settings; nothing is allocated yet.

    Attributes:
        training: its configuration.
        inputs: what it reads.
        program: the step.
        validation_queries: task -> queries to validate with.
        pretrained: weights to start from.
        augmentation: documents of the queries; None where they are encoded alone.
        facts: content of run.json.
    """

    training: TrainingConfig
    inputs: data.TrainingData
    program: Program
    validation_queries: Mapping[str, TokenizedQueries]
    pretrained: Params | None
    augmentation: QueryDocuments | None
    facts: Mapping[str, object]


def training_job(
    model: ModelConfig,
    training: TrainingConfig,
    inputs: data.TrainingData,
    *,
    store: TokenStore | None,
) -> TrainingJob:
    """Reads and checks all inputs before anything is computed.

    Args:
        model: the dual encoder; a vocab_size of 1 is replaced by the vocabulary's size.
        training: optimiser, batches, objective and periods.
        inputs: tasks, negatives, lengths and documents of the queries.
        store: their token store, opened; None in a dry run without data.

    Returns:
        The job, of which nothing is allocated on a device.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: tasks or queries that are missing, negatives of other passages.
    """
    augmentation: QueryDocuments | None = None
    if inputs.augmentation_dir and store is not None:
        augmentation = pkgutil.resolve_name(QUERY_DOCUMENTS)(
            inputs.augmentation_dir, per_query=inputs.documents, config=model, store=store
        )
    if augmentation is not None and training.multitask is not None:
        problem = "queries have documents, and every batch has queries of every task"
        raise ConfigError(problem, where="AUGMENTATION_DIR", fix="drop TrainingConfig.multitask")

    def read(split: str) -> dict[str, TokenizedQueries]:
        if store is None:
            return {}
        of_tasks = data.training_queries(
            store, task_names=inputs.tasks, negatives_dirs=inputs.negatives_dirs, split=split
        )
        if augmentation is None:
            return of_tasks
        return {task: augmentation.renamed(queries) for task, queries in of_tasks.items()}

    queries = read("train")
    program = make_program(
        model,
        training,
        TrainingTexts(*data.lengths(store, inputs.feature_lengths or {}), store, queries),
        partitioner=Partitioner(make_mesh(training.mesh)),
    )
    if training.states_dir:
        check_states_can_be_kept(training.train_from_block)
    validation_queries = read(SPLIT) if training.validation else {}
    if training.validation and not training.validation.tasks:
        # Checkpoints are not chosen by tasks that are held out, unless there are no others.
        trained = {task: of_task for task, of_task in validation_queries.items() if task in queries}
        validation_queries = trained or validation_queries
    selection, loop = training.checkpoints.selection.value, training.loop
    for name, has_period in (("patience", loop.evaluation_period > 0), ("validates_first", True)):
        if (value := getattr(loop, name)) and not (training.validation and has_period):
            problem = f"{name} is {value}, and nothing is validated before the end"
            fix = f"set EVAL_PERIOD and TrainingConfig.validation, or leave {name} out"
            raise ConfigError(problem, where=f"LoopConfig.{name}", fix=fix)
    several = loop.validates_first or 0 < loop.evaluation_period < loop.train_steps
    if several and training.validation and selection not in training.validation.metrics:
        measured = ", ".join(training.validation.metrics) or "nothing"
        problem = f"checkpoints are selected by {selection}, and validation measures {measured}"
        fix = "select by what is measured, or set ValidationConfig.num_batches or its pool"
        raise ConfigError(problem, where="CheckpointConfig.selection", fix=fix)
    if training.validation and store is not None:
        check_validated_tasks(validation_queries.keys(), training.validation)
    where = "validation queries of the token store"
    data.check_query_towers(program.model.config, validation_queries, where=where)
    pretrained = None
    if training.pretrained is not None:
        pretrained = read_pretrained(
            training.pretrained,
            config=program.model.config,
            params=program.state.params,
            vocabulary=None if store is None else store.vocabulary_directory,
        )
    facts = {
        "parameters": f"{parameter_count(program.state.params):,}",
        "pretrained": training.pretrained and recorded_name(training.pretrained.source),
        "query_length": program.texts.query_length,
        "passage_length": program.texts.passage_length,
        "train_steps": training.loop.train_steps,
        "train_from_block": training.train_from_block,
        "selection": selection,
        "jax": f"{jax.__version__} on {jax.devices()[0].device_kind}",
        **program.plan.facts,
    }
    if store is not None and program.plan.stream is not None:
        facts |= data_facts(program.plan.stream, store, train_steps=training.loop.train_steps)
    return TrainingJob(
        training, inputs, program, validation_queries, pretrained, augmentation, facts
    )
