"""The stages of one comparison, in terms of the commands they run."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.data.token_store import TokenStore
from taser_jax.pipelines.bm25 import bm25
from taser_jax.pipelines.encode import encode
from taser_jax.pipelines.evaluate import evaluate
from taser_jax.pipelines.hybrid import hybrid
from taser_jax.pipelines.import_model import import_model
from taser_jax.pipelines.index import index
from taser_jax.pipelines.mine import mine
from taser_jax.pipelines.search import search
from taser_jax.pipelines.settings import flatten
from taser_jax.pipelines.stages import Stages
from taser_jax.pipelines.systems import BM25, Setting, System, file_name, row_name
from taser_jax.pipelines.train import train
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining import MiningConfig

DEVELOPMENT = "validation"


class Comparison:
    """The stages of one comparison, in terms of the commands they run."""

    def __init__(
        self, stages: Stages, setting: Setting, collection: str, data: Mapping[str, Any]
    ) -> None:
        self._stages, self._setting, self._data = stages, setting, data
        self._root = pathlib.Path(setting.output_dir)
        self._collection = collection
        self._common: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": collection,
            "tasks": setting.tasks,
        }

    def bm25(self) -> None:
        """BM25 runs of all splits, round-1 negatives, and BM25's row."""
        setting = self._setting
        inputs = {**self._data, "bm25": setting.bm25.to_json(), "k": setting.k}

        def run_all() -> None:
            for split in ("train", DEVELOPMENT, "test"):
                bm25(
                    output_dir=str(self._root / "bm25" / "runs"),
                    index_dir=str(self._root / "bm25" / "index"),
                    split=split,
                    k=setting.k,
                    config=setting.bm25,
                    **self._common,
                )

        self._stages.run("bm25-search", run_all, inputs=inputs)
        self._mine("bm25-mine", self._root / "bm25", setting.first_mining, inputs)
        self._evaluate(BM25, self._root / "bm25" / "runs", inputs=inputs, parameters=None)

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
        inputs = self._retrieve(label, inputs, splits=(DEVELOPMENT, "test"))
        return self._evaluate(
            name,
            self._root / label / "runs",
            inputs=inputs,
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
        inputs = self._retrieve(label, inputs, splits=("train", DEVELOPMENT, "test"))
        if number == 1:
            self._mine(f"{label}-mine", root, setting.second_mining, inputs)
        return self._evaluate(
            row_name(name, number),
            root / "runs",
            inputs=inputs,
            parameters=trained["parameters"],
            details={
                "false negatives": training.batching.false_negatives.value,
                "training": f"{trained['seconds']:.0f} s",
            },
        )

    def _retrieve(
        self, label: str, inputs: Mapping[str, Any], *, splits: Sequence[str]
    ) -> dict[str, Any]:
        """Encodes the collection, indexes it and searches; returns the inputs of what follows."""
        setting, root = self._setting, self._root / label
        model_dir = str(root / "model")
        encode_stage = functools.partial(
            encode,
            model_dir=model_dir,
            token_store=setting.token_store,
            output_dir=str(root / "embeddings"),
            config=setting.encode,
        )
        fingerprints = self._stages.run(
            f"{label}-encode", encode_stage, inputs={**inputs, **flatten(encode=setting.encode)}
        )
        inputs = {**inputs, **fingerprints}

        def index_stage() -> None:
            for directory, config in (("exact", IndexConfig()), ("index", setting.index)):
                index(
                    embeddings_dir=str(root / "embeddings"),
                    index_dir=str(root / directory),
                    config=config,
                    model_dir=model_dir,
                    token_store=setting.token_store,
                    sample_split=DEVELOPMENT,
                    tasks=setting.tasks,
                )

        self._stages.run(
            f"{label}-index", index_stage, inputs={**inputs, **flatten(index=setting.index)}
        )

        def search_stage() -> None:
            for split in splits:
                search(
                    model_dir=model_dir,
                    token_store=setting.token_store,
                    data_dir=setting.data_dir,
                    # Mining searches exactly; what is reported goes through the chosen index.
                    index_dir=str(root / ("exact" if split == "train" else "index")),
                    output_dir=str(root / "runs"),
                    split=split,
                    tasks=setting.tasks,
                    k=setting.k,
                    tag=label,
                )

        inputs = {**inputs, "k": setting.k}
        self._stages.run(f"{label}-search", search_stage, inputs=inputs)
        return inputs

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
        return self._evaluate(
            f"{name} + BM25",
            root / "runs",
            inputs=inputs,
            parameters=trained["parameters"],
            details={
                "false negatives": setting.training.batching.false_negatives.value,
                "alpha": f"{fused['alpha']:.1f}",
            },
        )

    def _mine(
        self, stage: str, root: pathlib.Path, config: MiningConfig, inputs: Mapping[str, Any]
    ) -> None:
        self._stages.run(
            stage,
            lambda: mine(
                runs_dir=str(root / "runs"),
                output_dir=str(root / "negatives"),
                config=config,
                match=self._setting.evaluation.match,
                **self._common,
            ),
            inputs={
                **inputs,
                **flatten(mining=config),
                "match": self._setting.evaluation.match.value,
            },
        )

    def _evaluate(
        self,
        row: str,
        runs_dir: pathlib.Path,
        *,
        inputs: Mapping[str, Any],
        parameters: int | None,
        details: Mapping[str, str] | None = None,
    ) -> str:
        def evaluate_stage() -> None:
            evaluate(
                runs_dir=str(runs_dir),
                output_dir=str(self._root),
                system=row,
                config=self._setting.evaluation,
                parameters=parameters,
                details=details,
                **self._common,
            )

        self._stages.run(
            f"{file_name(row)}-evaluate",
            evaluate_stage,
            inputs={**inputs, **flatten(evaluation=self._setting.evaluation)},
        )
        return row
