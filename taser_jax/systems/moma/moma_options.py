"""The options of `taser pipeline moma`, and what its stages hand on."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.models.fusion import FidAttention
from taser_jax.storage.errors import ConfigError


class LookupTraining(enum.Enum):
    """How the lookup is trained; MoMA, and what its paper compares it with.

    LEARNED: in each episode, on what the end retriever attends to (MoMA).
    FIXED: never; it stays the warmed-up model ("without learning").
    NONE: there is none: the end retriever is trained and tested without documents (T5-ANCE).
    """

    LEARNED = "learned"
    FIXED = "fixed"
    NONE = "none"

    @property
    def prefix(self) -> str:
        """Prefix of its stages and folders; MoMA's own have none."""
        return "" if self is LookupTraining.LEARNED else f"{self.value}-"


class GoldDocuments(enum.Enum):
    """Whether a training query's own positives may be among its documents D^a.

    KEPT: where the lookup finds them (MoMA: 46% of queries at first, 62% at last).
    REMOVED: never; the end retriever cannot learn to copy them.
    """

    KEPT = "kept"
    REMOVED = "removed"


class EvaluatedLookup(enum.Enum):
    """The lookup whose documents an episode's end retriever is tested and mines with.

    NEWEST: f_a,t, which was trained on what f_t attends to.
    BEFORE: f_a,t−1, whose documents f_t was trained with.
    """

    NEWEST = "newest"
    BEFORE = "before"


@dataclasses.dataclass(frozen=True)
class MomaConfig:
    """Memories, how much of them an episode uses, and what MoMA is compared with.

    Attributes:
        memories: name -> token store; in training and, with targets swapped in for the source, in
            tests.
        source: the memory that holds the queries' positives and the end retriever's negatives.
        documents: K, the documents fused with each query.
        learned_positives: N, the most attended documents, which become the lookup's positives.
        lookup_depth: documents looked up; the lookup's negatives are drawn from those that are no
            positives. 200 in ANCE (unstated in the paper).
        lookup_negatives: negatives drawn per query (unstated in the paper).
        attention: how attention becomes one number.
        targets: name -> token store of a collection that is searched without training on it, with
            its test queries; it stands in for the source as a memory.
        compared: the ways to train the lookup, all from one warm-up.
        gold: whether a training query's positives may be among its documents.
        evaluated: the lookup that an episode is tested with (unstated in the paper).
        frozen_passages: whether no training changes the passage tower, so that passages are encoded
            once by the pretrained weights, and trainings read their embeddings.
        shared_embeddings: where passages' embeddings are kept by text, for several runs to share;
            None is the run's own folder.
    """

    memories: Mapping[str, str]
    source: str = "source"
    documents: int = 10
    learned_positives: int = 5
    lookup_depth: int = 200
    lookup_negatives: int = 30
    attention: FidAttention = FidAttention.SUM
    targets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compared: Sequence[LookupTraining] = (LookupTraining.LEARNED,)
    gold: GoldDocuments = GoldDocuments.KEPT
    evaluated: EvaluatedLookup = EvaluatedLookup.NEWEST
    frozen_passages: bool = False
    shared_embeddings: str | None = None

    def __post_init__(self) -> None:
        if self.source not in self.memories:
            raise ConfigError(
                f"memories {', '.join(self.memories) or 'none'}",
                where="MomaConfig.memories",
                expected=f"the source {self.source!r} among them",
            )
        if not 0 <= self.learned_positives <= self.documents <= self.lookup_depth:
            raise ConfigError(
                f"{self.learned_positives} learned positives, {self.documents} documents, "
                f"{self.lookup_depth} looked up",
                where="MomaConfig",
                expected="learned_positives <= documents <= lookup_depth",
            )
        if self.memories[self.source] in self.targets.values():
            raise ConfigError(
                "a target is the source",
                where="MomaConfig.targets",
                expected="collections that training does not see",
            )


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained component and its folder."""

    label: str
    directory: pathlib.Path
    parameters: int = 0


@dataclasses.dataclass(frozen=True)
class Documents:
    """What a lookup found: its mixture, and the documents of each query."""

    memory_dir: pathlib.Path
    directory: pathlib.Path
