"""Hard negatives from a run: passages ranked high for a training query that are not its positives.

Two recipes (TASER, arXiv 2210.05156, section 4.1; DPR, arXiv 2004.04906, section 3.2):

    P1  BM25's top passages that contain no answer: a BM25 run, `AnswerContaining.DROP`.
    P2  the first model's top 100 without the gold passage: its run, depth and count 100,
        `AnswerContaining.KEEP` and `Excluded.GOLD` (appendix B). TASER does not say that
        answer-containing passages are removed; keeping them keeps false negatives, so both are
        options here. `Excluded.POSITIVES`, the default, keeps no labelled one.

Positive-aware mining (NV-Retriever, arXiv 2407.15831, section 3: TopK-PercPos) leaves out passages
that score too high to be negatives: s > s⁺ - `relative_margin` · |s⁺|, where s⁺ is the positive's
score in the same run. The paper's 95% is a margin of 0.05.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float32, Int

from taser_jax.data.token_store.arrays import Ragged
from taser_jax.retrieval.runs import NO_ROW, SearchResult, among, top_k
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import bar
from taser_jax.storage.typed_files import Checked, Positive, Seed, Share


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
    GOLD: only its first positive.
    PAGES: its positives and all other passages of their pages.
    """

    POSITIVES = "positives"
    GOLD = "gold"
    PAGES = "pages"


class Reason(enum.StrEnum):
    """Why a candidate was left out: the first that applies, in this order."""

    POSITIVE = "positive"
    PAGE = "page of a positive"
    MARGIN = "margin"
    ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class MiningConfig(Checked):
    """Which passages to take as hard negatives.

    Attributes:
        depth: ranks considered, counted before anything is excluded.
        count: maximum negatives per query.
        relative_margin: a negative scores at least this much below the positive, as a share of the
            positive's score (NV-Retriever's 95% is 0.05); None sets no limit.
        choice: whether negatives are taken by rank or sampled.
        answer_containing: keep or drop candidates with an answer; a query without answers loses
            only its positives.
        excluded: known passages that are never taken.
        same_page_tasks: tasks that use `Excluded.PAGES` instead: if a page is the answer (entity
            linking), none of its passages is wrong.
        seed: seed of the sampling.
    """

    depth: Positive = 100
    count: Positive = 30
    relative_margin: Share | None = None
    choice: Choice = Choice.TOP
    answer_containing: AnswerContaining = AnswerContaining.KEEP
    excluded: Excluded = Excluded.POSITIVES
    same_page_tasks: tuple[str, ...] = ()
    seed: Seed = 0


@dataclasses.dataclass(frozen=True)
class MiningStatistics:
    """What mining found and left out, over all queries.

    Attributes:
        queries: queries mined for.
        negatives: negatives kept.
        left_out: candidates left out, by reason; each counts once, for the first that applies.
        queries_below_count: queries with fewer negatives than asked for.
        queries_without: queries with none at all.
        unranked_positives: queries none of whose positives the run has. Under a margin they have
            no negative: everything in the run scores higher than the positive.
    """

    queries: int = 0
    negatives: int = 0
    left_out: Mapping[Reason, int] = dataclasses.field(default_factory=dict)
    queries_below_count: int = 0
    queries_without: int = 0
    unranked_positives: int = 0

    def __str__(self) -> str:
        mean = self.negatives / self.queries if self.queries else 0.0
        reasons = ", ".join(
            f"{reason.value} {count:,}" for reason, count in self.left_out.items() if count
        )
        return (
            f"{self.negatives:,} negatives for {self.queries:,} queries ({mean:.1f} each); "
            f"candidates left out by reason: {reasons or 'none'}; "
            f"{self.queries_below_count:,} queries got fewer than asked for, "
            f"{self.queries_without:,} none; the run has no positive of "
            f"{self.unranked_positives:,} queries"
        )


# Makes these draws independent of other draws with the same seed.
_PURPOSE = 0x4D494E45
_BLOCK = 256

ContainsAnswer = Callable[
    [Int[np.ndarray, " queries"], Int[np.ndarray, "queries depth"]],
    Bool[np.ndarray, "queries depth"],
]

