"""One batch of every task per step: sizes by temperature, and negatives of the same task."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Mapping

import numpy as np

from taser_jax.data.batches.draws import task_number
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import (
    BatchingConfig,
    FalseNegatives,
    Layout,
    Padding,
    PositiveChoice,
    TextSource,
)
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import HostShare
from taser_jax.models.batch import Batch
from taser_jax.storage.artifacts import fingerprint_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, Natural, Positive, PositiveNumber, Seed

# Query arrays are as long as the task's longest query, rounded up to a multiple of this.
_LENGTH_MULTIPLE = 8
_SEED_BITS = 32


class BatchTotal(enum.Enum):
    """Whether `total` counts a step's queries over all devices or on each device.

    The paper has 120 in all; its code has 120 on each of its devices.
    """

    GLOBAL = "global"
    PER_DEVICE = "per_device"


@dataclasses.dataclass(frozen=True)
class TaskBatchingConfig(Checked):
    """How a step's batches are drawn.

    Attributes:
        total: queries of all tasks in a step.
        counted: whether `total` counts queries over all devices or on each.
        temperature: c of `task_batch_sizes`; 1 is proportional to the sizes of the sets, and larger
            values bring the tasks' shares closer together.
        num_negatives: hard negatives per query.
        false_negatives: MASK, or KEEP as in the papers.
        positives: SAMPLE, or FIRST as in the papers.
        seed: 0 or more.
    """

    total: Positive = 120
    counted: BatchTotal = BatchTotal.GLOBAL
    temperature: PositiveNumber = 4.0
    num_negatives: Natural = 2
    false_negatives: FalseNegatives = FalseNegatives.MASK
    positives: PositiveChoice = PositiveChoice.SAMPLE
    seed: Seed = 0


def task_batch_sizes(
    config: TaskBatchingConfig,
    sizes: Mapping[str, int],
    *,
    num_devices: int = 1,
    num_chunks: int = 1,
) -> dict[str, int]:
    """Queries of each task per step: r_t ∝ N_t^(1/c), in whole seats that sum to the total.

    Every task gets one seat. Of the remaining B − T, task t gets ⌊B·r_t − 1⌋ (at least 0), and the
    rest go one by one to the largest remainders. A seat is one query for each chunk of each device.

    Example:
        Sets of 16, 1 and 1 with c = 4 have shares 1/2, 1/4, 1/4:

        >>> task_batch_sizes(TaskBatchingConfig(total=8), {"a": 16, "b": 1, "c": 1})
        {'a': 4, 'b': 2, 'c': 2}

    Args:
        config: the total, and c, the temperature.
        sizes: task -> its training queries.
        num_devices: devices that share a batch.
        num_chunks: GradCache chunks of each task's batch.

    Returns:
        Task -> queries, in the order of `sizes`.

    Raises:
        ConfigError: an empty task, or a total that is not a multiple or too small.

    Source: TACO-DR (Zhang et al., 2023), section 4.2, and its released code for the rounding.
    """
    empty = [task for task, size in sizes.items() if size < 1]
    if empty or not sizes:
        problem = f"task {', '.join(empty)} has no training queries" if empty else "no task"
        fix = "remove it from TASKS, or prepare its training split"
        raise ConfigError(problem, where="task batches", fix=fix)
    per_device = config.counted is BatchTotal.PER_DEVICE
    total = config.total * (num_devices if per_device else 1)
    multiple = num_devices * num_chunks
    if total % multiple or total // multiple < len(sizes):
        raise ConfigError(
            f"{total} queries in a step",
            where="task batches",
            expected=f"a multiple of {multiple} (devices and chunks that share a batch), at least "
            f"{multiple * len(sizes)} for {len(sizes)} tasks",
            fix=f"the next total that fits is {max(-(-total // multiple), len(sizes)) * multiple}",
        )
    seats = total // multiple
    # Shares of the largest set: near a temperature of 0 the powers of the sizes would overflow.
    weights = np.asarray(list(sizes.values())) / max(sizes.values())
    weights = weights ** (1.0 / config.temperature)
    quotas = seats * weights / weights.sum() - 1.0
    given = np.maximum(np.floor(quotas), 0.0).astype(int)
    left = seats - len(sizes) - int(given.sum())
    # Tasks far below one seat were rounded up: the largest tasks give up seats for them.
    while left < 0:
        largest = int(np.argmax(given))
        given[largest] -= 1
        left += 1
    for place in np.argsort(-(quotas - given), kind="stable")[:left]:
        given[place] += 1
    return {task: int(1 + extra) * multiple for task, extra in zip(sizes, given, strict=True)}


class TaskBatchStream:
    """One batch of each task at every step, the same on every host and after every restart.

    A task's batches are those of `BatchStream`: a pass is a permutation of its queries, and a
    smaller set starts another pass, reshuffled, while the others continue. Tasks do not share
    negatives. Query arrays are as long as their task's longest query. With buckets, each task has
    groups of its own; in a step where one task's texts do not fit, all are padded to full length.

    Args:
        store: the passages' tokens.
        tasks: task -> queries to train on.
        config: how to draw.
        num_devices: devices that share a batch.
        num_chunks: GradCache chunks of each task's batch.
        share: the part of each task's batch that this host makes.
        padding: the lengths to pad to.

    Attributes:
        config: how it draws.
        batch_sizes: task -> queries in its batches.
        query_lengths: task -> tokens of its query arrays.
        batches_per_epoch: task -> batches in one pass over it.
        steps_per_epoch: steps until every task has completed a pass.

    Raises:
        ConfigError: as `task_batch_sizes` and `BatchStream`.
    """

    def __init__(
        self,
        store: TokenStore,
        tasks: Mapping[str, TokenizedQueries],
        config: TaskBatchingConfig,
        *,
        num_devices: int = 1,
        num_chunks: int = 1,
        share: HostShare = HostShare(),
        padding: Padding = Padding(),
    ) -> None:
        self.config = config
        self.batch_sizes = task_batch_sizes(
            config,
            {task: len(queries) for task, queries in tasks.items()},
            num_devices=num_devices,
            num_chunks=num_chunks,
        )
        self.query_lengths: dict[str, int] = {}
        self._streams: dict[str, BatchStream] = {}
        for task, queries in tasks.items():
            rounded = -(-int(queries.lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
            self.query_lengths[task] = length = min(rounded, queries.ids.shape[1])
            cut = dataclasses.replace(queries, ids=queries.ids[:, :length])
            batching = BatchingConfig(
                batch_size=self.batch_sizes[task],
                num_negatives=config.num_negatives,
                false_negatives=config.false_negatives,
                positives=config.positives,
                # Tasks draw independently.
                seed=(config.seed << _SEED_BITS) + task_number(task),
            )
            stream = BatchStream(store, {task: cut}, batching, share=share, padding=padding)
            self._streams[task] = stream
        self.batches_per_epoch = {
            task: stream.steps_per_epoch for task, stream in self._streams.items()
        }
        self.steps_per_epoch = max(self.batches_per_epoch.values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of what decides a step's rows and tokens; the number of hosts does not."""
        return fingerprint_json(
            {task: stream.fingerprint for task, stream in self._streams.items()}
        )

    def batches(self, step: int) -> dict[str, Batch]:
        """This host's share of each task's batch."""
        fit = all(stream.fits(step) for stream in self._streams.values())
        return {
            task: stream.padded_batch(step, grouped=fit) for task, stream in self._streams.items()
        }

    @property
    def layouts(self) -> dict[str, tuple[Layout, Layout]]:
        """Task -> groups of its queries and passages; empty without buckets."""
        return {
            task: layouts
            for stream in self._streams.values()
            for task, layouts in stream.layouts.items()
        }

    def on_texts(self, states: TextSource) -> TaskBatchStream:
        """The same batches, with states of frozen blocks in place of tokens."""
        stream = copy.copy(self)
        stream._streams = {task: own.on_texts(states) for task, own in self._streams.items()}
        return stream

    def query_rows(self, step: int) -> dict[str, np.ndarray]:
        """Rows of the queries in each task's global batch."""
        return {task: stream.rows(step).query_rows for task, stream in self._streams.items()}


# The batches of every step, for one task or for each: a pure function of seed and step.
Stream = BatchStream | TaskBatchStream
