"""Stages after a training or a BM25 run in every pipeline: retrieve, mine, evaluate."""

from __future__ import annotations

import functools
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
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining_options import MiningConfig
from taser_jax.retrieval.query_embeddings import encoded_splits
from taser_jax.storage.artifacts import file_name
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.settings import flatten, to_plain

DEVELOPMENT = "validation"
Inputs = Mapping[str, object]


class RetrievalStages:
    """Stages of one pipeline directory, in terms of the commands they run.

    Args:
        stages: where finished stages are recorded.
        setting: what all stages share.
        collection: the collection.
    """

    def __init__(self, stages: Stages, setting: Setting, collection: str) -> None:
        self._stages, self._setting = stages, setting
        self._common: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": collection,
            "tasks": setting.tasks,
        }
        # Arguments of every search, and inputs of every later stage.
        self._searched: dict[str, Any] = {
            "k": setting.k,
            "own_passage_tasks": list(setting.own_passage_tasks),
        }

    def bm25(
        self, root: pathlib.Path, inputs: Inputs, *, splits: Sequence[str]
    ) -> dict[str, object]:
        """BM25 runs of all splits below `root`; returns the inputs of later stages."""
        setting = self._setting
        inputs = {**inputs, "bm25": to_plain(setting.bm25), **self._searched}

        def run_all() -> None:
            for split in splits:
                bm25(
                    output_dir=str(root / "runs"),
                    index_dir=str(root / "index"),
                    split=split,
                    config=setting.bm25,
                    **self._searched,
                    **self._common,
                )

        self._stages.run("bm25-search", run_all, inputs=inputs)
        return inputs

    def untrained(
        self, label: str, root: pathlib.Path, model: ModelConfig, inputs: Inputs
    ) -> tuple[int, dict[str, Any]]:
        """Imports the pretrained weights as `root`'s model.

        Returns:
            Its number of parameters, and the inputs of what follows.
        """
        pretrained = self._setting.training.pretrained
        assert pretrained is not None
        store = TokenStore.open(self._setting.token_store)
        inputs = {**inputs, **flatten(model=model, pretrained=pretrained)}

        def import_stage() -> dict[str, int]:
            lengths = {
                "query": store.metadata.query_length,
                "passage": store.metadata.passage_length,
            }
            parameters = import_model(
                model_dir=str(root / "model"),
                model=model,
                pretrained=pretrained,
                vocabulary=str(store.vocabulary_directory),
                feature_lengths=lengths,
            )
            return {"parameters": parameters}

        imported = self._stages.run(f"{label}-import", import_stage, inputs=inputs)
        return imported["parameters"], inputs

    def retrieve(
        self,
        label: str,
        root: pathlib.Path,
        inputs: Inputs,
        *,
        splits: Sequence[str],
        encoded: Sequence[str] | None = None,
        model_dir: pathlib.Path | None = None,
        documents: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> dict[str, object]:
        """Encodes collection and queries with `root`'s model, indexes and searches the splits.

        Args:
            label: prefix of the stages' names.
            root: where embeddings, indexes and runs go.
            inputs: what the outputs depend on.
            splits: splits to search.
            encoded: splits whose queries are encoded; None means all.
            model_dir: the model; None is `root`'s.
            documents: arguments of `encode` for queries with documents.

        Returns:
            The inputs of later stages.
        """
        setting, embeddings_dir = self._setting, str(root / "embeddings")

        def encode_splits(splits: Sequence[str] | None) -> dict[str, str]:
            own, training = model_dir or root / "model", setting.training
            # The blocks that training freezes are an untrained model's, too.
            frozen = read_facts(own).get("train_from_block", training.train_from_block)
            return encode(
                model_dir=str(own),
                token_store=setting.token_store,
                output_dir=embeddings_dir,
                **documents,
                config=setting.encode,
                # Cached states are of the queries alone.
                states_dir=training.states_dir
                if frozen and "augmentation_dir" not in documents
                else None,
                frozen_blocks=frozen,
                states_dtype=training.states_dtype,
                tasks=setting.tasks,
                query_splits=splits,
            )

        fingerprints = self._stages.run(
            f"{label}-encode",
            lambda: encode_splits(encoded),
            inputs={**inputs, **flatten(encode=setting.encode)},
        )
        inputs = {**inputs, **fingerprints}

        def index_stage() -> None:
            # Recall is sampled from the tasks in the token store's order.
            known = TokenStore.open(setting.token_store).tasks
            tasks = [task for task in known if setting.tasks is None or task in setting.tasks]
            for directory, config in (("exact", IndexConfig()), ("index", setting.index)):
                index(
                    embeddings_dir=embeddings_dir,
                    index_dir=str(root / directory),
                    config=config,
                    sample_split=DEVELOPMENT,
                    tasks=tasks,
                )

        self._stages.run(
            f"{label}-index", index_stage, inputs={**inputs, **flatten(index=setting.index)}
        )

        def search_stage(split: str) -> None:
            # A round or an episode that is added later searches queries that were not encoded.
            if split not in {known for _, known in encoded_splits(embeddings_dir)}:
                encode_splits([split])
            search(
                embeddings_dir=embeddings_dir,
                # Mining searches exactly; what is reported goes through the chosen index.
                index_dir=str(root / ("exact" if split == "train" else "index")),
                output_dir=str(root / "runs"),
                split=split,
                tag=label,
                **self._searched,
                **self._common,
            )

        inputs = {**inputs, **self._searched}
        # One stage per split: what is added later searches the last model's training queries, too.
        for split in splits:
            self._stages.run(
                f"{label}-search-{split}", functools.partial(search_stage, split), inputs=inputs
            )
        return inputs

    def mine(
        self,
        label: str,
        root: pathlib.Path,
        config: MiningConfig,
        inputs: Inputs,
        *,
        tasks: Sequence[str] | None = None,
    ) -> None:
        """Mines from `root`'s runs of the training queries."""
        evaluation = self._setting.evaluation
        matching: dict[str, Any] = {
            "match": evaluation.match,
            "regex_tasks": evaluation.regex_tasks,
        }
        self._stages.run(
            f"{label}-mine",
            lambda: mine(
                runs_dir=str(root / "runs"),
                output_dir=str(root / "negatives"),
                config=config,
                **matching,
                **self._common | ({} if tasks is None else {"tasks": tasks}),
            ),
            inputs={**inputs, **flatten(mining=config, **matching)},
        )

    def evaluate(
        self,
        row: str,
        runs_dir: pathlib.Path,
        inputs: Inputs,
        *,
        parameters: int | None,
        details: Mapping[str, str] | None = None,
    ) -> str:
        """Evaluates the test runs as a row of the directory's table; returns the row's name."""
        setting = self._setting

        def evaluate_stage() -> None:
            evaluate(
                runs_dir=str(runs_dir),
                output_dir=setting.output_dir,
                system=row,
                config=setting.evaluation,
                parameters=parameters,
                details=details,
                # Rows are tested once all are there.
                significance=None,
                **self._common,
            )

        self._stages.run(
            f"{file_name(row)}-evaluate",
            evaluate_stage,
            inputs={**inputs, **flatten(evaluation=setting.evaluation)},
        )
        return row


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
