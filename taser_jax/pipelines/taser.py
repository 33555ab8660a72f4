"""`taser pipeline taser`: train, mine, retrain, search and evaluate, one resumable stage each."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from taser_jax.data.collections import PassageStore
from taser_jax.data.token_store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.models.dual_encoder import DualEncoderConfig
from taser_jax.pipelines.bm25 import bm25
from taser_jax.pipelines.common import check_collection
from taser_jax.pipelines.encode import encode
from taser_jax.pipelines.evaluate import EvaluationConfig, evaluate, write_table
from taser_jax.pipelines.hybrid import hybrid
from taser_jax.pipelines.index import CONFIGURABLES as INDEX_CONFIGURABLES
from taser_jax.pipelines.index import index
from taser_jax.pipelines.mine import mine
from taser_jax.pipelines.search import search
from taser_jax.pipelines.settings import flatten
from taser_jax.pipelines.stages import Stages
from taser_jax.pipelines.train import CONFIGURABLES as TRAIN_CONFIGURABLES
from taser_jax.pipelines.train import TrainingConfig, train
from taser_jax.progress import logger
from taser_jax.retrieval.bm25 import Bm25Config
from taser_jax.retrieval.embeddings import EncodeConfig
from taser_jax.retrieval.hybrid import HybridConfig
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.mining import AnswerContaining, MiningConfig
from taser_jax.storage import storage_errors
from taser_jax.training.step import ObjectiveConfig

BM25 = "BM25"
DEVELOPMENT = "validation"


@dataclasses.dataclass(frozen=True)
class System:
    """One model of a comparison.

    Attributes:
        model: the dual encoder.
        objective: None takes the training's; learned routing brings its regulariser here.
        learning_rate: None takes the training's; models of other shapes may want their own.
    """

    model: DualEncoderConfig
    objective: ObjectiveConfig | None = None
    learning_rate: float | None = None

    def training(self, training: TrainingConfig) -> TrainingConfig:
        """The common training with what this system sets itself."""
        if self.objective is not None:
            training = dataclasses.replace(training, objective=self.objective)
        if self.learning_rate is not None:
            optimizer = dataclasses.replace(training.optimizer, learning_rate=self.learning_rate)
            training = dataclasses.replace(training, optimizer=optimizer)
        return training


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all stages of one comparison share.

    Attributes:
        output_dir: everything goes below it.
        data_dir: where collections lie.
        token_store: tokens of the collection.
        training: how models are trained; the same steps in each round.
        first_mining: hard negatives of round 1, from BM25 (P1).
        second_mining: hard negatives of round 2, from each round-1 model's own run (P2).
        index: of the searches that are reported; mining searches exactly.
        encode: batches and shards of encoding.
        evaluation: how runs are scored.
        bm25: its parameters.
        hybrid: depth and candidates for α.
        hybrid_measure: what α maximises on the development split.
        k: results a query.
        tasks: None means all.
    """

    output_dir: str
    data_dir: str
    token_store: str
    training: TrainingConfig
    first_mining: MiningConfig = MiningConfig(answer_containing=AnswerContaining.DROP)
    second_mining: MiningConfig = MiningConfig()
    index: IndexConfig = IndexConfig()
    encode: EncodeConfig = EncodeConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bm25: Bm25Config = Bm25Config()
    hybrid: HybridConfig = HybridConfig()
    hybrid_measure: str = "R@20"
    k: int = 100
    tasks: Sequence[str] | None = None


