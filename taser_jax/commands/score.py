"""`taser score`: a teacher's scores of mined negatives and their queries' positives."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int

from taser_jax.commands.inputs import read_task_run, run_path, tasks_with
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.token_store.negatives import (
    QueryNegatives,
    TeacherLine,
    read_facts,
    read_metadata,
    read_negatives,
    write_negatives,
)
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.interop.cross_encoder import CrossEncoder
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.pair_scores import EmbeddingScorer, PairScorer, RunScorer
from taser_jax.storage.artifacts import kind_of
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase


@writes("{output_dir}")
@first_host_only
def score(
    *,
    teachers: Mapping[str, float],
    negatives_dir: str,
    data_dir: str,
    collection: str,
    output_dir: str,
    split: str = "train",
    tasks: Sequence[str] | None = None,
) -> dict[str, float]:
    """Adds a teacher's scores of all positives and mined passages to a directory of negatives.

    The score of a pair is Σ weight · score over the teachers: one model, an ensemble of several, or
    a hybrid, such as {embeddings: 1, BM25's runs: 1.2}.

    Args:
        teachers: directory -> weight. A directory holds a model's embeddings (`taser encode`),
            whose inner products are exact; runs of the split, where a passage that is not in its
            query's list gets the list's lowest score; or a cross-encoder's Hugging Face checkpoint.
        negatives_dir: from `taser mine`.
        data_dir: folder of collections.
        collection: the collection.
        output_dir: negatives with scores go there; another directory than `negatives_dir`.
        split: split of the queries.
        tasks: tasks to use; None means all that have the split.

    Returns:
        Task -> share of queries whose best positive the teacher scores above all their negatives.

    Raises:
        ConfigError: no teacher, or a directory that holds none.
        DataError: negatives of other queries, or scores that are not finite.
    """
    if not isinstance(teachers, Mapping) or not teachers:
        fix = "write directory -> weight, such as {'embeddings': 1.0}"
        raise ConfigError(f"no teacher in {teachers!r}", where="TEACHERS", fix=fix)
    if pathlib.Path(output_dir).resolve() == pathlib.Path(negatives_dir).resolve():
        problem = "negatives with scores would replace those without"
        raise ConfigError(problem, where="OUTPUT_DIR", fix="name another directory")
    store = PassageStore.open(data_dir, collection)
    metadata = read_metadata(negatives_dir)
    shares = {}
    for task in tasks_with(data_dir, collection, split=split, tasks=tasks):
        queries = QuerySet.open(data_dir, collection, task, split)
        positives = [np.asarray(query.positives, np.int64) for query in queries]
        ids = [query.id for query in queries]
        lines = read_negatives(
            negatives_dir, task, split, ids, collection_fingerprint=store.fingerprint
        )
        pairs = _Pairs.of(positives, lines)
        total = np.zeros(len(pairs.rows))
        with phase(f"score {task} {split}"):
            for directory, weight in teachers.items():
                total += weight * _scorer(directory, queries, store)(pairs.queries, pairs.rows)
        scores = total.astype(np.float32)
        _check(scores, pairs, ids, where=f"{task} {split}")
        teacher = pairs.split(scores)
        shares[task] = _share_of_positives_first(teacher)
        logger.info(
            "%s %s: %d pairs scored; the best positive is above all negatives of %.1f%% of queries",
            *(task, split, len(total), 100 * shares[task]),
        )
        write_negatives(
            output_dir,
            task,
            split,
            query_ids=ids,
            rows=[line.rows for line in lines],
            scores=[line.scores for line in lines],
            metadata={
                **{name: metadata[name] for name in ("collection_fingerprint", "source")},
                "teachers": dict(teachers),
            },
            facts={**read_facts(negatives_dir, task, split), "positive_first": shares[task]},
            dropped={id for id, line in zip(ids, lines, strict=True) if line.is_dropped},
            teacher=teacher,
        )
    return shares


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
    def of(cls, positives: Sequence[np.ndarray], lines: Sequence[QueryNegatives]) -> _Pairs:
        counts = [
            (len(known), len(line.rows)) for known, line in zip(positives, lines, strict=True)
        ]
        rows = [
            rows
            for known, line in zip(positives, lines, strict=True)
            for rows in (known, line.rows.astype(np.int64))
        ]
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


def _check(scores: np.ndarray, pairs: _Pairs, ids: Sequence[str], *, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise DataError(
            f"score {scores[bad[0]]} of query {ids[pairs.queries[bad[0]]]!r} and passage row "
            f"{pairs.rows[bad[0]]}, and {len(bad) - 1} others are not finite scores",
            where=where,
            fix="take a teacher whose training did not diverge",
        )


def _share_of_positives_first(lines: Sequence[TeacherLine]) -> float:
    """Share of the queries with negatives whose best positive scores above all of them."""
    firsts = [
        line.positives.max() > line.negatives.max()
        for line in lines
        if len(line.positives) and len(line.negatives)
    ]
    return float(np.mean(firsts)) if firsts else 0.0
