"""`taser pipeline moma`: episodes that train an end retriever and its lookup by turns."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.assembly.attention import (
    Distilled,
    distil,
    document_attention,
    gold_documents,
    write_joined_store,
)
from taser_jax.assembly.augmentation import Augmentation, read_lookup
from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.model_directory import load_model, selected_checkpoint
from taser_jax.commands.augment import augment
from taser_jax.commands.evaluate import write_table
from taser_jax.commands.inputs import check_collection
from taser_jax.commands.memory import memory_add
from taser_jax.commands.train import train
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.memories import Mixture
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.hosts import writes
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.fusion import FidAttention
from taser_jax.settings import flatten
from taser_jax.workflows.episodes import Episodes, number_episodes
from taser_jax.workflows.retrieval_stages import DEVELOPMENT, RetrievalStages
from taser_jax.workflows.setting import BM25, Setting
from taser_jax.workflows.stages import Stages
from taser_jax.workflows.taser import CONFIGURABLES as TASER_CONFIGURABLES
from taser_jax.workflows.taser import begin_pipeline, check_depth, print_table

WARM_UP = "warm-up"


@dataclasses.dataclass(frozen=True)
class MomaConfig:
    """Memories, and how much of them an episode uses.

    Attributes:
        memories: name -> token store; in training and, with targets swapped in for the source, in
            tests.
        source: the memory that queries, positives and the end retriever's negatives are of.
        documents: K, fused with each query.
        learned_positives: N, most attended documents that become the lookup's positives.
        lookup_depth: documents looked up, whose rest the lookup's negatives are of; 200 in ANCE
            (unstated in the paper).
        lookup_negatives: drawn from these for each query (unstated in the paper).
        attention: how attention becomes one number.
        targets: name -> token store of a collection that is searched without training on it, with
            its test queries; it stands in for the source as a memory.
    """

    memories: Mapping[str, str]
    source: str = "source"
    documents: int = 10
    learned_positives: int = 5
    lookup_depth: int = 200
    lookup_negatives: int = 30
    attention: FidAttention = FidAttention.SUM
    targets: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
class _Model:
    """A trained component: where it is, and what it depends on."""

    label: str
    directory: pathlib.Path
    inputs: Mapping[str, Any]
    parameters: int = 0


@writes("{setting.output_dir}")
def pipeline_moma(
    *,
    setting: Setting,
    model: ModelConfig,
    moma: MomaConfig,
    episodes: Sequence[Episodes] = (),
    lookup_training: TrainingConfig | None = None,
    name: str = "MoMA",
    config_text: str = "",
) -> ResultsTable:
    """Warms up on BM25's negatives, then trains end retriever and lookup in each episode.

    Episode t looks documents up with f_a,t−1, trains f_t on the negatives of f_t−1, scores the
    documents by f_t's attention, and trains f_a,t on them. Killed anywhere and run again, it
    resumes at the interrupted stage.

    Args:
        setting: what all stages share; its training is the warm-up's, its second mining that of
            the end retriever.
        model: the end retriever, which fuses documents; without documents, also the lookup, which
            has its own weights.
        moma: the memories.
        episodes: the end retriever's trainings.
        lookup_training: an episode's training of the lookup; None is the episode's own. The paper
            samples one of several positives in each step: `PositiveChoice.SAMPLE`.
        name: of the rows.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: the directory was begun with other settings, or the model fuses no documents.
        StorageError: the directory cannot be written.

    Source: MoMA, section 3.3. Unstated there and our choice: an episode looks up before it mines,
        so that mining sees the newest lookup; episode 1 mines without documents; (f_t, f_a,t) is
        evaluated; every training has a fresh optimiser.
    """
    check_depth(setting)
    if not model.fuses:
        raise model.no_fusion()
    begin_pipeline(pathlib.Path(setting.output_dir), config_text)
    store = TokenStore.open(setting.token_store)
    check_collection(store, PassageStore.open(setting.data_dir, store.metadata.collection))
    setting.check_tasks(store.tasks)
    run = _MomaRun(setting, model, moma, name, store)
    rows: list[str] = []
    end = lookup = run.warm_up(rows)
    documents = run.look_up(lookup)
    for episode in number_episodes(episodes):
        end = run.train_end(episode.label, episode.training, end, documents)
        joined = run.distil(episode.label, end, documents)
        training = episode.training
        if lookup_training is not None:
            batching = dataclasses.replace(lookup_training.batching, seed=training.batching.seed)
            training = dataclasses.replace(lookup_training, seed=training.seed, batching=batching)
        lookup = run.train_lookup(episode.label, training, lookup, joined)
        documents = run.look_up(lookup)
        run.retrieve(end, rows, f"{name} ({episode.label})", documents)
    run.search_targets(end, lookup)
    return print_table(setting, rows, by_task=setting.evaluation.measures[0])


@dataclasses.dataclass(frozen=True)
class _Documents:
    """What a lookup found: its mixture, and the documents of each query."""

    memory_dir: pathlib.Path
    directory: pathlib.Path
    inputs: Mapping[str, Any]


class _MomaRun:
    """The stages of one run; methods append the rows they evaluate."""

    def __init__(
        self,
        setting: Setting,
        model: ModelConfig,
        moma: MomaConfig,
        name: str,
        store: TokenStore,
    ) -> None:
        self._setting, self._model, self._moma, self._name = setting, model, moma, name
        self._store = store
        self._root = pathlib.Path(setting.output_dir)
        self._stages = Stages(self._root)
        self._retrieval = RetrievalStages(self._stages, setting, store.metadata.collection)
        memories = {one: TokenStore.open(path) for one, path in moma.memories.items()}
        self._data = {
            "token_store": store.metadata.fingerprint,
            "tasks": list(setting.tasks or []),
            **{f"memory {n}": s.metadata.passages_fingerprint for n, s in memories.items()},
            **flatten(model=model),
        }

    def warm_up(self, rows: list[str]) -> _Model:
        """A training on BM25's negatives, without documents; both components start from it."""
        setting, bm25_root = self._setting, self._root / "bm25"
        inputs = {key: self._data[key] for key in ("token_store", "tasks")}
        inputs = self._retrieval.bm25(bm25_root, inputs, splits=("train", "test"))
        self._retrieval.mine("bm25", bm25_root, setting.first_mining, inputs)
        rows.append(self._retrieval.evaluate(BM25, bm25_root / "runs", inputs, parameters=None))
        inputs = {**self._data, **flatten(training=setting.training, mining=setting.first_mining)}
        trained = self._train(
            WARM_UP,
            setting.training,
            inputs,
            negatives_dirs=[str(bm25_root / "negatives")],
            token_store=setting.token_store,
        )
        self.retrieve(trained, rows, f"{self._name} ({WARM_UP}, no memory)", None)
        return trained

    def look_up(self, lookup: _Model) -> _Documents:
        """Encodes the mixture with the lookup's passage tower, and finds documents for all queries.

        Lookups with the same passage tower share the embeddings.
        """
        moma, root = self._moma, self._root / lookup.label
        memory_dir = self._root / "memories" / self._tower(lookup)
        inputs = {**lookup.inputs, "depth": moma.lookup_depth}
        directory = root / "documents"

        def stage() -> dict[str, Any]:
            counts = self._add(lookup, memory_dir, moma.memories)
            depth = min(moma.lookup_depth, len(Mixture.open(memory_dir)))
            augment(
                memory_dir=str(memory_dir),
                token_store=self._setting.token_store,
                model_dir=str(lookup.directory),
                output_dir=str(directory),
                tasks=self._setting.tasks,
                k=depth,
                config=self._setting.encode,
            )
            return {"encoded": counts}

        self._stages.run(f"{lookup.label}-look-up", stage, inputs=inputs)
        return _Documents(memory_dir, directory, inputs)

    def _tower(self, lookup: _Model) -> str:
        model = load_model(lookup.directory)
        return model.passage_fingerprint[:16]

    def _add(
        self, lookup: _Model, memory_dir: pathlib.Path, memories: Mapping[str, str]
    ) -> dict[str, int]:
        return {
            name: memory_add(
                name=name,
                token_store=path,
                model_dir=str(lookup.directory),
                memory_dir=str(memory_dir),
                config=self._setting.encode,
            )["encoded"]
            for name, path in memories.items()
        }

    def train_end(
        self, label: str, training: TrainingConfig, before: _Model, documents: _Documents
    ) -> _Model:
        """f_t, from f_t−1's checkpoint and negatives, with documents (equations 7 and 8)."""
        inputs = {**documents.inputs, **flatten(training=training), "before": before.label}
        return self._train(
            label,
            training,
            inputs,
            before=before,
            negatives_dirs=[str(before.directory.parent / "negatives")],
            token_store=self._setting.token_store,
            **self._options(documents),
        )

    def _options(self, documents: _Documents) -> dict[str, Any]:
        return {
            "augmentation_dir": str(documents.directory),
            "documents": self._moma.documents,
        }

    def distil(self, label: str, end: _Model, documents: _Documents) -> pathlib.Path:
        """The lookup's training data: gold and most attended documents (equations 10 to 12)."""
        moma, directory = self._moma, self._root / label / "joined"

        def stage() -> dict[str, Any]:
            mixture, model = Mixture.open(documents.memory_dir), load_model(end.directory)
            augmentation = Augmentation.open(
                documents.directory,
                per_query=moma.documents,
                config=model.model.config,
                store=self._store,
            )
            found: dict[tuple[str, str], Any] = {}
            shares = []
            for entry in self._store.metadata.queries:
                if entry.split not in ("train", DEVELOPMENT) or (
                    self._setting.tasks and entry.task not in self._setting.tasks
                ):
                    continue
                queries = self._store.queries(entry.task, entry.split)
                gold = gold_documents(mixture, moma.source, queries.positives)
                key = entry.task, entry.split
                if entry.split == DEVELOPMENT:
                    found[key] = queries, Distilled(gold, [np.zeros(0, int)] * len(gold))
                    continue
                lookup, _ = read_lookup(documents.directory, entry.task, entry.split)
                attention = document_attention(
                    model,
                    augmentation.of_queries(queries),
                    task=entry.task,
                    kind=moma.attention,
                    config=self._setting.encode,
                )
                shares.append(attention_shares(mixture, lookup.rows, attention, gold))
                found[key] = (
                    queries,
                    distil(
                        gold,
                        lookup,
                        attention[:, 1:],
                        learned=moma.learned_positives,
                        negatives=moma.lookup_negatives,
                    ),
                )
            write_joined_store(directory, mixture, self._store, found)
            return {"attention": shares}

        inputs = {**end.inputs, "learned": moma.learned_positives, "kind": moma.attention.value}
        self._stages.run(f"{label}-distil", stage, inputs=inputs)
        return directory

    def train_lookup(
        self, label: str, training: TrainingConfig, before: _Model, joined: pathlib.Path
    ) -> _Model:
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
        self, end: _Model, rows: list[str], row: str, documents: _Documents | None
    ) -> None:
        """Searches the source, evaluates, and mines negatives of the training queries."""
        root = end.directory.parent
        inputs = dict(end.inputs if documents is None else {**documents.inputs, **end.inputs})
        inputs = self._retrieval.retrieve(
            end.label,
            root,
            inputs,
            splits=("train", "test"),
            documents={} if documents is None else self._options(documents),
        )
        self._retrieval.mine(end.label, root, self._setting.second_mining, inputs)
        rows.append(self._retrieval.evaluate(row, root / "runs", inputs, parameters=end.parameters))

    def search_targets(self, end: _Model, lookup: _Model) -> None:
        """Each target alone, with and without documents; it stands in for the source as a memory.

        No weight changes, and no target's qrels are read before its runs are there.
        """
        for name, path in self._moma.targets.items():
            root = self._root / "targets" / name
            store = TokenStore.open(path)
            setting = dataclasses.replace(
                self._setting,
                output_dir=str(root),
                token_store=path,
                tasks=None,
                own_passage_tasks=(),
            )
            stages = Stages(root)
            retrieval = RetrievalStages(stages, setting, store.metadata.collection)
            memory_dir = root / "memories"
            memories = {**self._moma.memories, name: path}
            del memories[self._moma.source]
            found = _Documents(memory_dir, root / "documents", {})

            def look_up(
                memory_dir: pathlib.Path = memory_dir,
                memories: Mapping[str, str] = memories,
                found: _Documents = found,
                path: str = path,
            ) -> None:
                self._add(lookup, memory_dir, memories)
                augment(
                    memory_dir=str(memory_dir),
                    token_store=path,
                    model_dir=str(lookup.directory),
                    output_dir=str(found.directory),
                    splits=["test"],
                    k=self._moma.documents,
                    config=self._setting.encode,
                )

            inputs = {**end.inputs, "lookup": dict(lookup.inputs), "target": path}
            stages.run("look-up", look_up, inputs=inputs)
            rows = []
            for row, options in (
                (f"{self._name}, no documents", {}),
                (self._name, self._options(found)),
            ):
                label = "fused" if options else "alone"
                searched = retrieval.retrieve(
                    label,
                    root / label,
                    inputs,
                    splits=("test",),
                    model_dir=end.directory,
                    documents={**options, "query_splits": ["test"]},
                )
                rows.append(
                    retrieval.evaluate(
                        row, root / label / "runs", searched, parameters=end.parameters
                    )
                )
            write_table(
                root,
                systems=rows,
                by_task=setting.evaluation.measures[0],
                significance=setting.significance,
            )

    def _train(
        self,
        label: str,
        training: TrainingConfig,
        inputs: Mapping[str, Any],
        *,
        before: _Model | None = None,
        **options: Any,
    ) -> _Model:
        directory = self._root / label / "model"

        def stage() -> dict[str, Any]:
            initial = None if before is None else str(selected_checkpoint(before.directory))
            summary = train(
                model_dir=str(directory),
                model=self._model,
                training=training
                if before is None
                else dataclasses.replace(training, pretrained=None),
                tasks=self._setting.tasks,
                initial_checkpoint=initial,
                **options,
            )
            assert summary is not None
            return {"parameters": summary.parameters, "validation": dict(summary.validation)}

        outputs = self._stages.run(f"{label}-train", stage, inputs=inputs)
        return _Model(label, directory, inputs, outputs["parameters"])


