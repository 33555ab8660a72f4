"""Options of hard-negative mining, and counts of passages taken and left out, by reason."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

from taser_jax.storage.errors import ConfigError, check_fields


class Choice(enum.Enum):
    """Which of a query's candidates are taken: the best ranked, or a sample without replacement."""

    TOP = "top"
    SAMPLE = "sample"


class AnswerContaining(enum.Enum):
    """Whether a candidate that contains an answer of its query may be a negative."""

    KEEP = "keep"
    DROP = "drop"


class EqualText(enum.Enum):
    """Whether a candidate with the text of a positive (case and white space aside) may be one."""

    KEEP = "keep"
    DROP = "drop"


class WithoutNegatives(enum.Enum):
    """What training does with a query that mining leaves without a negative.

    RANDOM: it draws random passages of the collection for the query, anew in each step.
    DROP: it leaves the query out.
    """

    RANDOM = "random"
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


class Reason(enum.Enum):
    """Why a candidate was left out: the first that applies, in this order."""

    POSITIVE = "positive"
    PAGE = "page of a positive"
    RANK = "rank"
    SCORE = "score"
    ABSOLUTE_MARGIN = "absolute margin"
    RELATIVE_MARGIN = "relative margin"
    TEXT = "text of a positive"
    ANSWER = "answer"


@dataclasses.dataclass(frozen=True)
class MiningConfig:
    """Which passages to take as hard negatives.

    Attributes:
        depth: ranks considered, counted before anything is excluded.
        count: maximum negatives per query.
        min_rank: the first rank that may be a negative, counted from 1 like `depth`.
        max_score: highest score of a negative; None sets no limit.
        absolute_margin: a negative scores at least this much below the positive; None: no margin.
        relative_margin: the same, as a share of the positive's score.
        choice: whether negatives are taken by rank or sampled.
        answer_containing: keep or drop candidates with an answer; a query without answers loses
            only its positives.
        equal_text: keep or drop candidates with the text of a positive.
        excluded: known passages that are never taken.
        same_page_tasks: tasks that use `Excluded.PAGES` instead: if a page is the answer (entity
            linking), none of its passages is wrong.
        without_negatives: treatment of queries without any negative left.
        seed: seed of the sampling.
    """

    depth: int = 100
    count: int = 30
    min_rank: int = 1
    max_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    choice: Choice = Choice.TOP
    answer_containing: AnswerContaining = AnswerContaining.KEEP
    equal_text: EqualText = EqualText.KEEP
    excluded: Excluded = Excluded.POSITIVES
    same_page_tasks: tuple[str, ...] = ()
    without_negatives: WithoutNegatives = WithoutNegatives.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        ranks = ("depth", "count", "min_rank")
        check_fields(self, *ranks, is_valid=lambda n: n >= 1, expected="1 or more")
        if self.min_rank > self.depth:
            raise ConfigError(
                f"min_rank = {self.min_rank} and depth = {self.depth}",
                where="MiningConfig",
                expected="a min_rank within the depth",
                fix="look deeper, or start at a better rank",
            )
        check_fields(
            self,
            *("absolute_margin", "relative_margin"),
            is_valid=lambda x: x is None or (math.isfinite(x) and x >= 0),
            expected="0 or more: a negative scores at least this much below the positive",
            fix="NV-Retriever's 95% of the positive's score is relative_margin = 0.05",
        )


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
