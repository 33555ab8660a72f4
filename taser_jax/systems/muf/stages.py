"""The stages of DPR-MUF's pipeline, in terms of the commands they run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.commands.evaluate import EvaluationConfig, evaluate
from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.pipelines.retrieval_stages import (
    BM25,
    DEVELOPMENT,
    RetrievalStages,
    Setting,
    System,
)
from taser_jax.commands.train import train
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.results import read_results
from taser_jax.retrieval.fusion import Weighting
from taser_jax.storage.artifacts import file_name, fingerprint_json
from taser_jax.systems.muf import tables
from taser_jax.systems.muf.ensemble import ensemble
from taser_jax.systems.muf.ensemble_files import Ensemble, EnsembleTraining
from taser_jax.systems.muf.fuse import AddedBm25, Domain, FusionSummary, fuse_specialists
from taser_jax.systems.muf.oracle import BayesianConfig, Oracle
from taser_jax.systems.muf.specialists import Specialist, Weighing


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How specialists are weighed and fused.

    Attributes:
        ensemble: how each specialist's ensemble is trained.
        weighing: depth of the lists, confidences, temperatures, weights.
        sizes: numbers of members that further rows fuse with, for the curve over sizes (the
            paper's figure 2); the first members of each ensemble.
        left_out: a specialist that further rows do without, as the paper's do without SQuAD.
        mixed: the mixes of queries; None leaves their table out.
        oracle: how the Bayesian oracle of the mixes searches; None leaves its row out.
    """

    ensemble: EnsembleTraining = EnsembleTraining()
    weighing: Weighing = Weighing()
    sizes: tuple[int, ...] = ()
    left_out: str | None = None
    mixed: tables.MixedConfig | None = tables.MixedConfig()
    oracle: BayesianConfig | None = BayesianConfig()


@dataclasses.dataclass(frozen=True)
class _Model:
    """A trained model: its files, its parameters, and those of a member of its ensemble."""

    specialist: Specialist
    parameters: int
    member_parameters: int = 0


