"""Hard negatives from a run: what was ranked high for a training query and is not its positive.

Two recipes (TASER, arXiv 2210.05156, section 4.1; DPR, arXiv 2004.04906, section 3.2):

    P1  BM25's top passages that contain no answer: a BM25 run, `AnswerContaining.DROP`.
    P2  the first model's top 100 without the gold passage: its run, depth and count 100,
        `AnswerContaining.KEEP` and `Excluded.GOLD` (appendix B). TASER does not say that
        answer-containing passages are removed; keeping them keeps false negatives, so both are
        options here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from taser_jax.errors import ConfigError, DataError
from taser_jax.progress import bar
from taser_jax.retrieval.runs import NO_ROW, SearchResult, top_k

# Keeps these draws apart from every other use of the same seed.
_PURPOSE = 0x4D494E45
_BLOCK = 256

ContainsAnswer = Callable[
    [Int[np.ndarray, " queries"], Int[np.ndarray, "queries depth"]],
    Bool[np.ndarray, "queries depth"],
]

PagesOf = Callable[[Sequence[int]], Sequence[str]]


class Choice(enum.Enum):
    """Which of a query's candidates are taken: the best ranked, or a sample without replacement."""

    TOP = "top"
    SAMPLE = "sample"


class AnswerContaining(enum.Enum):
    """Whether a candidate that contains an answer of its query may be a negative."""

    KEEP = "keep"
    DROP = "drop"


class Excluded(enum.Enum):
    """Which known passages are never negatives.

    POSITIVES: all positives of the query.
    GOLD: its first positive only.
    PAGES: its positives and all else on their pages.
    """

    POSITIVES = "positives"
    GOLD = "gold"
    PAGES = "pages"


@dataclasses.dataclass(frozen=True)
class MiningConfig:
    """What to take as hard negatives.

    Attributes:
        depth: ranks looked at, counted before anything is left out.
        count: negatives to keep a query, at most.
        choice: by rank or sampled.
        answer_containing: keep or drop candidates with an answer; a query without answers loses
            only its positives.
        excluded: what of the known passages is never taken.
        same_page_tasks: tasks for which it is `Excluded.PAGES` instead: where a page is the answer
            (entity linking), no passage of it is wrong.
        seed: of the sampling.
    """

    depth: int = 100
    count: int = 30
    choice: Choice = Choice.TOP
    answer_containing: AnswerContaining = AnswerContaining.KEEP
    excluded: Excluded = Excluded.POSITIVES
    same_page_tasks: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("depth", "count"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}",
                    where="MiningConfig",
                    expected="1 or more",
                )


@dataclasses.dataclass(frozen=True)
class MiningStatistics:
    """What mining found and left out, over all queries.

    Attributes:
        queries: queries mined for.
        negatives: negatives kept.
        positives_excluded: candidates left out as known positives.
        answers_dropped: candidates left out because they contain an answer.
        queries_below_count: queries with fewer negatives than asked for.
        queries_without: queries with none at all.
    """

    queries: int = 0
    negatives: int = 0
    positives_excluded: int = 0
    answers_dropped: int = 0
    queries_below_count: int = 0
    queries_without: int = 0

    def __str__(self) -> str:
        mean = self.negatives / self.queries if self.queries else 0.0
        return (
            f"{self.negatives:,} negatives for {self.queries:,} queries ({mean:.1f} each); "
            f"left out {self.positives_excluded:,} positives and {self.answers_dropped:,} passages "
            f"with an answer; {self.queries_below_count:,} queries got fewer than asked for, "
            f"{self.queries_without:,} none"
        )


@dataclasses.dataclass(frozen=True)
class MinedNegatives:
    """Hard negatives of each query, best ranked first.

    Attributes:
        rows: one list of rows a query, in the order of the queries.
        scores: their scores in the run.
        statistics: what was found and left out.
    """

    rows: list[list[int]]
    scores: list[list[float]]
    statistics: MiningStatistics


