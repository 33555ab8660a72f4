"""The stages of `taser pipeline moma`; a finished one is recorded and not run again."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.model_directory import load_model, selected_checkpoint
from taser_jax.commands.pipelines.retrieval_stages import (
    BM25,
    DEVELOPMENT,
    RetrievalStages,
    Setting,
)
from taser_jax.commands.pipelines.stages import passes_on
from taser_jax.commands.train import TrainSummary, train
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.moma import distillation
from taser_jax.systems.moma.augment import augment
from taser_jax.systems.moma.embeddings import encode_missing
from taser_jax.systems.moma.memories import Mixture
from taser_jax.systems.moma.memory import add_memory
from taser_jax.systems.moma.options import (
    LOOKUP_DEPTH,
    LOOKUP_NEGATIVES,
    SOURCE,
    Documents,
    GoldDocuments,
    LookupTraining,
    MomaConfig,
    Trained,
)
from taser_jax.systems.moma.query_documents import read_lookup

WARM_UP = "warm-up"
UNTRAINED = "untrained"


class MomaStages:
    """The stages of one run; methods append the rows they evaluate.

    Args:
        setting: what all stages share.
        model: the end retriever; without documents, also the lookup.
        moma: the memories.
        name: MoMA's name in the table's rows.
    """

    def __init__(self, setting: Setting, model: ModelConfig, moma: MomaConfig, name: str) -> None:
        self.setting, self.moma, self._model, self._name = setting, moma, model, name
        self.root = pathlib.Path(setting.output_dir)
        self._retrieval = RetrievalStages(setting)
        self._stages = self._retrieval.stages
        self._embeddings = pathlib.Path(moma.shared_embeddings or self.root / "embeddings-by-text")

    def row(self, kind: LookupTraining) -> str:
        """The name of a row, without its episode."""
        return {
            LookupTraining.LEARNED: self._name,
            LookupTraining.FIXED: f"{self._name} without learning",
            LookupTraining.NONE: "No memory",
        }[kind]

    def warm_up(self, rows: list[str]) -> Trained:
        """A training on BM25's negatives, without documents; both components start from it."""
        setting, bm25_root = self.setting, self.root / "bm25"
        self._retrieval.bm25(bm25_root, splits=("train", "test"))
        self._retrieval.mine("bm25", bm25_root, setting.first_mining)
        rows.append(self._retrieval.evaluate(BM25, bm25_root / "runs", parameters=None))
        untrained = self.untrained()
        if untrained is not None:
            self.retrieve(untrained, rows, UNTRAINED.capitalize(), None, mined=False)
        trained = self._train(
            WARM_UP,
            setting.training,
            tower_of=untrained,
            negatives_dirs=[bm25_root / "negatives"],
            token_store=setting.token_store,
        )
        self.retrieve(trained, rows, f"{self._name} ({WARM_UP}, no memory)", None)
        return trained

    def untrained(self) -> Trained | None:
        """The pretrained model before any training; None where training starts from random weights.

        Raises:
            ConfigError: the passages' tower is frozen, and nothing has trained it.
        """
        if self.setting.training.pretrained is None:
            if self.moma.frozen_passages:
                title = "passages are frozen, and nothing has trained their tower"
                fix = "set PRETRAINED, or frozen_passages=False"
                raise ConfigError(title, where="MomaConfig.frozen_passages", fix=fix)
            return None
        directory = self.root / UNTRAINED
        parameters = self._retrieval.untrained(UNTRAINED, directory, self._model)
        return Trained(UNTRAINED, directory / "model", parameters)

    def look_up(self, lookup: Trained) -> Documents:
        """Encodes the mixture with the lookup's passage tower, and finds documents for all queries.

        Lookups with the same passage tower share the embeddings.
        """
        moma = self.moma
        memory_dir = self.root / "memories" / self.shared_embeddings(lookup).name
        directory = self.root / lookup.label / "documents"
        self._stages.run(
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

    def train_end(
        self, label: str, training: TrainingConfig, before: Trained, documents: Documents | None
    ) -> Trained:
        """f_t, from f_t−1's checkpoint and negatives, with documents (equations 7 and 8)."""
        return self._train(
            label,
            training,
            before=before,
            negatives_dirs=[before.directory.parent / "negatives"],
            token_store=self.setting.token_store,
            **self.options(documents),
        )

    def options(self, documents: Documents | None) -> dict[str, Any]:
        """Arguments of `train` and `encode` that name the queries' documents."""
        if documents is None:
            return {}
        return {"augmentation_dir": documents.directory, "documents": self.moma.documents}

    def distil(self, label: str, end: Trained, documents: Documents) -> pathlib.Path:
        """The lookup's training data: gold and most attended documents (equations 10 to 12)."""
        moma, directory = self.moma, self.root / label / "joined"
        self._stages.run(
            f"{label}-distil",
            _distil,
            **self.attended(end, documents, self.setting.training),
            token_store=self.setting.token_store,
            output_dir=directory,
            tasks=self.setting.tasks or list(self._retrieval.store.tasks),
            learned=moma.learned_positives,
        )
        return directory

    def attended(
        self, end: Trained, documents: Documents, training: TrainingConfig
    ) -> dict[str, object]:
        """Arguments of `attention_by_task` that name the retriever and its queries' documents.

        Args:
            end: the retriever.
            documents: its documents of the queries.
            training: where states of frozen blocks of the queries' token store are.
        """
        return {
            "states_dir": training.states_dir if training.train_from_block else None,
            "states_dtype": training.states_dtype,
            "model_dir": end.directory,
            "memory_dir": documents.memory_dir,
            "augmentation_dir": documents.directory,
            "documents": self.moma.documents,
            "config": self.setting.encode,
        }

    def train_lookup(
        self, label: str, training: TrainingConfig, before: Trained, joined: pathlib.Path
    ) -> Trained:
        """f_a,t, from f_a,t−1, on the joined store."""
        if training.states_dir is not None:
            # Joined stores have the same texts in every episode, and not those of the source.
            own_states = str(pathlib.Path(training.states_dir) / "joined")
            training = dataclasses.replace(training, states_dir=own_states)
        return self._train(f"{label}-lookup", training, before=before, token_store=str(joined))

    def retrieve(
        self,
        end: Trained,
        rows: list[str],
        row: str,
        documents: Documents | None,
        *,
        mined: bool = True,
    ) -> None:
        """Searches the source, evaluates, and mines negatives of the training queries."""
        root = end.directory.parent
        self._retrieval.retrieve(
            end.label,
            root,
            splits=("train", "test") if mined else ("test",),
            documents={**self.options(documents), "shared_embeddings": self.shared_embeddings(end)},
        )
        if mined:
            self._retrieval.mine(end.label, root, self.setting.second_mining)
        rows.append(self._retrieval.evaluate(row, root / "runs", parameters=end.parameters))

    def _train(
        self,
        label: str,
        training: TrainingConfig,
        *,
        token_store: str,
        before: Trained | None = None,
        tower_of: Trained | None = None,
        **options: Any,
    ) -> Trained:
        directory, tower = self.root / label / "model", None
        if before is not None:
            options["initial_checkpoint"] = selected_checkpoint(before.directory)
            training = dataclasses.replace(training, pretrained=None)
        if self.moma.frozen_passages:
            tower = before or tower_of
            assert tower is not None
            options["shared_embeddings"] = self.shared_embeddings(tower)
        trained = self._stages.run(
            f"{label}-train",
            _train,
            tower_dir=None if tower is None else tower.directory,
            config=self.setting.encode,
            model_dir=directory,
            model=self._model,
            training=training,
            tasks=self.setting.tasks,
            token_store=token_store,
            **options,
        )
        return Trained(label, directory, trained["parameters"])


@writes("{output_dir}", "{memory_dir}")
@passes_on(augment, add_memory)
def look_up(
    *,
    memories: Mapping[str, str],
    memory_dir: str,
    model_dir: str,
    output_dir: str,
    shared_embeddings: str,
    k: int,
    config: EncodeConfig,
    **options: Any,
) -> dict[str, object]:
    """Adds memories to a mixture and looks queries up; returns what was encoded of each memory.

    Args:
        memories: name -> token store.
        memory_dir: the mixture.
        model_dir: the lookup.
        output_dir: of the queries' documents.
        shared_embeddings: embeddings by the lookup's passage tower.
        k: documents per query, of mixtures that have as many.
        config: batches and shards of encoding.
        options: further arguments of `augment`.
    """
    encoded = {
        name: add_memory(
            name=name,
            token_store=path,
            model_dir=model_dir,
            memory_dir=memory_dir,
            shared_embeddings=shared_embeddings,
            config=config,
        )["encoded"]
        for name, path in memories.items()
    }
    augment(
        memory_dir=memory_dir,
        model_dir=model_dir,
        output_dir=output_dir,
        k=min(k, len(Mixture.open(memory_dir))),
        config=config,
        **options,
    )
    return {"encoded": encoded}


@writes("{output_dir}")
def _distil(
    *,
    output_dir: str,
    token_store: str,
    memory_dir: str,
    augmentation_dir: str,
    tasks: Sequence[str],
    learned: int,
    negatives: int = LOOKUP_NEGATIVES,
    **options: Any,
) -> dict[str, Any]:
    mixture, store = Mixture.open(memory_dir), TokenStore.open(token_store)
    joined: dict[tuple[str, str], Any] = {}
    for entry in store.metadata.queries:
        if entry.split == DEVELOPMENT and entry.task in tasks:
            queries = store.queries(entry.task, entry.split)
            gold = mixture.gold(SOURCE, queries.positives)
            distilled = distillation.Distilled(gold, [np.zeros(0, int)] * len(gold))
            joined[entry.task, entry.split] = queries, distilled
    attended = distillation.attention_by_task(
        memory_dir=memory_dir,
        augmentation_dir=augmentation_dir,
        token_store=token_store,
        source=SOURCE,
        tasks=tasks,
        split="train",
        **options,
    )
    for task, of_task in attended.items():
        lookup = read_lookup(augmentation_dir, task, "train").run
        distilled = distillation.distil(
            of_task.gold, lookup, of_task.attention[:, 1:], learned=learned, negatives=negatives
        )
        joined[task, "train"] = of_task.queries, distilled
    distillation.write_joined_store(pathlib.Path(output_dir), mixture, store, joined)
    return {"attention": [of_task.shares for of_task in attended.values()]}


@writes("{model_dir}")
@passes_on(train)
def _train(
    *,
    tower_dir: str | None,
    config: EncodeConfig,
    model_dir: str,
    token_store: str,
    shared_embeddings: str | None = None,
    **options: Any,
) -> TrainSummary | None:
    """Trains, with passages that a frozen tower has encoded where there is one."""
    if tower_dir is not None and shared_embeddings is not None:
        tower, store = load_model(tower_dir), TokenStore.open(token_store)
        encode_missing(shared_embeddings, tower, store, config=config)
    return train(
        model_dir=model_dir, token_store=token_store, shared_embeddings=shared_embeddings, **options
    )