class MufStages:
    """The stages of one directory.

    Args:
        setting: what all stages share.
        fusion: how specialists are fused.

    Attributes:
        rows: row -> its values by query, of all fusions so far.
    """

    def __init__(self, setting: Setting, fusion: Fusion) -> None:
        self._setting, self._fusion = setting, fusion
        self._root = pathlib.Path(setting.output_dir)
        # BM25's lists are as deep as the specialists' that they are added to.
        deep = dataclasses.replace(setting, k=max(setting.k, fusion.weighing.fusion.depth))
        self._retrieval = RetrievalStages(deep)
        self._stages = self._retrieval.stages
        collection = self._retrieval.store.metadata.collection
        self._fusing: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": collection,
            "lists_dir": self._root / "specialists",
            "weighing": fusion.weighing,
            "k": setting.k,
            "evaluation": setting.evaluation,
            "own_passage_tasks": list(setting.own_passage_tasks),
        }
        self._tasks = tasks_with(
            setting.data_dir, collection, split=tables.TEST, tasks=setting.tasks
        )
        self._models: dict[str, _Model] = {}
        self.rows: dict[str, tables.Evaluations] = {}

    def bm25(self) -> None:
        """BM25's runs, hard negatives and row."""
        root = self._root / "bm25"
        self._retrieval.bm25(root, splits=("train", DEVELOPMENT, tables.TEST))
        self._retrieval.mine("bm25", root, self._setting.first_mining)
        self._retrieval.evaluate(BM25, root / "runs", parameters=None)

    def model(self, name: str, system: System, *, with_ensemble: bool) -> None:
        """Trains, encodes and indexes a model, and a specialist's ensemble."""
        label, setting = file_name(name), self._setting
        root, training = self._root / label, system.training(setting.training)
        shared: dict[str, Any] = {
            "token_store": setting.token_store,
            "tasks": list(system.tasks or self._tasks),
            "negatives_dirs": [self._root / "bm25" / "negatives"],
        }
        trained = self._stages.run(
            f"{label}-train",
            train,
            model_dir=root / "model",
            model=system.model,
            training=training,
            **shared,
        )
        self._retrieval.retrieve(label, root, splits=())
        specialist, member_parameters = Specialist.of(str(root)), 0
        if with_ensemble:
            self._stages.run(
                f"{label}-ensemble",
                _ensemble,
                embeddings_dir=specialist.embeddings_dir,
                output_dir=root / "ensemble",
                training=self._fusion.ensemble,
                **shared,
            )
            specialist = dataclasses.replace(specialist, ensemble_dir=str(root / "ensemble"))
            member_parameters = Ensemble.open(str(root / "ensemble")).member_parameters
        self._models[name] = _Model(specialist, trained["parameters"], member_parameters)

    def untrained(self, name: str, system: System) -> None:
        """Imports, encodes and indexes a model with its pretrained weights."""
        label = file_name(name)
        root = self._root / label
        parameters = self._retrieval.untrained(label, root, system.model)
        self._retrieval.retrieve(label, root, splits=())
        self._models[name] = _Model(Specialist.of(str(root)), parameters)

    def fusions(self, specialists: Mapping[str, System]) -> list[str]:
        """Runs all fusions; returns their rows, without those of sizes and of the oracle."""
        singles, fusion = list(specialists), self._fusion
        self.fuse(tables.MUF, singles)
        rows = [tables.MUF]
        if fusion.left_out is not None:
            rows.append(f"MUF without {fusion.left_out}")
            self.fuse(rows[-1], [name for name in singles if name != fusion.left_out])
        self.fuse(tables.WITHOUT_DOMAIN, singles, domain=Domain.LEFT_OUT)
        equal = dataclasses.replace(fusion.weighing.fusion, weighting=Weighting.EQUAL)
        weighing = dataclasses.replace(fusion.weighing, fusion=equal)
        self.fuse(tables.EQUAL, singles, weighing=weighing)
        self.fuse(tables.LITERAL, singles, temperature=tables.LITERAL_TEMPERATURE)
        for size in fusion.sizes:
            self.fuse(tables.of_size(size), singles, members=size)
        if fusion.mixed is not None and fusion.oracle is not None:
            oracle = Oracle(self.own(specialists), fusion.oracle)
            self.fuse(tables.BAYESIAN, singles, oracle=oracle)
        return [*rows, tables.WITHOUT_DOMAIN, tables.EQUAL, tables.LITERAL]

    def own(self, specialists: Mapping[str, System]) -> dict[str, str]:
        """Task -> its specialist; the first of several."""
        trained = {name: tuple(system.tasks or ()) for name, system in specialists.items()}
        return {
            task: next(name for name, tasks in trained.items() if task in tasks)
            for task in self._tasks
            if any(task in tasks for tasks in trained.values())
        }

    def fuse(
        self,
        row: str,
        names: Sequence[str],
        *,
        domain: Domain = Domain.INCLUDED,
        weighing: Weighing | None = None,
        oracle: Oracle | None = None,
        **change: Any,
    ) -> None:
        """Fuses models' lists and evaluates them, alone and with BM25.

        A single model's lists are taken as they are. Stage and folder depend on the models, so that
        a specialist can be added to a finished run. `change` sets fields of every specialist: its
        temperature, its members.
        """
        setting = self._setting
        label = f"{file_name(row)}-{fingerprint_json(list(names))[:6]}"
        root = self._root / "fusions" / label
        fusing = self._fusing | ({} if weighing is None else {"weighing": weighing})
        folders, tasks = {row: "runs", tables.with_bm25(row): "runs_bm25"}, self._tasks
        bm25 = AddedBm25(str(self._root / "bm25" / "runs"), setting.hybrid, setting.hybrid_measure)
        if oracle is not None:
            # Of the lists alone, for the mixes.
            folders, tasks, bm25 = {row: "runs"}, list(oracle.own), AddedBm25()
        models = [self._models[name] for name in names]
        weighs = len(names) > 1 and fusing["weighing"].fusion.weighting is not Weighting.EQUAL
        members = change.get("members", self._fusion.ensemble.model.members) if weighs else 0
        parameters = sum(model.parameters + members * model.member_parameters for model in models)
        self._stages.run(
            f"{label}-fuse",
            _fuse_and_evaluate,
            folders=folders,
            parameters=parameters,
            specialists={
                name: dataclasses.replace(model.specialist, **change)
                for name, model in zip(names, models, strict=True)
            },
            output_dir=root,
            split=tables.TEST,
            tasks=tasks,
            tag=file_name(row),
            domain=domain,
            bm25=bm25,
            oracle=oracle,
            **fusing,
        )
        for name in folders:
            evaluations = tables.read_row(root, name, tasks, split=tables.TEST)
            self.rows[name] = evaluations
            [evaluated] = read_results(root / "results", [name])
            tables.write_row(self._root, name, evaluations, split=tables.TEST, evaluated=evaluated)


@functools.wraps(ensemble)
def _ensemble(**arguments: Any) -> dict[str, str]:
    return dict(ensemble(**arguments).fingerprints)


@writes("{output_dir}")
def _fuse_and_evaluate(
    *,
    folders: Mapping[str, str],
    parameters: int,
    output_dir: str,
    data_dir: str,
    collection: str,
    tasks: Sequence[str],
    evaluation: EvaluationConfig,
    **options: Any,
) -> FusionSummary:
    """Fuses and evaluates; `folders` are row -> folder of its runs."""
    shared: dict[str, Any] = {
        "output_dir": output_dir,
        "data_dir": data_dir,
        "collection": collection,
        "tasks": tasks,
    }
    summary = fuse_specialists(evaluation=evaluation, **shared, **options)
    alphas = ", ".join(f"{task} {alpha:g}" for task, alpha in summary.alphas.items())
    for name, folder in folders.items():
        evaluate(
            runs_dir=str(pathlib.Path(output_dir) / folder),
            system=name,
            config=evaluation,
            parameters=parameters,
            details={"alpha": alphas} if folder == "runs_bm25" else {},
            significance=None,
            **shared,
        )
    return summary
