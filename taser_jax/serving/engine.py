"""What a server answers with, a retriever that is replaced as a whole, and its figures."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from taser_jax.retrieval.passages import Hit
from taser_jax.retriever import Retriever
from taser_jax.storage.progress import logger


class Operation(enum.Enum):
    """What is asked of the model."""

    SEARCH = "search"
    HYBRID_SEARCH = "hybrid search"
    QUERY_EMBEDDINGS = "query embeddings"
    PASSAGE_EMBEDDINGS = "passage embeddings"


@dataclasses.dataclass(frozen=True)
class Work:
    """What requests must share to be computed together.

    Attributes:
        operation: what is computed.
        task: task whose prompt and query encoder are used; None where tasks do not differ.
        k: passages per query, as `rounded_k` has them.
    """

    operation: Operation
    task: str | None = None
    k: int = 0


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
        self.loads = 1

    @property
    def retriever(self) -> Retriever:
        """The current one."""
        return self._retriever

    def reload(self) -> None:
        """Replaces the retriever by what is on disk; keeps it if that fails."""
        try:
            retriever = self._warmed()
        except Exception as error:
            logger.error("reload failed, the former model and index answer: %s", error)
            return
        self._retriever = retriever
        self.loads += 1
        logger.info("reloaded: %s passages", f"{len(retriever):,}")

    def compute(self, work: Hashable, texts: list[str]) -> list[list[Hit] | np.ndarray]:
        """Results of one batch of texts."""
        assert isinstance(work, Work)
        retriever = self._retriever.for_task(work.task)
        match work.operation:
            case Operation.QUERY_EMBEDDINGS:
                return list(retriever.encode_queries(texts))
            case Operation.PASSAGE_EMBEDDINGS:
                return list(retriever.encode_passages(texts))
            case Operation.SEARCH | Operation.HYBRID_SEARCH:
                hybrid = work.operation is Operation.HYBRID_SEARCH
                return list(retriever.search(texts, k=work.k, hybrid=hybrid))

    def _warmed(self) -> Retriever:
        """The retriever on disk, with its usual shapes compiled."""
        retriever = self._load()
        for size in self._warm_batches:
            retriever.search(["warm up"] * size, k=rounded_k(1), hybrid=retriever.has_hybrid)
        return retriever


class Metrics:
    """Requests, their latency, sizes of batches, and what waits, as Prometheus reads them.

    Args:
        waiting: number of texts that wait for a batch.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "taser_requests",
            "Requests by path and status.",
            ["path", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "taser_request_seconds",
            "Seconds from request to answer.",
            ["path"],
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
            registry=self._registry,
        )
        self.batch_size = Histogram(
            "taser_batch_texts",
            "Texts of each call of the model.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=self._registry,
        )
        about = "Reloads of model and index."
        self.reloads = Counter("taser_reloads", about, registry=self._registry)
        about = "Texts that wait for a batch."
        gauge = Gauge("taser_waiting_texts", about, registry=self._registry)
        gauge.set_function(waiting)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
