"""A teacher's scores of mined negatives and their queries' positives, for distillation."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int

from taser_jax.commands.inputs import read_task_run, run_path
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.negatives import TeacherLine
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.pair_scores import CrossEncoder, EmbeddingScorer, PairScorer, RunScorer
from taser_jax.storage.artifacts import kind_of
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase


def teacher_scores(
    teachers: Mapping[str, float],
    queries: QuerySet,
    negatives: Sequence[Sequence[int]],
    store: PassageStore,
) -> list[TeacherLine]:
    """A teacher's scores of each query's positives and mined negatives.

    The score of a pair is Σ weight · score over the teachers: one model, an ensemble of several, or
    a hybrid, such as {embeddings: 1, BM25's runs: 1.2}.

    Args:
        teachers: directory -> weight. A directory holds a model's embeddings (`taser encode`),
            whose inner products are exact; runs of the split, where a passage that is not in its
            query's list gets the list's lowest score; or a cross-encoder's Hugging Face checkpoint.
        queries: the queries of a split.
        negatives: rows of the passages mined for each of them.
        store: the collection's passages.

    Raises:
        ConfigError: a directory that holds no teacher.
        DataError: embeddings of other queries, or scores that are not finite.
    """
    pairs = _Pairs.of([query.positives for query in queries], negatives)
    total = np.zeros(len(pairs.rows))
    with phase(f"score {queries.task} {queries.split}"):
        for directory, weight in teachers.items():
            total += weight * _scorer(directory, queries, store)(pairs.queries, pairs.rows)
    scores = total.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise DataError(
            f"score {scores[bad[0]]} of query {queries[int(pairs.queries[bad[0]])].id!r} and "
            f"passage row {pairs.rows[bad[0]]}, and {len(bad) - 1} others are not finite scores",
            where=f"{queries.task} {queries.split}",
            fix="take a teacher whose training did not diverge",
        )
    return pairs.split(scores)


def share_of_positives_first(lines: Sequence[TeacherLine]) -> float:
    """Share of the queries with negatives whose best positive scores above all of them."""
    firsts = [
        line.positives.max() > line.negatives.max()
        for line in lines
        if len(line.positives) and len(line.negatives)
    ]
    return float(np.mean(firsts)) if firsts else 0.0


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Every query with its positives, then its negatives, end to end.

    Attributes:
        queries: number of each pair's query in its split.
        rows: row of each pair's passage.
        counts: number of (positives, negatives) of each query.
    """

    queries: Int[np.ndarray, " pairs"]
    rows: Int[np.ndarray, " pairs"]
    counts: list[tuple[int, int]]

    @classmethod
    def of(cls, positives: Sequence[Sequence[int]], negatives: Sequence[Sequence[int]]) -> _Pairs:
        lists = list(zip(positives, negatives, strict=True))
        counts = [(len(own), len(mined)) for own, mined in lists]
        rows = [np.asarray(rows, np.int64) for both in lists for rows in both]
        queries = np.repeat(np.arange(len(counts)), [sum(count) for count in counts])
        return cls(queries, np.concatenate([np.zeros(0, np.int64), *rows]), counts)

    def split(self, scores: Float32[np.ndarray, " pairs"]) -> list[TeacherLine]:
        """The scores, query by query."""
        ends = np.cumsum([count for pair in self.counts for count in pair])
        parts = np.split(scores, ends[:-1]) if len(ends) else []
        return [TeacherLine(*two) for two in zip(parts[::2], parts[1::2], strict=True)]


def _scorer(directory: str, queries: QuerySet, store: PassageStore) -> PairScorer:
    """A teacher of whichever kind the directory holds."""
    path = pathlib.Path(directory)
    if kind_of(directory) == Embeddings.KIND:
        passages = Embeddings.open(directory, fingerprints={"collection": store.fingerprint})
        encoded = QueryEmbeddings.of_split(
            directory, queries.task, queries.split, fingerprints=passages.fingerprints
        )
        if encoded.query_ids != [query.id for query in queries]:
            raise DataError(
                f"embeddings of {len(encoded)} queries of task {queries.task!r}",
                where=str(encoded.directory),
                expected=f"of the {len(queries)} queries of {queries.directory}",
                fix="tokenize and encode this collection's queries with the teacher",
            )
        return EmbeddingScorer(encoded, passages)
    if run_path(directory, queries.task, queries.split).exists():
        return _logged(RunScorer(read_task_run(directory, queries, store).result), directory)
    if (path / "config.json").exists():
        return _cross_encoder(CrossEncoder(directory), queries, store)
    raise ConfigError(
        f"no teacher of task {queries.task!r}, split {queries.split!r} here: no embeddings, no run "
        f"{run_path('', queries.task, queries.split)}, and no cross-encoder's config.json",
        where=directory,
        fix="run `taser encode`, `taser search` or `taser bm25` for this split",
    )


def _logged(scorer: RunScorer, directory: str) -> PairScorer:
    def score_pairs(
        queries: Int[np.ndarray, " pairs"], rows: Int[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        scores = scorer(queries, rows)
        logger.info(
            "%s: %d of %d pairs are not in the run and get the lowest score of their query",
            *(directory, scorer.missing, len(rows)),
        )
        return scores

    return score_pairs


def _cross_encoder(model: CrossEncoder, asked: QuerySet, store: PassageStore) -> PairScorer:
    texts = [query.text for query in asked]

    def score_pairs(
        queries: Int[np.ndarray, " pairs"], rows: Int[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        distinct, places = np.unique(rows, return_inverse=True)
        passages = [f"{one.title} {one.text}".strip() for one in store.get_many(distinct.tolist())]
        return model.scores(
            [texts[number] for number in queries], [passages[place] for place in places]
        )

    return score_pairs
