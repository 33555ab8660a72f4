"""How a model is trained: the configuration that recipes build, and the batches of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from taser_jax.assembly.data import with_mixture_rates
from taser_jax.assembly.validator import ValidationConfig
from taser_jax.data.batches import every_task
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import (
    BatchingConfig,
    Layout,
    LengthQuantiles,
    Padding,
    drawn_lengths,
    lengths_at,
)
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import MeshConfig
from taser_jax.devices.partitioning import Partitioner
from taser_jax.interop.pretrained import Pretrained
from taser_jax.models.batch import (
    Batch,
    DocumentsShape,
    TextsShape,
    abstract_batch,
    in_groups,
    sizes_of,
)
from taser_jax.optim.multitask import Combiner, MultitaskConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import EmbeddingDtype
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import Checked, Positive, Seed
from taser_jax.training.batch_loss import check_chunks
from taser_jax.training.checkpoints import CheckpointConfig
from taser_jax.training.loop import LoopConfig
from taser_jax.training.objective import ObjectiveConfig


@dataclasses.dataclass(frozen=True)
class MultitaskTraining:
    """Training on a batch of every task in each step.

    Attributes:
        batching: how many queries of each task, and how they are drawn.
        combiner: how the tasks' gradients become one.
    """

    batching: every_task.TaskBatchingConfig = every_task.TaskBatchingConfig()
    combiner: MultitaskConfig = MultitaskConfig()


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Checked):
    """How a model of any kind is trained.

    Attributes:
        loop: steps and periods.
        batching: how batches are drawn.
        optimizer: AdamW, schedule, decay, freezing.
        objective: what is minimised: labels, Matryoshka dimensions, routing.
        checkpoints: what is kept, and which checkpoint counts as best.
        validation: how checkpoints are judged; None validates nothing.
        mesh: devices along each mesh axis.
        num_chunks: GradCache chunks; 1 encodes the batch at once.
        length_buckets: lengths that texts are padded to, in groups; none pads to the token store's.
        train_from_block: number of first blocks that are frozen, with the embeddings below them.
        states_dir: where the frozen blocks' states of the token store are kept; None computes them
            in each step.
        states_dtype: dtype of these states; bfloat16 halves them and keeps 8 bits of each number.
        pretrained: weights that encoders start from; None draws them.
        multitask: a batch of every task in each step, and how their gradients become one, in place
            of `batching`; None gives each batch to one task.
        seed: seed of weights, dropout and routing; batches have `batching.seed`.
    """

    loop: LoopConfig
    batching: BatchingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig | None = None
    mesh: MeshConfig = MeshConfig()
    num_chunks: Positive = 1
    length_buckets: tuple[int, ...] = ()
    train_from_block: int = 0
    states_dir: str | None = None
    states_dtype: EmbeddingDtype = EmbeddingDtype.BFLOAT16
    pretrained: Pretrained | None = None
    multitask: MultitaskTraining | None = None
    seed: Seed = 0


# "query" and "passage" -> how long texts of that side are.
TextLengths = Mapping[str, LengthQuantiles]


@dataclasses.dataclass(frozen=True)
class TrainingTexts:
    """What batches are drawn from: a token store or, without one, how many texts and how long.

    Attributes:
        query_length: tokens per query; with a batch of every task and a store, each task's
            longest query decides.
        passage_length: tokens per passage.
        store: tokens; None in a dry run without data.
        queries: task -> queries to train on, in the order of the task axis.
        task_sizes: task -> training queries, for a batch of every task without a store.
        lengths: how long texts are, without a store; None pads all to one length.
    """

    query_length: int
    passage_length: int
    store: TokenStore | None
    queries: Mapping[str, TokenizedQueries]
    task_sizes: Mapping[str, int] | None = None
    lengths: TextLengths | None = None


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The batches of a training's steps.

    Attributes:
        batches: task -> shapes and dtypes of its batch in a step, in groups where lengths are
            known. Where each step has a batch of one task, chosen by a schedule, one entry
            represents all tasks: the one with most tokens.
        tasks: the tasks of every step, in the order of the task axis; None if each step has one
            task.
        stream: the batches; None without a token store.
        facts: a description of the batches for run.json.
    """

    batches: Mapping[str, Batch]
    tasks: tuple[str, ...] | None
    stream: every_task.Stream | None
    facts: Mapping[str, object]

    def with_real_lengths(self, text_lengths: TextLengths) -> dict[str, Batch]:
        """The same batches of typical texts, each in as many columns as it has tokens."""
        return {
            task: in_groups(
                batch,
                _typical(text_lengths["query"], sizes_of(batch.queries)),
                _typical(text_lengths["passage"], sizes_of(batch.passages)),
            )
            for task, batch in self.batches.items()
        }


