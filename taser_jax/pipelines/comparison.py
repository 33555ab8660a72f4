"""The stages of one comparison, in terms of the commands they run."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping
from typing import Any

from taser_jax.data.token_store import TokenStore
from taser_jax.pipelines.hybrid import hybrid
from taser_jax.pipelines.import_model import import_model
from taser_jax.pipelines.retrieval_stages import DEVELOPMENT, RetrievalStages
from taser_jax.pipelines.settings import flatten
from taser_jax.pipelines.stages import Stages
from taser_jax.pipelines.systems import BM25, Setting, System, file_name, row_name
from taser_jax.pipelines.train import train


class Comparison:
    """The stages of one comparison, in terms of the commands they run."""

    def __init__(
        self, stages: Stages, setting: Setting, collection: str, data: Mapping[str, Any]
    ) -> None:
        self._stages, self._setting, self._data = stages, setting, data
        self._root = pathlib.Path(setting.output_dir)
        self._retrieval = RetrievalStages(stages, setting, collection)
        self._common: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": collection,
            "tasks": setting.tasks,
        }

    def bm25(self) -> None:
        """BM25 runs of all splits, round-1 negatives, and BM25's row."""
        root, splits = self._root / "bm25", ("train", DEVELOPMENT, "test")
        inputs = self._retrieval.bm25(root, self._data, splits=splits)
        self._retrieval.mine("bm25", root, self._setting.first_mining, inputs)
        self._retrieval.evaluate(BM25, root / "runs", inputs, parameters=None)

    def untrained(self, name: str, system: System) -> str:
        """Encodes, indexes, searches and evaluates a model as it starts; its row's name."""
        label = file_name(name)
        model_dir = str(self._root / label / "model")
        pretrained = self._setting.training.pretrained
        assert pretrained is not None
        inputs = {**self._data, **flatten(model=system.model, pretrained=pretrained)}
        store = TokenStore.open(self._setting.token_store)
        imported = self._stages.run(
            f"{label}-import",
            lambda: {
                "parameters": import_model(
                    model_dir=model_dir,
                    model=system.model,
                    pretrained=pretrained,
                    vocabulary=str(store.vocabulary_directory),
                    feature_lengths={
                        "query": store.metadata.query_length,
                        "passage": store.metadata.passage_length,
                    },
                )
            },
            inputs=inputs,
        )
        root, splits = self._root / label, (DEVELOPMENT, "test")
        inputs = self._retrieval.retrieve(label, root, inputs, splits=splits)
        return self._retrieval.evaluate(
            name,
            root / "runs",
            inputs,
            parameters=imported["parameters"],
            details={"training": "none"},
        )

    def round(self, name: str, system: System, number: int) -> str:
        """Trains, encodes, indexes, searches, mines and evaluates one round; its row's name."""
        setting = self._setting
        label = f"{file_name(name)}-{number}"
        root = self._root / label
        before = self._root / ("bm25" if number == 1 else f"{file_name(name)}-{number - 1}")
        training = system.training(setting.training)
        inputs = {
            **self._data,
            **flatten(
                model=system.model,
                training=training,
                negatives=(setting.first_mining, setting.second_mining)[number > 1],
            ),
        }

        def train_stage() -> dict[str, Any]:
            start = time.monotonic()
            summary = train(
                model_dir=str(root / "model"),
                token_store=setting.token_store,
                model=system.model,
                training=training,
                tasks=setting.tasks,
                negatives_dirs=[str(before / "negatives")],
            )
            assert summary is not None
            return {
                "parameters": summary.parameters,
                "validation": dict(summary.validation),
                "steps_per_second": summary.steps_per_second,
                "seconds": time.monotonic() - start,
            }

        trained = self._stages.run(f"{label}-train", train_stage, inputs=inputs)
        splits = ("train", DEVELOPMENT, "test")
        inputs = self._retrieval.retrieve(label, root, inputs, splits=splits)
        if number == 1:
            self._retrieval.mine(label, root, setting.second_mining, inputs)
        return self._retrieval.evaluate(
            row_name(name, number),
            root / "runs",
            inputs,
            parameters=trained["parameters"],
            details={
                "false negatives": training.batching.false_negatives.value,
                "training": f"{trained['seconds']:.0f} s",
            },
        )

    def add_bm25(self, name: str, number: int) -> str:
        """Joins a system's last round with BM25; its row's name."""
        setting = self._setting
        label = f"{file_name(name)}-{number}"
        root = self._root / f"{label}-bm25"
        trained = self._stages.record(f"{label}-train").outputs
        inputs = {
            **self._data,
            **self._stages.record(f"{label}-encode").outputs,
            **flatten(hybrid=setting.hybrid, evaluation=setting.evaluation),
            "measure": setting.hybrid_measure,
            "bm25": setting.bm25.to_json(),
            "k": setting.k,
        }

        def fuse_stage() -> dict[str, float]:
            alpha = hybrid(
                dense_dir=str(self._root / label / "runs"),
                sparse_dir=str(self._root / "bm25" / "runs"),
                output_dir=str(root / "runs"),
                development_split=DEVELOPMENT,
                k=setting.k,
                measure=setting.hybrid_measure,
                config=setting.hybrid,
                evaluation=setting.evaluation,
                **self._common,
            )
            return {"alpha": alpha}

        fused = self._stages.run(f"{label}-hybrid", fuse_stage, inputs=inputs)
        return self._retrieval.evaluate(
            f"{name} + BM25",
            root / "runs",
            inputs,
            parameters=trained["parameters"],
            details={
                "false negatives": setting.training.batching.false_negatives.value,
                "alpha": f"{fused['alpha']:.1f}",
            },
        )
