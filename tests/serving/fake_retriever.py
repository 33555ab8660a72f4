"""A retriever whose answers say what it was asked, without a model."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from taser_jax.retrieval.passages import Hit
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage


@dataclasses.dataclass
class FakeRetriever:
    """Passage i of query q has the title "<version>: q" and score -i.

    Attributes:
        version: appears in titles and embeddings.
        has_hybrid: whether it has BM25.
        tasks: its tasks.
        query_length: maximum tokens of a query.
        seconds: that a call takes.
        batches: number of queries of every call.
    """

    version: int = 1
    has_hybrid: bool = True
    tasks: tuple[str, ...] = ("qa", "facts")
    query_length: int = 32
    seconds: float = 0.0
    batches: list[int] = dataclasses.field(default_factory=list)
    task: str | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def model(self) -> SimpleNamespace:
        """What the server asks of a loaded model."""
        config = SimpleNamespace(embedding_dim=3)
        return SimpleNamespace(model=SimpleNamespace(config=config), fingerprint=f"v{self.version}")

    def __len__(self) -> int:
        return 5

    def for_task(self, task: str | None) -> FakeRetriever:
        """The same, for a task."""
        if task is not None and task not in self.tasks:
            raise ConfigError(f"no task {task!r}", fix="one of qa, facts")
        return dataclasses.replace(self, task=task) if task else self

    def search(self, questions: Sequence[str], *, k: int, hybrid: bool = False) -> list[list[Hit]]:
        """k passages of each question."""
        assert self.lock.acquire(blocking=False), "two calls at the same time"
        try:
            self.batches.append(len(questions))
            time.sleep(self.seconds)
            if "fail" in questions:
                raise RuntimeError("a bug")
            title = f"{self.version}: {self.task or ''}{' + BM25' if hybrid else ''}"
            return [
                [
                    Hit(Passage(id=f"p{i}", title=f"{title}: {q}", text="<b>text</b>"), -float(i))
                    for i in range(min(k, len(self)))
                ]
                for q in questions
            ]
        finally:
            self.lock.release()

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Lengths of the texts."""
        return np.array([[len(text), 0, self.version] for text in texts], np.float32)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Lengths of the texts, with a 1 beside."""
        return np.array([[len(text), 1, self.version] for text in texts], np.float32)