def lengths_in(store: TokenStore, queries: Mapping[str, TokenizedQueries]) -> TextLengths:
    """How long the texts of a token store are.

    Args:
        store: its passages are taken, all alike.
        queries: task -> queries to train on.
    """
    sides = {
        "query": np.concatenate([of_task.lengths for of_task in queries.values()]),
        "passage": store.passages.lengths,
    }
    places = np.linspace(0, 1, 101).tolist()
    return {
        side: dict(zip(places, np.quantile(lengths, places).astype(int).tolist(), strict=True))
        for side, lengths in sides.items()
    }


def _typical(quantiles: LengthQuantiles, groups: Sequence[TextsShape]) -> tuple[TextsShape, ...]:
    texts, longest = sum(count for count, _ in groups), max(length for _, length in groups)
    lengths = lengths_at(quantiles, (np.arange(texts) + 0.5) / texts)
    tokens, counts = np.unique(np.minimum(lengths, longest), return_counts=True)
    return tuple(zip(counts.tolist(), tokens.tolist(), strict=True))


def make_plan(
    training: TrainingConfig,
    texts: TrainingTexts,
    *,
    partitioner: Partitioner,
    query_tasks: Sequence[str] = (),
    memory: DocumentsShape | None = None,
) -> BatchPlan:
    """The plan of a configuration.

    Args:
        training: how batches are drawn, and encoded in how many chunks.
        texts: what batches are drawn from.
        partitioner: the devices.
        query_tasks: the model's tasks with a query tower of their own.
        memory: sizes of the documents fused with each query, for batches of one task; None fuses
            none.

    Raises:
        ConfigError: batches that the devices or chunks cannot share, or a batch of every task
            without a token store or task sizes.
    """
    multitask, devices = training.multitask, partitioner.batch_devices
    batching = training.batching if multitask is None else multitask.batching
    candidates = 1 + batching.num_negatives
    padding = Padding(training.length_buckets, multiple=devices * training.num_chunks)
    stream: every_task.Stream | None = None
    facts: dict[str, object]
    if multitask is not None:
        given, default = vars(training.batching), vars(BatchingConfig(1))
        names = ("num_negatives", "false_negatives", "positives", "rates")
        if unused := [name for name in names if given[name] != default[name]]:
            logger.warning(
                "a batch of every task is drawn by TaskBatchingConfig: BatchingConfig's %s change "
                "nothing",
                ", ".join(unused),
            )
        stream, sizes, lengths, facts = _every_task(
            multitask,
            texts,
            partitioner=partitioner,
            padding=padding,
            num_chunks=training.num_chunks,
        )
    else:
        size, task = training.batching.batch_size, next(iter((*query_tasks, *texts.queries, "any")))
        partitioner.check_batch_size(size)
        check_chunks(size, training.num_chunks, num_shards=devices)
        if texts.store is not None:
            rated = with_mixture_rates(training.batching, texts.store, texts.queries)
            share = partitioner.host_share
            stream = BatchStream(texts.store, texts.queries, rated, share=share, padding=padding)
        sizes, lengths = {task: size}, {task: texts.query_length}
        counts = f"{size * candidates - 1} = {size} queries x {candidates} passages - 1"
        facts = {
            "negatives_per_query": f"{counts}, {_devices()}",
            "false_negatives": batching.false_negatives.value,
        }
    if alone := [task for task, size in sizes.items() if size * candidates < 2]:
        problem = f"a batch of {', '.join(alone)} is one query and its positive, without negatives"
        fix = "raise num_negatives or the number of queries: this would train nothing"
        raise ConfigError(problem, where="batch", fix=fix)
    batches = {
        task: abstract_batch(
            (sizes[task], lengths[task]),
            (sizes[task] * candidates, texts.passage_length),
            memory=memory if multitask is None else None,
        )
        for task in sizes
    }
    layouts = _drawn_layouts(batches, texts.lengths, padding) if stream is None else stream.layouts
    if multitask is None and layouts:
        of_any = [_grouped(batches[task], layout) for layout in layouts.values()]
        batches = {task: max(of_any, key=lambda batch: batch.tokens)}
    elif layouts:
        batches = {task: _grouped(batch, layouts[task]) for task, batch in batches.items()}
    return BatchPlan(
        batches=batches,
        tasks=None if multitask is None else tuple(sizes),
        stream=stream,
        facts={**facts, **_length_groups(layouts)},
    )


