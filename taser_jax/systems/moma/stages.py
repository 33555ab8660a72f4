"""The stages of `taser pipeline moma`; a finished one is recorded and not run again."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.model_directory import load_model, selected_checkpoint
from taser_jax.commands.pipelines.retrieval_stages import DEVELOPMENT, RetrievalStages
from taser_jax.commands.pipelines.setting import BM25, Setting
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.train import train
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.settings import flatten
from taser_jax.systems.moma.attention import (
    Distilled,
    distil,
    document_attention,
    gold_documents,
    write_joined_store,
)
from taser_jax.systems.moma.augment import augment
from taser_jax.systems.moma.augmentation import Augmentation, read_lookup
from taser_jax.systems.moma.memories import Mixture
from taser_jax.systems.moma.memory import memory_add
from taser_jax.systems.moma.memory_shares import attention_shares
from taser_jax.systems.moma.moma_options import (
    Documents,
    GoldDocuments,
    LookupTraining,
    MomaConfig,
    Trained,
)
from taser_jax.systems.moma.shared_embeddings import add_missing

WARM_UP = "warm-up"
UNTRAINED = "untrained"


class MomaStages:
    """The stages of one run; methods append the rows they evaluate.

    Args:
        setting: what all stages share.
        model: the end retriever; without documents, also the lookup.
        moma: the memories.
        name: MoMA's name in the table's rows.
        store: tokens of the source.
    """

    def __init__(
        self,
        setting: Setting,
        model: ModelConfig,
        moma: MomaConfig,
        name: str,
        store: TokenStore,
    ) -> None:
        self.setting, self.moma, self._model, self._name = setting, moma, model, name
        self._store = store
        self.root = pathlib.Path(setting.output_dir)
        self._stages = Stages(self.root)
        self._retrieval = RetrievalStages(self._stages, setting, store.metadata.collection)
        self._embeddings = pathlib.Path(moma.shared_embeddings or self.root / "embeddings-by-text")
        memories = {one: TokenStore.open(path) for one, path in moma.memories.items()}
        self._data = {
            "token_store": store.metadata.fingerprint,
            "tasks": list(setting.tasks or []),
            **{f"memory {n}": s.metadata.passages_fingerprint for n, s in memories.items()},
            **flatten(model=model),
        }

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
        inputs = {key: self._data[key] for key in ("token_store", "tasks")}
        inputs = self._retrieval.bm25(bm25_root, inputs, splits=("train", "test"))
        self._retrieval.mine("bm25", bm25_root, setting.first_mining, inputs)
        rows.append(self._retrieval.evaluate(BM25, bm25_root / "runs", inputs, parameters=None))
        untrained = self.untrained()
        if untrained is not None:
            self.retrieve(untrained, rows, UNTRAINED.capitalize(), None, mined=False)
        inputs = {**self._data, **flatten(training=setting.training, mining=setting.first_mining)}
        trained = self._train(
            WARM_UP,
            setting.training,
            inputs,
            tower_of=untrained,
            negatives_dirs=[str(bm25_root / "negatives")],
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
                raise ConfigError(
                    "frozen_passages without pretrained weights",
                    where="MomaConfig",
                    expected="passages that a pretrained tower encodes",
                    fix="set PRETRAINED, or frozen_passages=False",
                )
            return None
        directory = self.root / UNTRAINED
        parameters, inputs = self._retrieval.untrained(
            UNTRAINED, directory, self._model, {"token_store": self._data["token_store"]}
        )
        return Trained(UNTRAINED, directory / "model", inputs, parameters)

    def look_up(self, lookup: Trained) -> Documents:
        """Encodes the mixture with the lookup's passage tower, and finds documents for all queries.

        Lookups with the same passage tower share the embeddings.
        """
        moma, root = self.moma, self.root / lookup.label
        memory_dir = self.root / "memories" / self.shared_embeddings(lookup).name
        inputs = {**lookup.inputs, "depth": moma.lookup_depth, "gold": moma.gold.value}
        directory = root / "documents"

        def stage() -> dict[str, Any]:
            counts = self.add_memories(lookup, memory_dir, moma.memories)
            depth = min(moma.lookup_depth, len(Mixture.open(memory_dir)))
            augment(
                memory_dir=str(memory_dir),
                token_store=self.setting.token_store,
                model_dir=str(lookup.directory),
                output_dir=str(directory),
                tasks=self.setting.tasks,
                k=depth,
                without_gold_of=moma.source if moma.gold is GoldDocuments.REMOVED else None,
                config=self.setting.encode,
            )
            return {"encoded": counts}

        self._stages.run(f"{lookup.label}-look-up", stage, inputs=inputs)
        return Documents(memory_dir, directory, inputs)

    def shared_embeddings(self, model: Trained) -> pathlib.Path:
        """The folder of embeddings by the model's passage tower."""
        return self._embeddings / load_model(model.directory).passage_fingerprint[:16]

    def add_memories(
        self, lookup: Trained, memory_dir: pathlib.Path, memories: Mapping[str, str]
    ) -> dict[str, int]:
        """Adds memories to a mixture; returns how many documents of each were encoded."""
        return {
            name: memory_add(
                name=name,
                token_store=path,
                model_dir=str(lookup.directory),
                memory_dir=str(memory_dir),
                shared_embeddings=str(self.shared_embeddings(lookup)),
                config=self.setting.encode,
            )["encoded"]
            for name, path in memories.items()
        }

    def train_end(
        self,
        label: str,
        training: TrainingConfig,
        before: Trained,
        documents: Documents | None,
    ) -> Trained:
        """f_t, from f_t−1's checkpoint and negatives, with documents (equations 7 and 8)."""
        found = self._data if documents is None else documents.inputs
        inputs = {**found, **flatten(training=training), "before": before.label}
        return self._train(
            label,
            training,
            inputs,
            before=before,
            negatives_dirs=[str(before.directory.parent / "negatives")],
            token_store=self.setting.token_store,
            **self.options(documents),
        )

    def options(self, documents: Documents | None) -> dict[str, Any]:
        """Arguments of `train` and `encode` that name the queries' documents."""
        if documents is None:
            return {}
        return {
            "augmentation_dir": str(documents.directory),
            "documents": self.moma.documents,
        }

    def distil(self, label: str, end: Trained, documents: Documents) -> pathlib.Path:
        """The lookup's training data: gold and most attended documents (equations 10 to 12)."""
        moma, directory = self.moma, self.root / label / "joined"

        def stage() -> dict[str, Any]:
            mixture, store = Mixture.open(documents.memory_dir), self._store
            found: dict[tuple[str, str], Any] = {}
            tasks = self.setting.tasks or list(store.tasks)
            for entry in store.metadata.queries:
                if entry.split == DEVELOPMENT and entry.task in tasks:
                    queries = store.queries(entry.task, entry.split)
                    gold = gold_documents(mixture, moma.source, queries.positives)
                    learned = Distilled(gold, [np.zeros(0, int)] * len(gold))
                    found[entry.task, entry.split] = queries, learned
            scored = self.shares(
                end, documents, store, split="train", source=moma.source, tasks=tasks
            )
            for task, (_, queries, gold, attention) in scored.items():
                lookup, _ = read_lookup(documents.directory, task, "train")
                learned = distil(
                    gold,
                    lookup,
                    attention[:, 1:],
                    learned=moma.learned_positives,
                    negatives=moma.lookup_negatives,
                )
                found[task, "train"] = queries, learned
            write_joined_store(directory, mixture, store, found)
            return {"attention": [line for line, *_ in scored.values()]}

        inputs = {**end.inputs, "learned": moma.learned_positives, "kind": moma.attention.value}
        self._stages.run(f"{label}-distil", stage, inputs=inputs)
        return directory

    def shares(
        self,
        end: Trained,
        documents: Documents,
        store: TokenStore,
        *,
        tasks: Sequence[str],
        split: str,
        source: str,
    ) -> dict[str, tuple[dict[str, Any], TokenizedQueries, list[np.ndarray], np.ndarray]]:
        """What the end retriever attends to, for each task of a split.

        Args:
            end: the end retriever.
            documents: of the queries.
            store: has the queries.
            tasks: theirs.
            split: theirs.
            source: the memory that their positives are of.

        Returns:
            Task -> shares by memory, the queries, their relevant documents, and the attention to
            each query's own tokens and its documents.
        """
        mixture, model = Mixture.open(documents.memory_dir), load_model(end.directory)
        augmentation = Augmentation.open(
            documents.directory,
            per_query=self.moma.documents,
            config=model.model.config,
            store=store,
        )
        found = {}
        for entry in store.metadata.queries:
            if entry.split != split or entry.task not in tasks:
                continue
            queries = store.queries(entry.task, split)
            gold = gold_documents(mixture, source, queries.positives)
            lookup, _ = read_lookup(documents.directory, entry.task, split)
            attention = document_attention(
                model,
                augmentation.of_queries(queries),
                task=entry.task,
                kind=self.moma.attention,
                config=self.setting.encode,
            )
            line = attention_shares(mixture, lookup.rows, attention, gold=gold, source=source)
            found[entry.task] = {"task": entry.task, **line}, queries, gold, attention
        return found

    def train_lookup(
        self, label: str, training: TrainingConfig, before: Trained, joined: pathlib.Path
    ) -> Trained:
        """f_a,t, from f_a,t−1, on the joined store."""
        inputs = {
            **self._data,
            **flatten(training=training),
            "joined": TokenStore.open(joined).metadata.fingerprint,
            "before": before.label,
        }
        return self._train(
            f"{label}-lookup", training, inputs, before=before, token_store=str(joined)
        )

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
        inputs = dict(end.inputs if documents is None else {**documents.inputs, **end.inputs})
        inputs = self._retrieval.retrieve(
            end.label,
            root,
            inputs,
            splits=("train", "test") if mined else ("test",),
            documents={
                **self.options(documents),
                "shared_embeddings": str(self.shared_embeddings(end)),
            },
        )
        if mined:
            self._retrieval.mine(end.label, root, self.setting.second_mining, inputs)
        rows.append(self._retrieval.evaluate(row, root / "runs", inputs, parameters=end.parameters))

    def _train(
        self,
        label: str,
        training: TrainingConfig,
        inputs: Mapping[str, Any],
        *,
        token_store: str,
        before: Trained | None = None,
        tower_of: Trained | None = None,
        **options: Any,
    ) -> Trained:
        directory = self.root / label / "model"

        def stage() -> dict[str, Any]:
            initial = None if before is None else str(selected_checkpoint(before.directory))
            shared = None
            if self.moma.frozen_passages:
                tower = before or tower_of
                assert tower is not None
                shared = str(self.shared_embeddings(tower))
                model, store = load_model(tower.directory), TokenStore.open(token_store)
                add_missing(shared, model, store, config=self.setting.encode)
            summary = train(
                model_dir=str(directory),
                model=self._model,
                training=training
                if before is None
                else dataclasses.replace(training, pretrained=None),
                tasks=self.setting.tasks,
                initial_checkpoint=initial,
                token_store=token_store,
                shared_embeddings=shared,
                **options,
            )
            assert summary is not None
            return {"parameters": summary.parameters, "validation": dict(summary.validation)}

        outputs = self._stages.run(f"{label}-train", stage, inputs=inputs)
        return Trained(label, directory, inputs, outputs["parameters"])
