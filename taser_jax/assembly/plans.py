"""What a training step takes: a batch of one task, or a batch of every task.

`taser train` asks a plan for its batches, optimiser and step, and does not ask which it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import optax

from taser_jax.assembly.batch_shapes import abstract_batch, step_shape
from taser_jax.assembly.data import (
    BatchNaming,
    DeviceBatches,
    DeviceTaskBatches,
    with_mixture_rates,
)
from taser_jax.batch import Batch, BatchShape
from taser_jax.data.batches.every_task import (
    TaskBatchingConfig,
    TaskBatchStream,
    step_batch_sizes,
)
from taser_jax.data.batches.one_task import BatchingConfig, BatchStream
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.optim.multitask import (
    Combiner,
    MultitaskConfig,
    build_multitask_optimizer,
    reads_task_gradients,
)
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.partitioning import Partitioner
from taser_jax.training.grad_cache import check_chunks
from taser_jax.training.multitask_step import TaskGradients, make_multitask_train_step
from taser_jax.training.step import make_train_step

Step = Any


@dataclasses.dataclass(frozen=True)
class MultitaskTraining:
    """Training on a batch of every task in each step.

    Attributes:
        batching: how many queries of each task, and how they are drawn.
        combiner: how the tasks' gradients become one.
    """

    batching: TaskBatchingConfig = TaskBatchingConfig()
    combiner: MultitaskConfig = MultitaskConfig()


class BatchPlan(Protocol):
    """What differs between the two kinds of step."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides the rows and tokens of a step."""
        ...

    @property
    def batches_per_epoch(self) -> dict[str, int]:
        """Task -> batches in one pass over it."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every query was seen."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of run.json wants to know of the batches."""
        ...

    @property
    def shapes(self) -> list[BatchShape]:
        """The arrays of a step's batches."""
        ...

    def abstract_batch(self) -> Any:
        """Shapes and dtypes of what the step takes."""
        ...

    def optimizer(
        self, config: OptimizerConfig, params: Any, *, total_steps: int
    ) -> optax.GradientTransformationExtraArgs:
        """The optax chain."""
        ...

    def train_step(
        self, model: DualEncoder, optimizer: optax.GradientTransformation, **options: Any
    ) -> Step:
        """The jitted step; `options` are those that `make_train_step` takes."""
        ...

    def device_batches(self) -> Any:
        """Batches on the devices, for the training loop."""
        ...


class OneTaskPlan:
    """Each step's batch is of one task, whose turn a schedule decides.

    Args:
        batching: how batches are drawn.
        num_chunks: GradCache chunks.
        query_length: tokens a query.
        passage_length: tokens a passage.
        partitioner: the devices.
        store: tokens; None in a dry run without data.
        queries: task -> queries to train on.
        query_tasks: the model's tasks with a query tower of their own: batches then carry their
            task's name.
    """

    def __init__(
        self,
        batching: BatchingConfig,
        *,
        num_chunks: int,
        query_length: int,
        passage_length: int,
        partitioner: Partitioner,
        store: TokenStore | None,
        queries: Mapping[str, TokenizedQueries],
        query_tasks: Sequence[str] = (),
    ) -> None:
        partitioner.check_batch_size(batching.batch_size)
        check_chunks(batching.batch_size, num_chunks, num_shards=partitioner.batch_devices)
        self._batching, self._num_chunks = batching, num_chunks
        self._lengths = query_length, passage_length
        self._partitioner, self._queries = partitioner, queries
        self._query_tasks = tuple(query_tasks)
        self._stream = None
        if store is not None:
            self._stream = BatchStream(
                store,
                queries,
                with_mixture_rates(batching, store, queries),
                share=partitioner.host_share,
            )

    @property
    def fingerprint(self) -> str:
        """Of the stream."""
        assert self._stream is not None
        return self._stream.fingerprint

    @property
    def batches_per_epoch(self) -> dict[str, int]:
        """Of the stream."""
        assert self._stream is not None
        return self._stream.batches_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Of the stream."""
        assert self._stream is not None
        return self._stream.steps_per_epoch

    @property
    def facts(self) -> dict[str, Any]:
        """Negatives a query."""
        batching = self._batching
        passages = 1 + batching.num_negatives
        return {
            "negatives_per_query": (
                f"{batching.batch_size * passages - 1} = "
                f"{batching.batch_size} queries x {passages} passages - 1, {_devices()}"
            ),
            "false_negatives": batching.false_negatives.value,
        }

    @property
    def shapes(self) -> list[BatchShape]:
        """One batch."""
        return [step_shape(self._batching.batch_size, self._batching.num_negatives, *self._lengths)]

    def abstract_batch(self) -> Batch | dict[str, Batch]:
        """One batch; of the first task where batches carry a name."""
        batch = abstract_batch(self.shapes[0])
        return {self._query_tasks[0]: batch} if self._query_tasks else batch

    def optimizer(
        self, config: OptimizerConfig, params: Any, *, total_steps: int
    ) -> optax.GradientTransformationExtraArgs:
        """`build_optimizer`'s."""
        return build_optimizer(config, params, total_steps=total_steps)

    def train_step(
        self, model: DualEncoder, optimizer: optax.GradientTransformation, **options: Any
    ) -> Step:
        """`make_train_step`'s."""
        return make_train_step(model, optimizer, num_chunks=self._num_chunks, **options)

    def device_batches(self) -> DeviceBatches:
        """The stream's batches."""
        assert self._stream is not None
        naming = BatchNaming.BY_TASK if self._query_tasks else BatchNaming.PLAIN
        return DeviceBatches(self._stream, self._queries, self._partitioner, naming=naming)


