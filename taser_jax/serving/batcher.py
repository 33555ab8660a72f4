"""Dynamic batching: requests that arrive within a few milliseconds share one call of the model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """More texts wait than the queue holds; the caller should try again later."""


@dataclasses.dataclass(frozen=True)
class BatchingLimits:
    """When a batch is computed, and how much may wait for it.

    Attributes:
        max_batch: texts in one call of the model.
        deadline: seconds that the first text of a batch waits for others.
        max_waiting: texts that may wait; more are refused.
    """

    max_batch: int = 32
    deadline: float = 0.004
    max_waiting: int = 512


@dataclasses.dataclass
class _Waiting(Generic[Item, Result]):
    key: Hashable
    items: Sequence[Item]
    results: asyncio.Future[list[Result]]


class Batcher(Generic[Item, Result]):
    """Collects items of concurrent callers and computes them together, in one worker thread.

    Items of one call stay together and keep their order. Only items of equal keys share a batch.
    While a batch is computed the next one fills, so under load batches are full and nobody waits
    for the deadline.

    Args:
        compute: (key, items) -> one result per item; called in the worker thread, never twice at
            the same time.
        limits: sizes and deadline.
        observe: called with the size of every batch.
    """

    def __init__(
        self,
        compute: Callable[[Hashable, list[Item]], list[Result]],
        limits: BatchingLimits,
        *,
        observe: Callable[[int], object] = lambda size: None,
    ) -> None:
        self._compute, self._limits, self._observe = compute, limits, observe
        self._waiting: list[_Waiting[Item, Result]] = []
        self._arrived = asyncio.Event()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def waiting(self) -> int:
        """Items that no batch has taken yet."""
        return sum(len(waiting.items) for waiting in self._waiting)

    def start(self) -> None:
        """Begins to compute batches, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Computes what waits, then ends."""
        self._is_stopping = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        self._worker.shutdown(wait=True)

    async def submit(self, key: Hashable, items: Sequence[Item]) -> list[Result]:
        """One result per item, computed with those of others.

        Raises:
            QueueFullError: too many items wait.
        """
        if self.waiting + len(items) > self._limits.max_waiting:
            raise QueueFullError
        results = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(key, items, results))
        self._arrived.set()
        return await results

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or not self._is_stopping:
            await self._arrived.wait()
            await self._fill()
            batch = self._take()
            if not batch:
                continue
            items = [item for waiting in batch for item in waiting.items]
            self._observe(len(items))
            try:
                results = await loop.run_in_executor(
                    self._worker, self._compute, batch[0].key, items
                )
            except Exception as error:
                for waiting in batch:
                    if not waiting.results.done():
                        waiting.results.set_exception(error)
                continue
            first = 0
            for waiting in batch:
                last = first + len(waiting.items)
                # A caller that left has cancelled its future.
                if not waiting.results.done():
                    waiting.results.set_result(results[first:last])
                first = last

    async def _fill(self) -> None:
        """Waits until a batch is full, or its first item has waited long enough."""
        end = asyncio.get_running_loop().time() + self._limits.deadline
        while self.waiting < self._limits.max_batch and not self._is_stopping:
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting[Item, Result]]:
        """The oldest call, and others of its key that fit into the batch."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.results.cancelled()]
        batch: list[_Waiting[Item, Result]] = []
        size = 0
        for waiting in self._waiting:
            fits = not batch or size + len(waiting.items) <= self._limits.max_batch
            if fits and (not batch or waiting.key == batch[0].key):
                batch.append(waiting)
                size += len(waiting.items)
        taken = set(map(id, batch))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        if self._waiting:
            self._arrived.set()
        else:
            self._arrived.clear()
        return batch
