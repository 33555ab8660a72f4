"""The stages of DPR-MUF's pipeline, in terms of the commands they run."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.commands.evaluate import evaluate
from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.pipelines.retrieval_stages import DEVELOPMENT, RetrievalStages
from taser_jax.commands.pipelines.setting import BM25, Setting, System
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.score import score
from taser_jax.commands.train import train
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.store import TokenStore
from taser_jax.evaluation.results import read_results
from taser_jax.retrieval.fusion import FusionConfig, Weighting
from taser_jax.storage.artifacts import file_name, fingerprint_json
from taser_jax.storage.settings import flatten, to_plain
from taser_jax.systems.muf.bayesian import BayesianConfig
from taser_jax.systems.muf.confidence import ConfidenceConfig
from taser_jax.systems.muf.domains import Evaluations, MixedConfig, read_row, write_row
from taser_jax.systems.muf.ensemble import ensemble
from taser_jax.systems.muf.ensemble_files import Ensemble, EnsembleTraining
from taser_jax.systems.muf.fuse import Domain, fuse, open_specialists
from taser_jax.systems.muf.muf_costs import Latency, ModelCost, fusion_latency, model_cost
from taser_jax.systems.muf.muf_tables import (
    BAYESIAN,
    EQUAL,
    LITERAL,
    LITERAL_TEMPERATURE,
    MUF,
    TEST,
    WITHOUT_DOMAIN,
    MufRows,
    mean_confidence,
    of_size,
    with_bm25,
)
from taser_jax.systems.muf.specialists import CalibrationConfig, OpenSpecialist, Specialist


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How specialists are weighed and fused.

    Attributes:
        ensemble: how each specialist's ensemble is trained.
        config: depth, weighting, absent passages.
        confidence: what the members' softmaxes are over.
        calibration: how temperatures are chosen.
        temperature: one T for all specialists, without calibration; None calibrates each.
        sizes: numbers of members that further rows fuse with, for the curve over sizes (the
            paper's figure 2); the first members of each ensemble.
        left_out: a specialist that further rows do without, as the paper's do without SQuAD.
        mixed: the mixes of queries; None leaves their table out.
        oracle: how the Bayesian oracle of the mixes searches; None leaves its row out.
    """

    ensemble: EnsembleTraining = EnsembleTraining()
    config: FusionConfig = FusionConfig()
    confidence: ConfidenceConfig = ConfidenceConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    temperature: float | None = None
    sizes: tuple[int, ...] = ()
    left_out: str | None = None
    mixed: MixedConfig | None = MixedConfig()
    oracle: BayesianConfig | None = BayesianConfig()


@dataclasses.dataclass(frozen=True)
class _Model:
    """A trained model: its files, its parameters, those of its ensemble's members, its inputs."""

    specialist: Specialist
    parameters: int
    member_parameters: int
    inputs: Mapping[str, Any]


