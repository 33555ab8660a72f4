"""Scores of given (query, passage) pairs by any kind of teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int

from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.runs import NO_ROW, SearchResult
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, how_to_install
from taser_jax.storage.progress import bar

_PAIRS_AT_ONCE = 1 << 14
# Pairs that a cross-encoder reads at once.
_BATCH = 32


@runtime_checkable
class PairScorer(Protocol):
    """Scores pairs of one task's split."""

    def __call__(
        self, queries: Int[np.ndarray, " pairs"], rows: Int[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Scores of (number of the query in its split, row of the passage)."""


class RunScorer:
    """Scores from a run; a passage that is not in the run gets its query's lowest score.

    That is the rule of hybrid search (TASER, appendix D); the lowest score of an empty list is 0.

    Example:
        A run of one query with rows 7 and 4 and scores 3 and 1: row 7 scores 3, row 9 scores 1.

    Args:
        result: aligned with the queries.

    Attributes:
        missing: number of pairs scored so far that are not in the run.
    """

    def __init__(self, result: SearchResult) -> None:
        is_result = result.rows != NO_ROW
        # Rows of one query never reach the next one's keys.
        self._stride = int(result.rows.max(initial=0)) + 1
        query, _ = np.nonzero(is_result)
        keys = query.astype(np.int64) * self._stride + result.rows[is_result]
        order = np.argsort(keys)
        # The last key is none: every search has a place.
        self._keys = np.append(keys[order], np.iinfo(np.int64).max)
        self._scores = result.scores[is_result][order].astype(np.float64)
        lowest = np.where(is_result, result.scores, np.inf).min(axis=1, initial=np.inf)
        self._lowest = np.where(np.isfinite(lowest), lowest, 0.0)
        self.missing = 0

    def __call__(
        self, queries: Int[np.ndarray, " pairs"], rows: Int[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Scores of the pairs."""
        scores = self._lowest[queries].astype(np.float64)
        keys = np.asarray(queries, np.int64) * self._stride + rows
        place = np.searchsorted(self._keys, keys)
        in_run = (self._keys[place] == keys) & (np.asarray(rows) < self._stride)
        scores[in_run] = self._scores[place[in_run]]
        self.missing += int((~in_run).sum())
        return scores


@dataclasses.dataclass(frozen=True)
class EmbeddingScorer:
    """Inner products of a model's embeddings.

    Attributes:
        queries: embeddings of the split's queries, row by row.
        passages: embeddings of the collection.
    """

    queries: Embeddings
    passages: Embeddings

    def __call__(
        self, queries: Int[np.ndarray, " pairs"], rows: Int[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Scores of the pairs."""
        scores = np.empty(len(queries))
        for start in range(0, len(queries), _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            first, second = (
                embeddings.take(numbers[block]).astype(np.float64)
                for embeddings, numbers in ((self.queries, queries), (self.passages, rows))
            )
            scores[block] = np.einsum("pd,pd->p", first, second)
        return scores


class CrossEncoder:
    """Query and passage read together by a sequence classifier of Hugging Face, with one output.

    Args:
        directory: directory of a local checkpoint with its tokeniser; nothing is downloaded.
        max_length: maximum tokens of query and passage together; longer passages are truncated.

    Raises:
        ConfigError: PyTorch and transformers are not installed, or the classifier has several
            outputs.
    """

    def __init__(self, directory: FilePath, *, max_length: int = 512) -> None:
        try:
            import transformers
        except ImportError as error:
            problem, fix = "a cross-encoder needs PyTorch and transformers", how_to_install("torch")
            raise ConfigError(problem, where=str(directory), fix=fix) from error
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True
        )
        self._model = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(directory), local_files_only=True
        ).eval()
        outputs = self._model.config.num_labels
        if outputs != 1:
            problem = f"a classifier with {outputs} outputs, not one for the relevance"
            fix = "give a cross-encoder that was trained to rank"
            raise ConfigError(problem, where=str(directory), fix=fix)
        self._max_length = max_length

    def scores(self, queries: Sequence[str], passages: Sequence[str]) -> Float64[np.ndarray, " p"]:
        """The classifier's output for each pair, before any activation.

        Args:
            queries: one for each pair.
            passages: title and text, parallel to the queries.
        """
        import torch

        scores = np.empty(len(queries))
        # Pairs of one length make batches with little padding; the longest come first.
        lengths = [len(query) + len(text) for query, text in zip(queries, passages, strict=True)]
        order = np.argsort(lengths, kind="stable")[::-1]
        with (
            bar("cross-encoder", total=len(order), unit="pair") as progress,
            torch.inference_mode(),
        ):
            for start in range(0, len(order), _BATCH):
                places = order[start : start + _BATCH]
                inputs = self._tokenizer(
                    [queries[place] for place in places],
                    [passages[place] for place in places],
                    padding=True,
                    truncation="only_second",
                    max_length=self._max_length,
                    return_tensors="pt",
                )
                scores[places] = self._model(**inputs).logits[:, 0].float().numpy()
                progress.update(len(places))
        return scores