@runtime_checkable
class Positives(Protocol):
    """A list of rows for each query: `Ragged`, or a plain list of lists."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sequence[int] | Int[np.ndarray, " positives"]: ...


def mine_negatives(
    result: SearchResult,
    positives: Positives,
    *,
    config: MiningConfig,
    contains_answer: ContainsAnswer | None = None,
    pages_of: PagesOf | None = None,
) -> MinedNegatives:
    """Takes hard negatives from search results.

    Example:
        Results ranked 8, 3, 5 with positive 3: count 1 gives [8]; if 8 contains an answer and such
        passages are dropped, [5].

    Args:
        result: top k of each training query; ranked here again, so the order does not matter.
        positives: rows of each query's positives, gold first, parallel to the results.
        config: what to take.
        contains_answer: (indices of queries, their ranked rows) -> True where the passage contains
            an answer of its query; called for blocks of queries, with -1 where there is no result.
        pages_of: rows -> the pages they are of, for `Excluded.PAGES`.

    Returns:
        Rows, scores and statistics; the same for the same results, config and query order.

    Raises:
        ConfigError: results less deep than `config.depth`, answers to drop without
            `contains_answer`, or pages to leave out without `pages_of`.
        DataError: not one list of positives a query.
    """
    _check(result, positives, config, contains_answer, pages_of)
    drop = config.answer_containing is AnswerContaining.DROP
    rows: list[list[int]] = []
    scores: list[list[float]] = []
    positives_excluded = answers_dropped = 0
    queries = np.arange(len(result.rows))
    with bar("mine negatives", total=len(queries), unit="query") as progress:
        for start in range(0, len(queries), _BLOCK):
            block = queries[start : start + _BLOCK]
            ranked = top_k(result.rows[block], result.scores[block], config.depth)
            if drop and contains_answer is not None:
                answered = contains_answer(block, ranked.rows)
            else:
                answered = np.zeros(ranked.rows.shape, bool)
            for offset, query in enumerate(block.tolist()):
                found = ranked.rows[offset] != NO_ROW
                known = found & np.isin(ranked.rows[offset], _excluded(positives[query], config))
                if config.excluded is Excluded.PAGES and pages_of is not None:
                    known |= found & _on_pages_of(positives[query], ranked.rows[offset], pages_of)
                dropped = found & ~known & answered[offset]
                kept = _choose(np.flatnonzero(found & ~known & ~dropped), config, query)
                rows.append(ranked.rows[offset, kept].tolist())
                scores.append(ranked.scores[offset, kept].tolist())
                positives_excluded += int(known.sum())
                answers_dropped += int(dropped.sum())
            progress.update(len(block))
    lengths = np.array([len(line) for line in rows], int)
    statistics = MiningStatistics(
        queries=len(rows),
        negatives=int(lengths.sum()),
        positives_excluded=positives_excluded,
        answers_dropped=answers_dropped,
        queries_below_count=int((lengths < config.count).sum()),
        queries_without=int((lengths == 0).sum()),
    )
    return MinedNegatives(rows, scores, statistics)


def _excluded(
    positives: Sequence[int] | Int[np.ndarray, " positives"], config: MiningConfig
) -> Int[np.ndarray, " excluded"]:
    known = np.asarray(positives, np.int64)
    return known[:1] if config.excluded is Excluded.GOLD else known


def _on_pages_of(
    positives: Sequence[int] | Int[np.ndarray, " positives"],
    rows: Int[np.ndarray, " depth"],
    pages_of: PagesOf,
) -> Bool[np.ndarray, " depth"]:
    """Which rows are on a page of a positive; where there is no result, no."""
    pages = set(pages_of([int(row) for row in positives]))
    if "" in pages:
        raise ConfigError(
            "passages of the positives' pages are to be left out, and a positive has no page",
            where="MiningConfig.excluded",
            fix="prepare the collection with page ids (`taser prepare kilt`)",
        )
    found = np.flatnonzero(rows != NO_ROW)
    on_page = np.zeros(rows.shape, bool)
    on_page[found] = [page in pages for page in pages_of(rows[found].tolist())]
    return on_page


def _choose(
    candidates: Int[np.ndarray, " candidates"], config: MiningConfig, query: int
) -> Int[np.ndarray, " kept"]:
    """Ranks to keep, in rank order; a sample depends on nothing but the seed and the query."""
    if config.choice is Choice.TOP or len(candidates) <= config.count:
        return candidates[: config.count]
    rng = np.random.default_rng([config.seed, _PURPOSE, query])
    return np.sort(rng.choice(candidates, config.count, replace=False))


def _check(
    result: SearchResult,
    positives: Positives,
    config: MiningConfig,
    contains_answer: ContainsAnswer | None,
    pages_of: PagesOf | None,
) -> None:
    if config.excluded is Excluded.PAGES and pages_of is None:
        raise ConfigError(
            "passages of the positives' pages are to be left out, but nothing tells pages",
            where="MiningConfig.excluded",
            fix="give pages_of",
        )
    if config.depth > result.rows.shape[1]:
        raise ConfigError(
            f"results are {result.rows.shape[1]} deep, mining looks {config.depth} deep",
            where="MiningConfig.depth",
            fix=f"search with k = {config.depth}, or lower MiningConfig.depth",
        )
    if len(positives) != len(result.rows):
        raise DataError(
            f"positives of {len(positives)} queries, results of {len(result.rows)}",
            where="mining",
            expected="the same queries in the same order",
        )
    if config.answer_containing is AnswerContaining.DROP and contains_answer is None:
        raise ConfigError(
            "answer-containing passages are to be dropped, but there are no answers to look for",
            where="MiningConfig.answer_containing",
            fix="use AnswerContaining.KEEP, or a query set that has answers",
        )
