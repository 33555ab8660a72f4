"""The options of `taser pipeline moma`, and what its stages hand on."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.storage.errors import ConfigError

# The memory that holds the queries' positives and the end retriever's negatives.
SOURCE = "source"
# Documents looked up for a query, and those of them that are drawn as the lookup's negatives: 200
# as in ANCE; the paper states neither.
LOOKUP_DEPTH, LOOKUP_NEGATIVES = 200, 30


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


@dataclasses.dataclass(frozen=True)
class MomaConfig:
    """Memories, how much of them an episode uses, and what MoMA is compared with.

    Attributes:
        memories: name -> token store; in training and, with targets swapped in for the source, in
            tests. The one named "source" has the queries' positives.
        documents: K, the documents fused with each query; fewer where memory is short.
        learned_positives: N, the most attended documents, which become the lookup's positives; at
            most K.
        gold: whether a training query's positives may be among its documents.
        targets: name -> token store of a collection that is searched without training on it, with
            its test queries; it stands in for the source as a memory.
        compared: the ways to train the lookup, all from one warm-up.
        frozen_passages: whether no training changes the passage tower, so that passages are encoded
            once by the pretrained weights, and trainings read their embeddings.
        shared_embeddings: where passages' embeddings are kept by text, for several runs to share;
            None is the run's own folder.
    """

    memories: Mapping[str, str]
    documents: int = 10
    learned_positives: int = 5
    gold: GoldDocuments = GoldDocuments.KEPT
    targets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compared: Sequence[LookupTraining] = (LookupTraining.LEARNED,)
    frozen_passages: bool = False
    shared_embeddings: str | None = None

    def __post_init__(self) -> None:
        if SOURCE not in self.memories:
            title = f"the memories are {', '.join(self.memories) or 'none'}"
            fix = f"name the token store of the queries' positives {SOURCE!r}"
            raise ConfigError(title, where="MomaConfig.memories", fix=fix)
        if not 0 <= self.learned_positives <= self.documents <= LOOKUP_DEPTH:
            title = f"{self.learned_positives} learned positives of {self.documents} documents"
            fix = f"set learned_positives <= documents <= {LOOKUP_DEPTH}"
            raise ConfigError(title, where="MomaConfig", fix=fix)
        if self.memories[SOURCE] in self.targets.values():
            fix = "name collections that training does not see"
            raise ConfigError("a target is the source", where="MomaConfig.targets", fix=fix)


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
