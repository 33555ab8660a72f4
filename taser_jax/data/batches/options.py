"""How batches are drawn."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from taser_jax.storage.errors import check_fields


class FalseNegatives(enum.Enum):
    """Treatment of a passage of the batch that is also a positive of another query.

    MASK: it is left out of that query's loss, and so is a copy of the query's own positive.
    KEEP: it counts as that query's negative, as in DPR and TASER; so does one of the query's own
        positives if it is among the query's hard negatives and never trained on (TASER's P2
        excludes only the gold passage).
    """

    MASK = "mask"
    KEEP = "keep"


class PositiveChoice(enum.Enum):
    """Which of several positives a step trains on: a random one, or the first (gold)."""

    SAMPLE = "sample"
    FIRST = "first"


@dataclasses.dataclass(frozen=True)
class BatchingConfig:
    """How batches are drawn.

    Attributes:
        batch_size: queries in a global batch.
        num_negatives: hard negatives per query.
        false_negatives: MASK, or KEEP as in the papers.
        positives: SAMPLE, or FIRST as in the papers.
        queue_steps: number of preceding steps whose passages are negatives too, without gradients,
            unless they are positives of the query; 0 keeps no queue.
        seed: 0 or more.
        rates: task -> times its queries are seen per epoch; 1 by default.
    """

    batch_size: int
    num_negatives: int = 1
    false_negatives: FalseNegatives = FalseNegatives.MASK
    positives: PositiveChoice = PositiveChoice.SAMPLE
    queue_steps: int = 0
    seed: int = 0
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "batch_size", is_valid=lambda n: n >= 1, expected="1 or more")
        counts = ("num_negatives", "queue_steps", "seed")
        check_fields(self, *counts, is_valid=lambda n: n >= 0, expected="0 or more")