def attention_shares(
    mixture: Mixture,
    rows: np.ndarray,
    attention: np.ndarray,
    gold: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Figure 2's numbers: by memory, its share of attention and of documents; gold found.

    Args:
        mixture: the memories.
        rows: documents of each query, of which the first K are attended to. [queries, depth]
        attention: to the query's own tokens, then to the documents. [queries, 1 + K]
        gold: relevant documents of each query.

    Returns:
        "attention" and "documents", each by memory and summing to 1 (the query's own segment is
        left out), and "queries_with_gold", the share of queries with a relevant document.
    """
    found, weights = rows[:, : attention.shape[1] - 1], attention[:, 1:]
    present = found >= 0
    memory, _ = mixture.places(found[present])
    names = mixture.names

    def shares(values: np.ndarray) -> dict[str, float]:
        totals = np.bincount(memory, weights=values, minlength=len(names))
        return dict(zip(names, (totals / max(totals.sum(), 1e-30)).tolist(), strict=True))

    has_gold = [bool(np.isin(line, own).any()) for line, own in zip(found, gold, strict=True)]
    return {
        "attention": shares(weights[present]),
        "documents": shares(np.ones(int(present.sum()))),
        "queries_with_gold": float(np.mean(has_gold)),
    }


CONFIGURABLES = (*TASER_CONFIGURABLES, Episodes, MomaConfig)