def pipeline_taser(
    *,
    setting: Setting,
    systems: Mapping[str, System],
    hybrid_systems: Sequence[str] = (),
    rounds: int = 2,
    config_text: str = "",
) -> ResultsTable:
    """Runs the paper's recipe for each system beside BM25, and prints one table.

    BM25 negatives (P1) -> train -> search the training queries -> mine (P2) -> train again, as
    long -> search held-out queries -> evaluate -> add BM25 to the chosen systems. Killed
    anywhere and run again, it goes on at the stage it was in.

    Args:
        setting: what all stages share.
        systems: row name -> model.
        hybrid_systems: systems whose last round is also shown with BM25 added.
        rounds: 1 stops before mining with the model.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: the directory was begun with other settings, or names that do not fit.
        StorageError: the directory cannot be written.
    """
    _check_systems(systems, hybrid_systems, rounds)
    _check_depth(setting)
    output_dir = pathlib.Path(setting.output_dir)
    with storage_errors(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.gin").write_text(config_text, encoding="utf-8")
    # Both rounds, and every restart, run the same programs: they are compiled once.
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # set as JAX loads
        jax.config.update("jax_compilation_cache_dir", str(output_dir / "compilation_cache"))
    stages = Stages(output_dir)
    store = TokenStore.open(setting.token_store)
    check_collection(store, PassageStore.open(setting.data_dir, store.metadata.collection))
    data = {"token_store": store.metadata.fingerprint, "tasks": list(setting.tasks or [])}
    comparison = _Comparison(stages, setting, store.metadata.collection, data)
    comparison.bm25()
    order = [BM25]
    for number in range(1, rounds + 1):
        for name, system in systems.items():
            order.append(comparison.round(name, system, number))
    for name in hybrid_systems:
        order.append(comparison.add_bm25(name, rounds))
    table = write_table(output_dir, systems=order, by_task=setting.evaluation.measures[-1])
    print("\n" + table.to_text())
    logger.info("table: %s (and .csv, .png)", output_dir / "table.md")
    return table


def row_name(system: str, number: int) -> str:
    """The table's row of a system's round."""
    return f"{system} ({'BM25 negatives' if number == 1 else 'mined negatives'})"


def _check_systems(
    systems: Mapping[str, System], hybrid_systems: Sequence[str], rounds: int
) -> None:
    unknown = sorted(set(hybrid_systems) - systems.keys())
    labels = {_label(name) for name in systems}
    if unknown or rounds < 1 or not systems or len(labels) < len(systems):
        raise ConfigError(
            f"systems {', '.join(systems) or 'none'}; hybrid systems {', '.join(hybrid_systems)}; "
            f"{rounds} rounds",
            where="pipeline_taser",
            expected="systems with distinct names, hybrid systems among them, at least one round",
            fix=f"remove {', '.join(unknown)} from hybrid_systems" if unknown else None,
        )


def _check_depth(setting: Setting) -> None:
    depth = max(setting.first_mining.depth, setting.second_mining.depth)
    if setting.k < depth:
        raise ConfigError(
            f"{setting.k} results a query, and mining looks {depth} deep",
            where="TOP_K",
            expected=f"at least {depth}",
            fix="raise TOP_K, or lower MINING_DEPTH",
        )


def _label(name: str) -> str:
    """A system's name as its folders and stages have it."""
    return name.lower().replace(" ", "-")


class _Comparison:
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

    def round(self, name: str, system: System, number: int) -> str:
        """Trains, encodes, indexes, searches, mines and evaluates one round; its row's name."""
        setting = self._setting
        label = f"{_label(name)}-{number}"
        root = self._root / label
        before = self._root / ("bm25" if number == 1 else f"{_label(name)}-{number - 1}")
        training = system.training(setting.training)
        inputs = {
            **self._data,
            **flatten(
                model=system.model,
                training=training,
                negatives=(setting.first_mining, setting.second_mining)[number > 1],
            ),
        }
        model_dir = str(root / "model")

        def train_stage() -> dict[str, Any]:
            start = time.monotonic()
            summary = train(
                model_dir=model_dir,
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
            for split, index_name in (
                ("train", "exact"),
                (DEVELOPMENT, "index"),
                ("test", "index"),
            ):
                search(
                    model_dir=model_dir,
                    token_store=setting.token_store,
                    data_dir=setting.data_dir,
                    index_dir=str(root / index_name),
                    output_dir=str(root / "runs"),
                    split=split,
                    tasks=setting.tasks,
                    k=setting.k,
                    tag=label,
                )

        inputs = {**inputs, "k": setting.k}
        self._stages.run(f"{label}-search", search_stage, inputs=inputs)
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

    def add_bm25(self, name: str, number: int) -> str:
        """Joins a system's last round with BM25; its row's name."""
        setting = self._setting
        label = f"{_label(name)}-{number}"
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

        name = re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")
        self._stages.run(
            f"{name}-evaluate",
            evaluate_stage,
            inputs={**inputs, **flatten(evaluation=self._setting.evaluation)},
        )
        return row


CONFIGURABLES = (
    *TRAIN_CONFIGURABLES,
    *INDEX_CONFIGURABLES,
    Bm25Config,
    EncodeConfig,
    EvaluationConfig,
    HybridConfig,
    MiningConfig,
    Setting,
    System,
)
