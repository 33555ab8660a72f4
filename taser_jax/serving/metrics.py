"""Figures of a server, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Requests, their latency, sizes of batches, and what waits.

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
        self.reloads = Counter(
            *("taser_reloads", "Reloads of model and index."), registry=self._registry
        )
        gauge = Gauge(
            *("taser_waiting_texts", "Texts that wait for a batch."), registry=self._registry
        )
        gauge.set_function(waiting)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
