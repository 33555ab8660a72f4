"""What a training is made of, read and checked before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.data import check_query_towers, training_queries
from taser_jax.assembly.pretrained import read_pretrained
from taser_jax.assembly.program import Program, make_program
from taser_jax.assembly.text_facts import data_facts
from taser_jax.assembly.text_sources import QUERY_DOCUMENTS, QueryDocuments
from taser_jax.assembly.validator import check_validated_tasks
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.dual_encoder import ModelConfig, Params
from taser_jax.models.parameters import parameter_count
from taser_jax.storage.errors import ConfigError
from taser_jax.training.parameters import parameter_table


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """A training with checked settings; nothing is allocated yet.

    Attributes:
        training: its configuration.
        program: the step.
        store: tokens; None in a dry run without data.
        queries: task -> queries to train on.
        validation_queries: task -> queries to validate with.
        pretrained: weights to start from.
        augmentation: documents of the queries; None where they are encoded alone.
        facts: content of run.json.
    """

    training: TrainingConfig
    program: Program
    store: TokenStore | None
    queries: Mapping[str, TokenizedQueries]
    validation_queries: Mapping[str, TokenizedQueries]
    pretrained: Params | None
    augmentation: QueryDocuments | None
    facts: Mapping[str, object]

    @property
    def parameter_table(self) -> str:
        """Every parameter with its shape, axes and sharding."""
        program = self.program
        return parameter_table(
            program.params, logical_axes=program.logical_axes, shardings=program.param_shardings
        )


def training_job(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    store: TokenStore | None,
    tasks: Sequence[str] | None,
    negatives_dirs: Sequence[str],
    feature_lengths: Mapping[str, int],
    augmentation_dir: str | None = None,
    documents: int = 0,
) -> TrainingJob:
    """Reads and checks all inputs before anything is computed.

    Args:
        model: the dual encoder; a vocab_size of 1 is replaced by the vocabulary's size.
        training: optimiser, batches, objective and periods.
        store: tokens; None in a dry run without data.
        tasks: tasks to train on; None means all of the token store with a train split.
        negatives_dirs: hard negatives instead of those in the token store, joined per query.
        feature_lengths: {"query": ..., "passage": ...}; checked against the token store.
        augmentation_dir: documents of the queries, from `taser augment`; None trains without.
        documents: documents fused with each query, K.

    Returns:
        The job, of which nothing is allocated on a device.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: tasks or queries that are missing, negatives of other passages.
    """
    augmentation = None
    if augmentation_dir and store is not None:
        augmentation = QUERY_DOCUMENTS.get()(
            augmentation_dir, per_query=documents, config=model, store=store
        )
    if augmentation is not None and training.multitask is not None:
        title = "queries have documents, and every batch has queries of every task"
        raise ConfigError(title, where="AUGMENTATION_DIR", fix="drop TrainingConfig.multitask")

    def read(split: str) -> dict[str, TokenizedQueries]:
        if store is None:
            return {}
        found = training_queries(
            store, task_names=tasks, negatives_dirs=negatives_dirs, split=split
        )
        if augmentation is None:
            return found
        return {task: augmentation.renamed(queries) for task, queries in found.items()}

    queries = read("train")
    program = make_program(
        model,
        training,
        partitioner=Partitioner(make_mesh(training.mesh), training.rules),
        store=store,
        queries=queries,
        feature_lengths=feature_lengths,
    )
    validation_queries = read(training.validation.split) if training.validation else {}
    if training.validation and store is not None:
        check_validated_tasks(validation_queries.keys(), training.validation)
    where = "validation queries of the token store"
    check_query_towers(program.model.config, validation_queries, where=where)
    pretrained = None
    if training.pretrained is not None:
        pretrained = read_pretrained(
            training.pretrained,
            config=program.model.config,
            params=program.params,
            vocabulary=None if store is None else store.vocabulary_directory,
        )
    facts = {
        "parameters": f"{parameter_count(program.params):,}",
        "pretrained": None if training.pretrained is None else training.pretrained.source,
        "query_length": program.query_length,
        "passage_length": program.passage_length,
        "train_steps": training.loop.train_steps,
        "train_from_block": training.train_from_block,
        "selection": training.checkpoints.selection.value,
        "jax": f"{jax.__version__} on {jax.devices()[0].device_kind}",
        **program.plan.facts,
    }
    if store is not None and program.plan.stream is not None:
        facts |= data_facts(program.plan.stream, store, train_steps=training.loop.train_steps)
    return TrainingJob(
        training, program, store, queries, validation_queries, pretrained, augmentation, facts
    )
