"""Stages after a training or a BM25 run in every pipeline: retrieve, mine, evaluate."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from taser_jax.assembly.model_directory import read_facts
from taser_jax.commands.bm25 import bm25
from taser_jax.commands.encode import encode
from taser_jax.commands.evaluate import evaluate
from taser_jax.commands.import_model import import_model
from taser_jax.commands.index import index
from taser_jax.commands.mine import mine
from taser_jax.commands.pipelines.setting import Setting, System
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.search import search
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining_options import MiningConfig
from taser_jax.retrieval.query_embeddings import encoded_splits
from taser_jax.storage.artifacts import file_name
from taser_jax.storage.errors import ConfigError

DEVELOPMENT = "validation"


class RetrievalStages:
    """Stages of one pipeline directory, in terms of the commands they run.

    Args:
        stages: where finished stages are recorded.
        setting: what all stages share.
        store: the token store.

    Attributes:
        common: arguments of all commands that read the collection.
    """

    def __init__(self, stages: Stages, setting: Setting, store: TokenStore) -> None:
        self._stages, self._setting, self._store = stages, setting, store
        self.common: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": store.metadata.collection,
            "tasks": setting.tasks,
        }
        self._searched: dict[str, Any] = {
            **self.common,
            "k": setting.k,
            "own_passage_tasks": list(setting.own_passage_tasks),
        }

    def bm25(self, root: pathlib.Path, *, splits: Sequence[str]) -> None:
        """BM25 runs of all splits below `root`."""
        self._stages.run(
            "bm25-search",
            _bm25_runs,
            output_dir=root / "runs",
            index_dir=root / "index",
            splits=splits,
            config=self._setting.bm25,
            **self._searched,
        )

    def untrained(self, label: str, root: pathlib.Path, model: ModelConfig) -> int:
        """Imports the pretrained weights as `root`'s model; returns its number of parameters."""
        pretrained, tokens = self._setting.training.pretrained, self._store.metadata
        assert pretrained is not None
        return self._stages.run(
            f"{label}-import",
            import_model,
            model_dir=root / "model",
            model=model,
            pretrained=pretrained,
            vocabulary=str(self._store.vocabulary_directory),
            feature_lengths={"query": tokens.query_length, "passage": tokens.passage_length},
        )

    def retrieve(
        self,
        label: str,
        root: pathlib.Path,
        *,
        splits: Sequence[str],
        encoded: Sequence[str] | None = None,
        model_dir: pathlib.Path | None = None,
        documents: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """Encodes collection and queries with `root`'s model, indexes and searches the splits.

        Args:
            label: prefix of the stages' names.
            root: where embeddings, indexes and runs go.
            splits: splits to search.
            encoded: splits whose queries are encoded; None means all.
            model_dir: the model; None is `root`'s.
            documents: arguments of `encode` for queries with documents.
        """
        setting, training = self._setting, self._setting.training
        own, embeddings_dir = model_dir or root / "model", root / "embeddings"
        # The blocks that training freezes are an untrained model's, too.
        frozen = read_facts(own).get("train_from_block", training.train_from_block)
        encoding = {
            "model_dir": own,
            "token_store": setting.token_store,
            "output_dir": embeddings_dir,
            **documents,
            "config": setting.encode,
            # Cached states are of the queries alone.
            "states_dir": training.states_dir
            if frozen and "augmentation_dir" not in documents
            else None,
            "frozen_blocks": frozen,
            "states_dtype": training.states_dtype,
            "tasks": setting.tasks,
        }
        self._stages.run(f"{label}-encode", encode, **{"query_splits": encoded, **encoding})
        # Recall is sampled from the tasks in the token store's order.
        tasks = [
            task for task in self._store.tasks if setting.tasks is None or task in setting.tasks
        ]
        self._stages.run(
            f"{label}-index",
            _index_both,
            embeddings_dir=embeddings_dir,
            exact_dir=root / "exact",
            index_dir=root / "index",
            config=setting.index,
            sample_split=DEVELOPMENT,
            tasks=tasks,
        )
        # One stage per split: what is added later searches the last model's training queries, too.
        for split in splits:
            self._stages.run(
                f"{label}-search-{split}",
                _encode_and_search,
                encoding=encoding,
                embeddings_dir=embeddings_dir,
                # Mining searches exactly; what is reported goes through the chosen index.
                index_dir=root / ("exact" if split == "train" else "index"),
                output_dir=root / "runs",
                split=split,
                tag=label,
                **self._searched,
            )

    def mine(
        self,
        label: str,
        root: pathlib.Path,
        config: MiningConfig,
        *,
        tasks: Sequence[str] | None = None,
    ) -> None:
        """Mines from `root`'s runs of the training queries."""
        evaluation = self._setting.evaluation
        self._stages.run(
            f"{label}-mine",
            mine,
            runs_dir=root / "runs",
            output_dir=root / "negatives",
            config=config,
            match=evaluation.match,
            regex_tasks=evaluation.regex_tasks,
            **self.common | ({} if tasks is None else {"tasks": tasks}),
        )

    def evaluate(
        self,
        row: str,
        runs_dir: pathlib.Path,
        *,
        parameters: int | None,
        details: Mapping[str, str] | None = None,
    ) -> str:
        """Evaluates the test runs as a row of the directory's table; returns the row's name."""
        self._stages.run(
            f"{file_name(row)}-evaluate",
            evaluate,
            runs_dir=runs_dir,
            output_dir=self._setting.output_dir,
            system=row,
            config=self._setting.evaluation,
            parameters=parameters,
            details=details,
            # Rows are tested once all are there.
            significance=None,
            **self.common,
        )
        return row


@writes("{output_dir}", "{index_dir}")
def _bm25_runs(*, output_dir: str, index_dir: str, splits: Sequence[str], **searched: Any) -> None:
    for split in splits:
        bm25(output_dir=output_dir, index_dir=index_dir, split=split, **searched)


@writes("{exact_dir}", "{index_dir}")
def _index_both(*, exact_dir: str, index_dir: str, config: IndexConfig, **sampled: Any) -> None:
    for directory, chosen in ((exact_dir, IndexConfig()), (index_dir, config)):
        index(index_dir=directory, config=chosen, **sampled)


@writes("{embeddings_dir}", "{output_dir}")
def _encode_and_search(
    *,
    encoding: Mapping[str, Any],
    embeddings_dir: str,
    output_dir: str,
    split: str,
    **searched: Any,
) -> None:
    # A round or an episode that is added later searches queries that were not encoded.
    if split not in {encoded for _, encoded in encoded_splits(embeddings_dir)}:
        encode(**{**encoding, "query_splits": [split]})
    search(embeddings_dir=embeddings_dir, output_dir=output_dir, split=split, **searched)


def check_untrained(
    setting: Setting, untrained: Mapping[str, System], trained: Mapping[str, System], *, where: str
) -> None:
    """Refuses untrained models without pretrained weights, on several hosts, or of a taken name."""
    if untrained and setting.training.pretrained is None:
        raise ConfigError(
            f"{', '.join(untrained)}: untrained, and no pretrained weights",
            where=where,
            expected="pretrained weights that the model is evaluated with",
            fix="set PRETRAINED, or leave the untrained systems out",
        )
    if untrained and jax.process_count() > 1:
        raise ConfigError(
            f"untrained systems on {jax.process_count()} hosts",
            where=where,
            expected="one host: weights are imported by one",
            fix="leave them out, and evaluate the imported model by itself",
        )
    shared = {file_name(name) for name in untrained} & {file_name(name) for name in trained}
    if shared:
        raise ConfigError(
            f"the name {', '.join(sorted(shared))} is a trained and an untrained system's",
            where=where,
            fix="give each row its own name",
        )