class MufStages:
    """The stages of one directory.

    Args:
        stages: where finished stages are recorded.
        setting: what all stages share.
        fusion: how specialists are fused.
        store: the token store.
    """

    def __init__(self, stages: Stages, setting: Setting, fusion: Fusion, store: TokenStore) -> None:
        self._stages, self._setting, self._fusion = stages, setting, fusion
        collection = store.metadata.collection
        self._root = pathlib.Path(setting.output_dir)
        # BM25's lists are as deep as the specialists' that they are added to.
        deep = dataclasses.replace(setting, k=max(setting.k, fusion.config.depth))
        self._retrieval = RetrievalStages(stages, deep, collection)
        self._data = {"token_store": store.metadata.fingerprint}
        self._where: dict[str, Any] = {"data_dir": setting.data_dir, "collection": collection}
        self._tasks = tasks_with(setting.data_dir, collection, split=TEST, tasks=setting.tasks)
        self._models: dict[str, _Model] = {}
        self._rows: dict[str, Evaluations] = {}
        self._roots: dict[str, pathlib.Path] = {}

    def bm25(self) -> None:
        """BM25's runs, hard negatives and row."""
        root = self._root / "bm25"
        inputs = self._retrieval.bm25(root, self._data, splits=("train", DEVELOPMENT, TEST))
        self._retrieval.mine("bm25", root, self._setting.first_mining, inputs)
        self._retrieval.evaluate(BM25, root / "runs", inputs, parameters=None)

    def student(self, name: str, system: System, singles: Sequence[str]) -> None:
        """Trains, encodes and indexes a model that learns from the specialists' fused lists.

        Its hard negatives, and their teacher's scores, are the fusion's of the training queries.
        Ensembles were trained on these queries: the outputs of the teacher's stage have the mean w
        of each specialist on its own training queries and on its own test queries.
        """
        setting, label = self._setting, f"{file_name(name)}-teacher"
        root, fusion = self._root / label, self._fusion
        tasks = list(system.tasks or self._tasks)
        settings: dict[str, Any] = {
            "config": fusion.config,
            "confidence": fusion.confidence,
            "calibration": fusion.calibration,
            "evaluation": setting.evaluation,
            "own_passage_tasks": list(setting.own_passage_tasks),
            "k": setting.k,
        }
        inputs = {
            **self._data,
            **flatten(teacher=settings),
            "tasks": tasks,
            "models": {one: to_plain(self._models[one].inputs) for one in singles},
        }

        def fuse_stage() -> dict[str, Any]:
            fuse(
                specialists={one: self._models[one].specialist for one in singles},
                output_dir=str(root),
                lists_dir=str(self._root / "specialists"),
                split="train",
                development_split=DEVELOPMENT,
                tasks=tasks,
                **settings,
                **self._where,
            )
            return {
                f"mean w, {split}": mean_confidence(directory / "lists", tasks, split=split)
                for directory, split in ((root, "train"), (self._roots[MUF], TEST))
            }

        def score_stage() -> None:
            score(
                teachers={str(root / "runs"): 1.0},
                negatives_dir=str(root / "negatives"),
                output_dir=str(root / "scored"),
                tasks=tasks,
                **self._where,
            )

        self._stages.run(f"{label}-fuse", fuse_stage, inputs=inputs)
        self._retrieval.mine(label, root, setting.first_mining, inputs, tasks=tasks)
        self._stages.run(f"{label}-score", score_stage, inputs=inputs)
        self.model(name, system, speaks=False, taught=(root / "scored", inputs))

    def model(
        self,
        name: str,
        system: System,
        *,
        speaks: bool,
        taught: tuple[pathlib.Path, Mapping[str, Any]] | None = None,
    ) -> None:
        """Trains, encodes and indexes a model; of one that speaks, trains the ensemble.

        `taught` are a student's negatives with scores, and what they were made from, in the place
        of BM25's negatives.
        """
        label, setting = file_name(name), self._setting
        root, training = self._root / label, system.training(setting.training)
        tasks = list(system.tasks or self._tasks)
        negatives = [str(taught[0] if taught else self._root / "bm25" / "negatives")]
        inputs: dict[str, Any] = {
            **self._data,
            "tasks": tasks,
            **flatten(model=system.model, training=training, negatives=setting.first_mining),
        }
        if taught is not None:
            inputs["teacher"] = to_plain(taught[1])

        def train_stage() -> dict[str, Any]:
            start = time.monotonic()
            summary = train(
                model_dir=str(root / "model"),
                token_store=setting.token_store,
                model=system.model,
                training=training,
                tasks=tasks,
                negatives_dirs=negatives,
            )
            assert summary is not None
            seconds = time.monotonic() - start
            return {"parameters": summary.parameters, "seconds": seconds}

        trained = self._stages.run(f"{label}-train", train_stage, inputs=inputs)
        inputs = self._retrieval.retrieve(label, root, inputs, splits=())
        specialist, member_parameters = self._specialist(root), 0
        if speaks:
            inputs = {**inputs, **flatten(ensemble=self._fusion.ensemble)}

            def ensemble_stage() -> dict[str, Any]:
                found = ensemble(
                    embeddings_dir=specialist.embeddings_dir,
                    token_store=setting.token_store,
                    output_dir=str(root / "ensemble"),
                    tasks=tasks,
                    training=self._fusion.ensemble,
                    negatives_dirs=negatives,
                )
                return dict(found.fingerprints)

            inputs |= self._stages.run(f"{label}-ensemble", ensemble_stage, inputs=inputs)
            specialist = dataclasses.replace(specialist, ensemble_dir=str(root / "ensemble"))
            member_parameters = Ensemble.open(str(root / "ensemble")).member_parameters
        self._models[name] = _Model(specialist, trained["parameters"], member_parameters, inputs)

    def untrained(self, name: str, system: System) -> None:
        """Imports, encodes and indexes a model with its pretrained weights."""
        label = file_name(name)
        root = self._root / label
        parameters, inputs = self._retrieval.untrained(label, root, system.model, self._data)
        inputs = self._retrieval.retrieve(label, root, inputs, splits=())
        self._models[name] = _Model(self._specialist(root), parameters, 0, inputs)

    def _specialist(self, root: pathlib.Path) -> Specialist:
        return Specialist(
            embeddings_dir=str(root / "embeddings"),
            index_dir=str(root / "exact"),
            temperature=self._fusion.temperature,
            model_dir=str(root / "model"),
        )

    def fusions(self, specialists: Mapping[str, System]) -> list[str]:
        """Runs all fusions; returns their rows, without those of sizes and of the oracle."""
        singles, own = list(specialists), self.rows(specialists).own
        fusion = self._fusion
        self.fuse(MUF, singles)
        rows = [MUF]
        if fusion.left_out is not None:
            rows.append(f"MUF without {fusion.left_out}")
            self.fuse(rows[-1], [name for name in singles if name != fusion.left_out])
        self.fuse(WITHOUT_DOMAIN, singles, domain=Domain.LEFT_OUT)
        equal = dataclasses.replace(fusion.config, weighting=Weighting.EQUAL)
        self.fuse(EQUAL, singles, config=equal)
        self.fuse(LITERAL, singles, temperature=LITERAL_TEMPERATURE)
        for size in fusion.sizes:
            self.fuse(of_size(size), singles, members=size)
        if fusion.mixed is not None and fusion.oracle is not None:
            self.fuse(BAYESIAN, singles, oracle=own)
        return [*rows, WITHOUT_DOMAIN, EQUAL, LITERAL]

    def rows(self, specialists: Mapping[str, System]) -> MufRows:
        """All rows, for tables."""
        tasks = {name: tuple(system.tasks or ()) for name, system in specialists.items()}
        return MufRows(self._setting, self._tasks, tasks, self._rows)

    def opened(self, names: Sequence[str], **change: Any) -> dict[str, OpenSpecialist]:
        """Specialists with the results that they have stored; `change` as for `fuse`."""
        setting, fusion = self._setting, self._fusion
        return open_specialists(
            {name: dataclasses.replace(self._models[name].specialist, **change) for name in names},
            self._root / "specialists",
            data_dir=setting.data_dir,
            store=PassageStore.open(setting.data_dir, self._where["collection"]),
            config=fusion.config,
            confidence=fusion.confidence,
            calibration=fusion.calibration,
            evaluation=setting.evaluation,
            own_passage_tasks=setting.own_passage_tasks,
        )

    def latencies(self, names: Sequence[str]) -> dict[int, Latency]:
        """Members -> latency per query of a fusion with that many."""
        found = {}
        for size in (*self._fusion.sizes, self._fusion.ensemble.model.members):

            def measure(size: int = size) -> dict[str, float]:
                opened = self.opened(names, members=size)
                return fusion_latency(list(opened.values()), self._tasks[0], self._fusion.config)

            inputs = {"models": {one: to_plain(self._models[one].inputs) for one in names}}
            label = f"latency-{size}-{fingerprint_json(list(names))[:6]}"
            found[size] = Latency(**self._stages.run(label, measure, inputs=inputs))
        return found

    def cost(self, name: str) -> ModelCost:
        """A trained model's costs."""
        embeddings_dir = self._models[name].specialist.embeddings_dir
        return model_cost(self._stages, file_name(name), embeddings_dir)

    def directory_of(self, row: str) -> pathlib.Path:
        """The folder of a row's fusion."""
        return self._roots[row]

    def fuse(
        self,
        row: str,
        names: Sequence[str],
        *,
        domain: Domain = Domain.INCLUDED,
        config: FusionConfig | None = None,
        oracle: Mapping[str, str] | None = None,
        **change: Any,
    ) -> None:
        """Fuses models' lists and evaluates them, alone and with BM25.

        A single model's lists are taken as they are. Stage and folder depend on the models, so that
        a specialist can be added to a finished run. `change` sets fields of every specialist: its
        temperature, its members.
        """
        setting, fusion = self._setting, self._fusion
        label = f"{file_name(row)}-{fingerprint_json(list(names))[:6]}"
        root = self._root / "fusions" / label
        settings: dict[str, Any] = {
            "domain": domain,
            "config": config or fusion.config,
            "confidence": fusion.confidence,
            "calibration": fusion.calibration,
            "evaluation": setting.evaluation,
            "own_passage_tasks": list(setting.own_passage_tasks),
            "with_bm25": setting.hybrid,
            "measure": setting.hybrid_measure,
            "k": setting.k,
        }
        shown = [row, with_bm25(row)]
        tasks = self._tasks
        if oracle is not None:
            # Of the lists alone, for the mixes.
            shown, tasks = [row], list(oracle)
            settings |= {"oracle": dict(oracle), "search": fusion.oracle}
        inputs = {
            **self._data,
            **flatten(fusion=settings, bm25=setting.bm25),
            "tasks": self._tasks,
            "change": change,
            "models": {name: to_plain(self._models[name].inputs) for name in names},
        }
        models = [self._models[name] for name in names]
        weighs = len(names) > 1 and settings["config"].weighting is not Weighting.EQUAL
        members = change.get("members", fusion.ensemble.model.members) if weighs else 0
        parameters = sum(one.parameters + members * one.member_parameters for one in models)

        def fuse_stage() -> dict[str, Any]:
            summary = fuse(
                specialists={
                    name: dataclasses.replace(self._models[name].specialist, **change)
                    for name in names
                },
                output_dir=str(root),
                lists_dir=str(self._root / "specialists"),
                development_split=DEVELOPMENT,
                sparse_dir=None if oracle else str(self._root / "bm25" / "runs"),
                tasks=tasks,
                tag=file_name(row),
                **settings,
                **self._where,
            )
            alphas = ", ".join(f"{task} {alpha:g}" for task, alpha in summary.alphas.items())
            for name, folder, details in (
                (row, "runs", {}),
                (with_bm25(row), "runs_bm25", {"alpha": alphas}),
            ):
                if name not in shown:
                    continue
                evaluate(
                    runs_dir=str(root / folder),
                    output_dir=str(root),
                    system=name,
                    tasks=tasks,
                    config=setting.evaluation,
                    parameters=parameters,
                    details=details,
                    significance=None,
                    **self._where,
                )
            return dataclasses.asdict(summary)

        self._stages.run(f"{label}-fuse", fuse_stage, inputs=inputs)
        self._roots[row] = root
        for name in shown:
            found = read_row(root, name, tasks, split=TEST)
            self._rows[name] = found
            [evaluated] = read_results(root / "results", [name])
            write_row(self._root, name, found, split=TEST, evaluated=evaluated)
