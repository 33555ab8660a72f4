"""What a server computes: texts in batches, by a retriever that is replaced as a whole; figures.

Requests that arrive within a few milliseconds share one call of the model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from taser_jax.retrieval.passages import Hit
from taser_jax.retriever import Retriever
from taser_jax.storage.progress import logger

Answer = list[Hit] | np.ndarray
"""Of one text: the passages of a search, or an embedding."""


class QueueFullError(Exception):
    """More texts wait than the queue holds; the caller should try again later."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a batch is computed, and what a request may cost.

    Attributes:
        max_batch: texts in one call of the model.
        deadline: seconds that the first text of a batch waits for others.
        max_waiting: texts that may wait; more are refused.
        max_body: bytes of a body.
        body_seconds: seconds within which a body must have arrived.
    """

    max_batch: int = 32
    deadline: float = 0.004
    max_waiting: int = 512
    max_body: int = 2**20
    body_seconds: float = 10.0


@dataclasses.dataclass
class _Waiting:
    work: Work
    texts: Sequence[str]
    results: asyncio.Future[list[Answer]]


class Batcher:
    """Collects texts of concurrent callers and computes them together, in one worker thread.

    Texts of one call stay together and keep their order. Only those of equal work share a batch.
    While a batch is computed the next one fills, so under load batches are full and nobody waits
    for the deadline.

    Args:
        compute: (work, texts) -> one answer per text; called in the worker thread, never twice at
            the same time.
        limits: sizes and deadline.
        observe: called with the size of every batch.
    """

    def __init__(
        self,
        compute: Callable[[Work, list[str]], list[Answer]],
        limits: Limits,
        *,
        observe: Callable[[int], object] = lambda size: None,
    ) -> None:
        self._compute, self._limits, self._observe = compute, limits, observe
        self._waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def waiting(self) -> int:
        """Texts that no batch has taken yet."""
        return sum(len(waiting.texts) for waiting in self._waiting)

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

    async def submit(self, work: Work, texts: Sequence[str]) -> list[Answer]:
        """One answer per text, computed with those of others.

        Raises:
            QueueFullError: too many texts wait.
        """
        if self.waiting + len(texts) > self._limits.max_waiting:
            raise QueueFullError
        results = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(work, texts, results))
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
            texts = [text for waiting in batch for text in waiting.texts]
            self._observe(len(texts))
            work = batch[0].work
            try:
                results = await loop.run_in_executor(self._worker, self._compute, work, texts)
            except Exception as error:
                for waiting in batch:
                    if not waiting.results.done():
                        waiting.results.set_exception(error)
                continue
            first = 0
            for waiting in batch:
                last = first + len(waiting.texts)
                # A caller that left has cancelled its future.
                if not waiting.results.done():
                    waiting.results.set_result(results[first:last])
                first = last

    async def _fill(self) -> None:
        """Waits until a batch is full, or its first text has waited long enough."""
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

    def _take(self) -> list[_Waiting]:
        """The oldest call, and others of its work that fit into the batch."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.results.cancelled()]
        batch: list[_Waiting] = []
        size = 0
        for waiting in self._waiting:
            fits = not batch or size + len(waiting.texts) <= self._limits.max_batch
            if fits and (not batch or waiting.work == batch[0].work):
                batch.append(waiting)
                size += len(waiting.texts)
        taken = set(map(id, batch))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        if self._waiting:
            self._arrived.set()
        else:
            self._arrived.clear()
        return batch


@dataclasses.dataclass(frozen=True)
class Work:
    """What requests must share to be computed together.

    Attributes:
        method: of the retriever.
        task: task whose prompt and query encoder are used; None where tasks do not differ.
        k: passages per query of a search, as `rounded_k` has them.
        hybrid: whether a search adds BM25's scores.
    """

    method: Literal["search", "encode_queries", "encode_passages"]
    task: str | None = None
    k: int = 0
    hybrid: bool = False


def rounded_k(k: int) -> int:
    """The least of 10, 20, 40, ... that is k or more: few different searches are compiled."""
    rounded = 10
    while rounded < k:
        rounded *= 2
    return rounded


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to the first that is `largest` or more: the sizes that queries come in."""
    return [1 << power for power in range((largest - 1).bit_length() + 1)]


class Engine:
    """Answers from one model and one index, which belong together.

    `reload` reads both again and replaces them between two batches: no answer mixes an old model
    with a new index. If what is on disk cannot be read, the old pair goes on answering.

    Args:
        load: reads the retriever; called again by `reload`.
        warm_batches: numbers of queries to try before the first request.
    """

    def __init__(self, load: Callable[[], Retriever], *, warm_batches: Sequence[int] = ()) -> None:
        self._load, self._warm_batches = load, warm_batches
        self._retriever = self._warmed()

    @property
    def retriever(self) -> Retriever:
        """The current one."""
        return self._retriever

    def reload(self) -> bool:
        """Replaces the retriever by what is on disk; keeps it, and says so, if that fails."""
        try:
            retriever = self._warmed()
        except Exception as error:
            logger.error("reload failed, the former model and index answer: %s", error)
            return False
        self._retriever = retriever
        logger.info("reloaded: %s passages", f"{len(retriever):,}")
        return True

    def compute(self, work: Work, texts: list[str]) -> list[Answer]:
        """Answers to one batch of texts."""
        retriever = self._retriever.for_task(work.task)
        if work.method == "search":
            # A reload may have taken BM25 away: to build its index would hold up all requests.
            hybrid = work.hybrid and retriever.has_hybrid
            return list(retriever.search(texts, k=work.k, hybrid=hybrid))
        encode: Callable[[list[str]], np.ndarray] = getattr(retriever, work.method)
        return list(encode(texts))

    def _warmed(self) -> Retriever:
        """The retriever on disk, with the shapes of its queries compiled."""
        retriever = self._load()
        # Of up to 16, 32, ... tokens, to which queries are padded.
        lengths = [length for length in powers_of_two(retriever.query_length) if length >= 16]
        for length, size in itertools.product(lengths, self._warm_batches):
            texts = ["a " * (length * 3 // 4)] * size
            retriever.search(texts, k=rounded_k(1), hybrid=retriever.has_hybrid)
        return retriever


class Metrics:
    """Requests, their latency, sizes of batches, and what waits, as Prometheus reads them.

    Args:
        waiting: number of texts that wait for a batch.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        about = "Requests by path and status."
        self.requests = Counter("taser_requests", about, ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "taser_request_seconds",
            "Seconds from request to answer.",
            ["path"],
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=registry,
        )
        self.batch_size = Histogram(
            "taser_batch_texts",
            "Texts of each call of the model.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        about = "Reloads of model and index."
        self.reloads = Counter("taser_reloads", about, registry=registry)
        about = "Texts that wait for a batch."
        Gauge("taser_waiting_texts", about, registry=registry).set_function(waiting)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