PagesOf = Callable[[Sequence[int]], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class MinedNegatives:
    """Hard negatives of each query, best ranked first.

    Attributes:
        rows: one list of rows per query, in the order of the queries.
        scores: their scores in the run.
        positive_scores: the best score that a positive of the query has in the run; -inf where the
            run has none. [queries]
        statistics: counts of what was found and left out.
    """

    rows: list[list[int]]
    scores: list[list[float]]
    positive_scores: Float32[np.ndarray, " queries"]
    statistics: MiningStatistics


def mine_negatives(
    result: SearchResult,
    positives: Ragged | Sequence[Sequence[int]],
    *,
    config: MiningConfig,
    contains_answer: ContainsAnswer | None = None,
    pages_of: PagesOf | None = None,
) -> MinedNegatives:
    """Takes hard negatives from search results.

    Example:
        Results ranked 8, 3, 5 with scores .9, .8, .5 and positive 3: count 1 gives [8]; if 8
        contains an answer and such passages are dropped, or with a margin, [5].

    Args:
        result: top k of each training query, in any order. The positive's score is looked up at all
            k ranks, negatives are taken from the first `config.depth`.
        positives: rows of each query's positives, gold first, parallel to the results. If the run
            has several of them, the best score counts as the positive's.
        config: which negatives to take.
        contains_answer: (indices of queries, their ranked rows) -> True where the passage contains
            an answer of its query; called for blocks of queries, with -1 for rows to skip. Needed
            for `AnswerContaining.DROP`.
        pages_of: rows -> their pages; needed for `Excluded.PAGES`.

    Returns:
        Rows, scores and statistics; the same for the same results, config and query order.
    """
    rows: list[list[int]] = []
    scores: list[list[float]] = []
    positive_scores = []
    left_out = dict.fromkeys(Reason, 0)
    queries = np.arange(len(result.rows))
    with bar("mine negatives", total=len(queries), unit="query") as progress:
        for start in range(0, len(queries), _BLOCK):
            block = queries[start : start + _BLOCK]
            whole = top_k(result.rows[block], result.scores[block], result.rows.shape[1])
            of_block = [np.asarray(positives[query], np.int64) for query in block.tolist()]
            of_positives = np.where(among(whole.rows, of_block), whole.scores, np.float32(-np.inf))
            positive_scores.append(of_positives.max(axis=1, initial=-np.inf))
            depth = slice(None, config.depth)
            ranked = SearchResult(whole.rows[:, depth], whole.scores[:, depth])
            candidates = ranked.rows != NO_ROW
            for reason, applies in _reasons(
                ranked, of_block, positive_scores[-1], config, pages_of=pages_of
            ):
                left_out[reason] += int((candidates & applies).sum())
                candidates &= ~applies
            if config.answer_containing is AnswerContaining.DROP:
                assert contains_answer is not None
                # Texts are read only for the remaining candidates.
                rest = np.where(candidates, ranked.rows, NO_ROW)
                applies = candidates & contains_answer(block, rest)
                left_out[Reason.ANSWER] += int(applies.sum())
                candidates &= ~applies
            for offset, query in enumerate(block.tolist()):
                ranks = _choose(np.flatnonzero(candidates[offset]), config, query)
                rows.append(ranked.rows[offset, ranks].tolist())
                scores.append(ranked.scores[offset, ranks].tolist())
            progress.update(len(block))
    best = np.concatenate([np.zeros(0, np.float32), *positive_scores])
    lengths = np.array([len(line) for line in rows], int)
    statistics = MiningStatistics(
        queries=len(rows),
        negatives=int(lengths.sum()),
        left_out=left_out,
        queries_below_count=int((lengths < config.count).sum()),
        queries_without=int((lengths == 0).sum()),
        unranked_positives=int(np.isneginf(best).sum()),
    )
    return MinedNegatives(rows, scores, best, statistics)


# Queries have different numbers of positives: the axis has no name.
_Rows = Int[np.ndarray, "_"]


def _reasons(
    ranked: SearchResult,
    positives: Sequence[_Rows],
    positive_scores: Float32[np.ndarray, " queries"],
    config: MiningConfig,
    *,
    pages_of: PagesOf | None,
) -> Iterator[tuple[Reason, Bool[np.ndarray, "queries depth"]]]:
    """Reasons that need no texts, each with the rows that it excludes."""
    last = 1 if config.excluded is Excluded.GOLD else None
    yield Reason.POSITIVE, among(ranked.rows, [own[:last] for own in positives])
    if config.excluded is Excluded.PAGES:
        assert pages_of is not None
        pairs = zip(positives, ranked.rows, strict=True)
        yield Reason.PAGE, np.stack([_on_pages_of(own, rows, pages_of) for own, rows in pairs])
    if config.relative_margin is not None:
        # For an unranked positive, 0 · inf would be NaN.
        size = np.where(np.isneginf(positive_scores), 0, np.abs(positive_scores))
        highest = positive_scores - np.float32(config.relative_margin) * size
        yield Reason.MARGIN, ranked.scores > highest[:, None]


def _on_pages_of(
    positives: Int[np.ndarray, " positives"], rows: Int[np.ndarray, " depth"], pages_of: PagesOf
) -> Bool[np.ndarray, " depth"]:
    """True for rows on the page of a positive; False where there is no result."""
    pages = set(pages_of(positives.tolist()))
    if "" in pages:
        problem = "passages of the positives' pages are to be left out, and a positive has none"
        fix = "prepare the collection from files with page ids, such as KILT's"
        raise ConfigError(problem, where="MiningConfig.excluded", fix=fix)
    places = np.flatnonzero(rows != NO_ROW)
    on_page = np.zeros(rows.shape, bool)
    on_page[places] = [page in pages for page in pages_of(rows[places].tolist())]
    return on_page


def _choose(
    candidates: Int[np.ndarray, " candidates"], config: MiningConfig, query: int
) -> Int[np.ndarray, " kept"]:
    """Ranks to keep, in rank order; a sample depends on nothing but the seed and the query."""
    if config.choice is Choice.TOP or len(candidates) <= config.count:
        return candidates[: config.count]
    rng = np.random.default_rng([config.seed, _PURPOSE, query])
    return np.sort(rng.choice(candidates, config.count, replace=False))