class EveryTaskPlan:
    """Each step has a batch of every task; a combiner makes their gradients one.

    Args:
        multitask: batches and combiner.
        num_chunks: GradCache chunks of each task's batch.
        passage_length: tokens a passage.
        partitioner: the devices.
        store: tokens; None where nothing is trained.
        queries: task -> queries to train on, in the order of the task axis.
        query_length: tokens a query, where there is no store to tell each task's longest.
        task_sizes: task -> number of queries, where there is no store.
    """

    def __init__(
        self,
        multitask: MultitaskTraining,
        *,
        num_chunks: int,
        passage_length: int,
        partitioner: Partitioner,
        store: TokenStore | None,
        queries: Mapping[str, TokenizedQueries],
        query_length: int | None = None,
        task_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._multitask, self._num_chunks = multitask, num_chunks
        self._passage_length = passage_length
        self._partitioner, self._queries = partitioner, queries
        if store is None:
            assert query_length is not None
            self._batch_sizes = step_batch_sizes(
                multitask.batching,
                task_sizes or {},
                num_devices=partitioner.batch_devices,
                num_chunks=num_chunks,
            )
            self._query_lengths = dict.fromkeys(self._batch_sizes, query_length)
            return
        self._stream = TaskBatchStream(
            store,
            queries,
            multitask.batching,
            num_devices=partitioner.batch_devices,
            num_chunks=num_chunks,
            share=partitioner.host_share,
        )
        self._batch_sizes = self._stream.batch_sizes
        self._query_lengths = self._stream.query_lengths

    @property
    def fingerprint(self) -> str:
        """Of the stream."""
        return self._stream.fingerprint

    @property
    def batches_per_epoch(self) -> dict[str, int]:
        """Of the stream."""
        return self._stream.batches_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Of the task with most batches; smaller ones go round."""
        return self._stream.steps_per_epoch

    @property
    def facts(self) -> dict[str, Any]:
        """Each task's batch, and the combiner."""
        batching, combiner = self._multitask.batching, self._multitask.combiner
        is_tsage = combiner.combiner is Combiner.TSAGE
        return {
            "combiner": combiner.combiner.value,
            **({"tsage_beta": combiner.tsage.beta} if is_tsage else {}),
            "queries_per_step": f"{self._stream.batch_size}, {_devices()}",
            "batch_sizes": self._stream.batch_sizes,
            "negatives_per_query": self._stream.negatives_per_query,
            "padded_query_lengths": self._stream.query_lengths,
            "false_negatives": batching.false_negatives.value,
        }

    @property
    def shapes(self) -> list[BatchShape]:
        """Each task's batch."""
        return list(self._shapes().values())

    def _shapes(self) -> dict[str, BatchShape]:
        return {
            task: step_shape(
                size,
                self._multitask.batching.num_negatives,
                self._query_lengths[task],
                self._passage_length,
            )
            for task, size in self._batch_sizes.items()
        }

    def abstract_batch(self) -> dict[str, Batch]:
        """A batch of each task."""
        return {task: abstract_batch(shape) for task, shape in self._shapes().items()}

    def optimizer(
        self, config: OptimizerConfig, params: Any, *, total_steps: int
    ) -> optax.GradientTransformationExtraArgs:
        """`build_multitask_optimizer`'s."""
        return build_multitask_optimizer(
            self._multitask.combiner,
            config,
            params,
            tasks=tuple(self._batch_sizes),
            total_steps=total_steps,
        )

    def train_step(
        self, model: DualEncoder, optimizer: optax.GradientTransformation, **options: Any
    ) -> Step:
        """`make_multitask_train_step`'s."""
        return make_multitask_train_step(
            cast(Any, model),
            optimizer,
            tasks=tuple(self._batch_sizes),
            num_chunks=self._num_chunks,
            gradients=self._gradients,
            max_skipped_steps=self._multitask.combiner.max_skipped_steps,
            **options,
        )

    @property
    def _gradients(self) -> TaskGradients:
        """A task axis costs a gradient's memory a task, so the naive sum does without."""
        stacked = reads_task_gradients(self._multitask.combiner)
        return TaskGradients.STACKED if stacked else TaskGradients.SUMMED

    def device_batches(self) -> DeviceTaskBatches:
        """The stream's batches."""
        return DeviceTaskBatches(self._stream, self._queries, self._partitioner)


def make_plan(
    batching: BatchingConfig,
    multitask: MultitaskTraining | None,
    *,
    num_chunks: int,
    query_length: int,
    passage_length: int,
    partitioner: Partitioner,
    store: TokenStore | None,
    queries: Mapping[str, TokenizedQueries],
    query_tasks: Sequence[str] = (),
    task_sizes: Mapping[str, int] | None = None,
) -> BatchPlan:
    """The plan of a configuration; see the classes for the arguments.

    Raises:
        ConfigError: batches that the devices or chunks cannot share, or a batch of every task
            with neither a token store nor sizes to tell the tasks.
    """
    if multitask is None:
        return OneTaskPlan(
            batching,
            num_chunks=num_chunks,
            query_length=query_length,
            passage_length=passage_length,
            partitioner=partitioner,
            store=store,
            queries=queries,
            query_tasks=query_tasks,
        )
    if store is None and not task_sizes:
        raise ConfigError(
            "no token store, and a batch of every task in each step",
            where="TOKEN_STORE",
            expected="a token store, which says what the tasks are",
            fix="run `taser tokenize` first; for `taser compile`, set TASK_SIZES",
        )
    return EveryTaskPlan(
        multitask,
        num_chunks=num_chunks,
        passage_length=passage_length,
        partitioner=partitioner,
        store=store,
        queries=queries,
        query_length=query_length,
        task_sizes=task_sizes,
    )


def _devices() -> str:
    return f"over {jax.device_count()} devices on {jax.process_count()} hosts"
