"""Options for reading KILT's files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from taser_jax.data.prepare.kilt_gold import Gold
from taser_jax.data.prepare.questions import PrepareOptions
from taser_jax.data.readers.kilt import Outputs
from taser_jax.storage.errors import ConfigError, check_fields

VALIDATION = "validation"
# Default shares of the splits of a file that holds several.
SHARES = {"train": 0.8, VALIDATION: 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True)
class KiltOptions:
    """Options for reading KILT's files.

    Attributes:
        strictness: treatment of empty passages, missing positives and queries without any.
        outputs: whether each query must have outputs.
        gold: which passages a provenance makes gold.
        page_gold_tasks: tasks whose gold is always the whole page (AIDA).
        max_tokens: words per passage when pages of a knowledge source are cut.
        entity_tasks: tasks whose inputs mark a mention with [START_ENT] and [END_ENT].
        left_words: words kept before the mention.
        dialogue_turns: task -> number of last turns that are kept.
        shares: shares of the splits if one file has several.
        task_shares: task -> shares of its splits, instead of `shares`.
        validation_last: number of queries at the end of a file with several splits that are its
            validation split, instead of a share (TACO-DR: the last 500 of each training file); 0
            uses the shares.
        split_groups: task -> pattern; queries whose ids have the same match share a split.
        train_samples: task -> number of training queries that are kept, chosen by hash; with
            `validation_last`, the number kept of the whole file, before its last queries are split
            off (TACO-DR: zsRE's 99,500 are 100,000 less 500).
    """

    strictness: PrepareOptions = PrepareOptions()
    outputs: Outputs = Outputs.REQUIRED
    gold: Gold = Gold.FINEST
    page_gold_tasks: tuple[str, ...] = ()
    max_tokens: int = 100
    entity_tasks: tuple[str, ...] = ()
    left_words: int = 64
    dialogue_turns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shares: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(SHARES))
    task_shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    split_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    train_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    validation_last: int = 0

    def __post_init__(self) -> None:
        last = "0 or more queries"
        check_fields(self, "validation_last", is_valid=lambda n: n >= 0, expected=last)
        check_fields(self, "max_tokens", is_valid=lambda n: n >= 1, expected="1 or more")
        check_fields(self, "left_words", is_valid=lambda n: n >= 0, expected="0 or more")
        check_fields(
            self,
            "dialogue_turns",
            is_valid=lambda turns: all(n >= 1 for n in turns.values()),
            expected="1 or more turns of each task: the last one is the query",
        )
        if self.validation_last and self.split_groups:
            raise ConfigError(
                f"validation_last and split_groups of {', '.join(self.split_groups)}",
                where="KiltOptions",
                expected="one or the other: the last queries may be part of a group",
                fix="set validation_last = 0, or split_groups = {}",
            )

    def tasks(self) -> set[str]:
        """All tasks that the options name."""
        named = (self.page_gold_tasks, self.entity_tasks, self.dialogue_turns)
        return set().union(*named, self.task_shares, self.split_groups, self.train_samples)