def _every_task(
    multitask: MultitaskTraining,
    texts: TrainingTexts,
    *,
    partitioner: Partitioner,
    padding: Padding,
    num_chunks: int,
) -> tuple[every_task.Stream | None, Mapping[str, int], Mapping[str, int], dict[str, object]]:
    """The batches of every task in a step: their stream, queries, tokens of a query, and facts."""
    batching, devices = multitask.batching, partitioner.batch_devices
    if texts.store is not None:
        stream = every_task.TaskBatchStream(
            texts.store,
            texts.queries,
            batching,
            num_devices=devices,
            num_chunks=num_chunks,
            share=partitioner.host_share,
            padding=padding,
        )
        sizes, combiner = stream.batch_sizes, multitask.combiner
        is_tsage = combiner.combiner is Combiner.TSAGE
        negatives = {task: size * (1 + batching.num_negatives) - 1 for task, size in sizes.items()}
        facts: dict[str, object] = {
            "combiner": combiner.combiner.value,
            **({"tsage_beta": combiner.tsage.beta} if is_tsage else {}),
            "queries_per_step": f"{sum(sizes.values())}, {_devices()}",
            "batch_sizes": sizes,
            "negatives_per_query": negatives,
            "hard_negatives_per_query": batching.num_negatives,
            "padded_query_lengths": stream.query_lengths,
            "false_negatives": batching.false_negatives.value,
        }
        return stream, sizes, stream.query_lengths, facts
    if not texts.task_sizes:
        problem = "no token store, and a batch of every task in each step"
        fix = "run `taser tokenize` first; for `taser compile`, set compile_recipe.task_sizes"
        raise ConfigError(problem, where="TOKEN_STORE", fix=fix)
    sizes = every_task.task_batch_sizes(
        batching, texts.task_sizes, num_devices=devices, num_chunks=num_chunks
    )
    return None, sizes, dict.fromkeys(sizes, texts.query_length), {}


def _drawn_layouts(
    batches: Mapping[str, Batch], text_lengths: TextLengths | None, padding: Padding
) -> dict[str, tuple[Layout, Layout]]:
    """Groups as those of a token store whose texts are that long; none without buckets."""
    if text_lengths is None or not padding.buckets:
        return {}

    def layout(side: str, texts: int, longest: int) -> Layout:
        lengths = drawn_lengths(text_lengths[side], steps=padding.steps, texts=texts)
        return Layout.of(np.minimum(lengths, longest), padding, longest=longest)

    return {
        task: (
            layout("query", *sizes_of(batch.queries)[0]),
            layout("passage", *sizes_of(batch.passages)[0]),
        )
        for task, batch in batches.items()
    }


def _grouped(batch: Batch, layout: tuple[Layout, Layout]) -> Batch:
    """The batch in the groups of its queries and of its passages."""
    return in_groups(batch, *(side.groups for side in layout))


def _length_groups(layouts: Mapping[str, tuple[Layout, Layout]]) -> dict[str, object]:
    """Texts x tokens of the groups of each task's batches; nothing without buckets."""
    groups = {
        task: f"queries {queries}; passages {passages}"
        for task, (queries, passages) in layouts.items()
    }
    return {"length_groups": groups} if groups else {}


def _devices() -> str:
    return f"over {jax.device_count()} devices on {jax.process_count()} hosts"
