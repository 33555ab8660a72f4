"""The stages of `taser pipeline moma`, and its options; a finished stage is not run again."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from taser_jax.assembly.model_directory import check_vocabulary, load_model, selected_checkpoint
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages, Setting
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.artifacts import require_equal
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma.augment import look_up
from taser_jax.systems.moma.distillation import distil_queries
from taser_jax.systems.moma.memories import SOURCE

# Documents looked up for a query: 200 as in ANCE; the paper states no number.
LOOKUP_DEPTH = 200
WARM_UP = "warm-up"
UNTRAINED = "untrained"


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
            problem = f"the memories are {', '.join(self.memories) or 'none'}"
            fix = f"name the token store of the queries' positives {SOURCE!r}"
            raise ConfigError(problem, where="MomaConfig.memories", fix=fix)
        if not 0 <= self.learned_positives <= self.documents <= LOOKUP_DEPTH:
            problem = f"{self.learned_positives} learned positives of {self.documents} documents"
            fix = f"set learned_positives <= documents <= {LOOKUP_DEPTH}"
            raise ConfigError(problem, where="MomaConfig", fix=fix)
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


class MomaStages(RetrievalStages):
    """The stages of one run.

    Args:
        setting: what all stages share.
        model: the end retriever; without documents, also the lookup.
        moma: the memories.
        name: MoMA's name in the table's rows.

    Raises:
        FingerprintError: the memory "source" is another collection than the token store's, or a
            memory has another vocabulary.
    """

    def __init__(self, setting: Setting, model: ModelConfig, moma: MomaConfig, name: str) -> None:
        super().__init__(setting)
        memories = {name: TokenStore.open(path) for name, path in moma.memories.items()}
        for memory in memories.values():
            self.check_vocabulary(memory)
        source = memories[SOURCE].metadata
        require_equal(
            f"memory {SOURCE!r}, {moma.memories[SOURCE]}",
            {"collection": source.collection_fingerprint},
            {"collection": self.store.metadata.collection_fingerprint},
            f"give {SOURCE!r} in MEMORIES the tokens of TOKEN_STORE's collection",
        )
        self.moma, self._model, self._name = moma, model, name
        self._embeddings = pathlib.Path(moma.shared_embeddings or self.root / "embeddings-by-text")

    def check_vocabulary(self, tokens: TokenStore) -> None:
        """Refuses another vocabulary than the source's, which all models have."""
        check_vocabulary(self.store.vocabulary_directory, tokens)

    def row(self, kind: LookupTraining) -> str:
        """The name of a row, without its episode."""
        return {
            LookupTraining.LEARNED: self._name,
            LookupTraining.FIXED: f"{self._name} without learning",
            LookupTraining.NONE: "No memory",
        }[kind]

    def warm_up(self) -> Trained:
        """A training on BM25's negatives, without documents; both components start from it."""
        self.bm25(("train", "test"))
        untrained = self.untrained()
        if untrained is not None:
            self.add_row(UNTRAINED.capitalize(), untrained, None, mined=False)
        negatives = self.root / "bm25" / "negatives"
        trained = self.component(
            WARM_UP, self.setting.training, untrained, negatives_dirs=[negatives]
        )
        self.add_row(f"{self._name} ({WARM_UP}, no memory)", trained, None)
        return trained

    def untrained(self) -> Trained | None:
        """The pretrained model before any training; None where training starts from random weights.

        Raises:
            ConfigError: the passages' tower is frozen, and nothing has trained it.
        """
        if self.setting.training.pretrained is None:
            if self.moma.frozen_passages:
                problem = "passages are frozen, and nothing has trained their tower"
                fix = "set PRETRAINED, or frozen_passages=False"
                raise ConfigError(problem, where="MomaConfig.frozen_passages", fix=fix)
            return None
        parameters = self.import_model(UNTRAINED, self._model)
        return Trained(UNTRAINED, self.root / UNTRAINED / "model", parameters)

    def look_up(self, lookup: Trained) -> Documents:
        """Encodes the mixture with the lookup's passage tower, and finds documents for all queries.

        Lookups with the same passage tower share the embeddings.
        """
        moma = self.moma
        memory_dir = self.root / "memories" / self.shared_embeddings(lookup).name
        directory = self.root / lookup.label / "documents"
        self.stages.run(
            f"{lookup.label}-look-up",
            look_up,
            **self.mixture(lookup, moma.memories),
            memory_dir=memory_dir,
            token_store=self.setting.token_store,
            output_dir=directory,
            tasks=self.setting.tasks,
            k=LOOKUP_DEPTH,
            without_gold_of=SOURCE if moma.gold is GoldDocuments.REMOVED else None,
        )
        return Documents(memory_dir, directory)

    def shared_embeddings(self, model: Trained) -> pathlib.Path:
        """The folder of embeddings by the model's passage tower."""
        return self._embeddings / load_model(model.directory).passage_fingerprint[:16]

    def mixture(self, lookup: Trained, memories: Mapping[str, str]) -> dict[str, object]:
        """Arguments of `look_up` that name what it looks up in."""
        return {
            "memories": {name: epath.Path(path) for name, path in memories.items()},
            "model_dir": lookup.directory,
            "shared_embeddings": self.shared_embeddings(lookup),
            "config": self.setting.encode,
        }

    def options(self, documents: Documents | None) -> dict[str, Any]:
        """Fields of `TrainingData` and arguments of `encode` that name the queries' documents."""
        if documents is None:
            return {}
        return {"augmentation_dir": str(documents.directory), "documents": self.moma.documents}

    def read_with(self, end: Trained, documents: Documents | None) -> dict[str, object]:
        """Arguments of `encode`: an end retriever's documents and its passages' embeddings."""
        return {**self.options(documents), "shared_embeddings": self.shared_embeddings(end)}

    def distil(self, label: str, end: Trained, documents: Documents) -> pathlib.Path:
        """The lookup's training data: gold and most attended documents (equations 10 to 12)."""
        setting, directory = self.setting, self.root / label / "joined"
        training = setting.training
        self.stages.run(
            f"{label}-distil",
            distil_queries,
            output_dir=directory,
            token_store=setting.token_store,
            model_dir=end.directory,
            memory_dir=documents.memory_dir,
            augmentation_dir=documents.directory,
            documents=self.moma.documents,
            tasks=setting.tasks or list(self.store.tasks),
            learned=self.moma.learned_positives,
            config=setting.encode,
            states_dir=training.states_dir if training.train_from_block else None,
            states_dtype=training.states_dtype,
        )
        return directory

    def add_row(
        self, row: str, end: Trained, documents: Documents | None, *, mined: bool = True
    ) -> None:
        """Searches the source, evaluates, and mines negatives of the training queries."""
        self.retrieve(
            end.label,
            splits=("train", "test") if mined else ("test",),
            documents=self.read_with(end, documents),
        )
        if mined:
            self.mine(end.label, self.setting.second_mining)
        self.evaluate(row, end.label, parameters=end.parameters)

    def component(
        self, label: str, training: TrainingConfig, before: Trained | None, **inputs: Any
    ) -> Trained:
        """Trains from a trained model's checkpoint, or from the pretrained weights without one.

        Where passages are frozen, look-ups and retrieval have encoded them by then.
        """
        checkpoint = None
        if before is not None and before.label != UNTRAINED:
            checkpoint = selected_checkpoint(before.directory)
            training = dataclasses.replace(training, pretrained=None)
        if self.moma.frozen_passages:
            assert before is not None
            inputs["shared_embeddings"] = str(self.shared_embeddings(before))
        summary = self.train(label, self._model, training, initial_checkpoint=checkpoint, **inputs)
        return Trained(label, self.root / label / "model", summary.parameters)


def with_own_states(training: TrainingConfig, name: str) -> TrainingConfig:
    """A training on other texts, whose states of frozen blocks have a folder of their own."""
    if training.states_dir is None:
        return training
    return dataclasses.replace(training, states_dir=str(pathlib.Path(training.states_dir) / name))
