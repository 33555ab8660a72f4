"""`taser pipeline muf`: specialists trained apart, fused by how sure each is; DPR-MUF's tables."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.analysis.uncertainty import (
    SpecialistUncertainty,
    uncertainty_csv,
    uncertainty_figures,
)
from taser_jax.artifacts import file_name, fingerprint_json, replacing, split_path, write_text
from taser_jax.assembly.ensembles import EnsembleTraining
from taser_jax.commands.ensemble import CONFIGURABLES as ENSEMBLE_CONFIGURABLES
from taser_jax.commands.ensemble import ensemble
from taser_jax.commands.evaluate import evaluate
from taser_jax.commands.fuse import CONFIGURABLES as FUSE_CONFIGURABLES
from taser_jax.commands.fuse import Domain, fuse
from taser_jax.commands.inputs import check_collection, tasks_with
from taser_jax.commands.specialists import CalibrationConfig, Specialist, read_reliability
from taser_jax.commands.train import train
from taser_jax.data.collections.store import PassageStore
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.evaluation.comparisons import compare_rows
from taser_jax.evaluation.domains import (
    Evaluations,
    MixedConfig,
    draw_mixes,
    mix,
    pick,
    read_row,
    worst_of,
    write_row,
)
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import read_results
from taser_jax.progress import logger
from taser_jax.retrieval.confidence import ConfidenceConfig
from taser_jax.retrieval.fusion import FusionConfig, Weighting, weights_of
from taser_jax.retrieval.query_arrays import FUSED_LISTS, QueryArrays
from taser_jax.settings import flatten, to_plain
from taser_jax.workflows.retrieval_stages import DEVELOPMENT, RetrievalStages
from taser_jax.workflows.setting import BM25, Setting, System
from taser_jax.workflows.stages import Stages
from taser_jax.workflows.taser import CONFIGURABLES as TASER_CONFIGURABLES
from taser_jax.workflows.taser import begin_pipeline

MUF, OWN, WORST, ORACLE = "MUF", "Single, own domain", "Single, worst", "Oracle indicator"
_WITHOUT_DOMAIN, _EQUAL = "MUF without the domain", "Equal weights"
# The paper's inverse temperature of 1e-3, to the letter: every w is about 1.
_LITERAL, _LITERAL_TEMPERATURE = "MUF, T = 1000", 1000.0
_TEST = "test"


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
    """

    ensemble: EnsembleTraining = EnsembleTraining()
    config: FusionConfig = FusionConfig()
    confidence: ConfidenceConfig = ConfidenceConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    temperature: float | None = None
    sizes: tuple[int, ...] = ()
    left_out: str | None = None
    mixed: MixedConfig | None = MixedConfig()


def pipeline_muf(
    *,
    setting: Setting,
    specialists: Mapping[str, System],
    joint: Mapping[str, System],
    fusion: Fusion = Fusion(),
    config_text: str = "",
) -> Mapping[str, ResultsTable]:
    """Trains specialists and joint models, fuses the specialists, and prints DPR-MUF's tables.

    BM25 and its negatives -> train, encode and index every model on its own tasks -> an ensemble
    for every specialist -> lists of all tasks' queries -> temperatures -> fused lists -> tables:
    of single, joint and fused models by task (domains.md, the paper's table 2), on mixes of tasks
    (mixed.md, table 3) and with BM25 added (bm25.md, table 4); what confidences are worth is in
    uncertainty.csv and figures/. If interrupted, rerun the command to
    resume at that stage. A specialist added to a finished run is trained, and fusions
    with it run anew; everything else is reused.

    Args:
        setting: what all stages share; `setting.tasks` are those searched.
        specialists: name -> a model with `tasks` of its own.
        joint: name -> a model of several tasks, to compare with; its `train_steps` should let it
            see as many queries as the specialists together.
        fusion: ensembles, weights and mixes.
        config_text: written to config.gin.

    Returns:
        The tables: "domains", "bm25" and, where there are mixes or sizes, "mixed" and "sizes".

    Raises:
        ConfigError: names, tasks or steps that do not fit, or another run's directory.
        StorageError: the directory cannot be written.
    """
    output_dir = pathlib.Path(setting.output_dir)
    store = TokenStore.open(setting.token_store)
    check_collection(store, PassageStore.open(setting.data_dir, store.metadata.collection))
    setting.check_tasks(store.tasks)
    _check(specialists, joint, fusion, store.tasks)
    begin_pipeline(output_dir, config_text)
    run = _Run(Stages(output_dir), setting, fusion, store)
    run.bm25()
    for name, system in {**specialists, **joint}.items():
        run.model(name, system, speaks=name in specialists)
    singles, joints = list(specialists), list(joint)
    for name in (*singles, *joints):
        run.fuse(name, [name])
    run.fuse(MUF, singles)
    rows = [OWN, WORST, *joints, MUF]
    if fusion.left_out is not None:
        others = [name for name in singles if name != fusion.left_out]
        run.fuse(f"MUF without {fusion.left_out}", others)
        rows.append(f"MUF without {fusion.left_out}")
    run.fuse(_WITHOUT_DOMAIN, singles, domain=Domain.LEFT_OUT)
    equal = dataclasses.replace(fusion.config, weighting=Weighting.EQUAL)
    run.fuse(_EQUAL, singles, config=equal)
    run.fuse(_LITERAL, singles, temperature=_LITERAL_TEMPERATURE)
    rows += [_WITHOUT_DOMAIN, _EQUAL, _LITERAL]
    for size in fusion.sizes:
        run.fuse(_of_size(size), singles, members=size)
    tables = run.tables(specialists, rows)
    run.uncertainty(specialists)
    for name, table in tables.items():
        print(f"\n{table.to_text()}")
        logger.info("table: %s (and .csv, .png)", output_dir / f"{name}.md")
    return tables


@dataclasses.dataclass(frozen=True)
class _Model:
    """A trained model: its files, its parameters, and what it was made from."""

    specialist: Specialist
    parameters: int
    inputs: Mapping[str, Any]


class _Run:
    """The stages of one directory, in terms of the commands they run."""

    def __init__(self, stages: Stages, setting: Setting, fusion: Fusion, store: TokenStore) -> None:
        self._stages, self._setting, self._fusion = stages, setting, fusion
        collection = store.metadata.collection
        self._root = pathlib.Path(setting.output_dir)
        # BM25's lists are as deep as the specialists' that they are added to.
        deep = dataclasses.replace(setting, k=max(setting.k, fusion.config.depth))
        self._retrieval = RetrievalStages(stages, deep, collection)
        self._data = {"token_store": store.metadata.fingerprint}
        self._where: dict[str, Any] = {"data_dir": setting.data_dir, "collection": collection}
        self._tasks = tasks_with(setting.data_dir, collection, split=_TEST, tasks=setting.tasks)
        self._models: dict[str, _Model] = {}
        self._rows: dict[str, Evaluations] = {}
        self._roots: dict[str, pathlib.Path] = {}

    def bm25(self) -> None:
        """BM25's runs, hard negatives and row."""
        root = self._root / "bm25"
        inputs = self._retrieval.bm25(root, self._data, splits=("train", DEVELOPMENT, _TEST))
        self._retrieval.mine("bm25", root, self._setting.first_mining, inputs)
        self._retrieval.evaluate(BM25, root / "runs", inputs, parameters=None)

    def model(self, name: str, system: System, *, speaks: bool) -> None:
        """Trains, encodes and indexes a model; of one that speaks, trains the ensemble."""
        label, setting = file_name(name), self._setting
        root, training = self._root / label, system.training(setting.training)
        tasks = list(system.tasks or self._tasks)
        negatives = [str(self._root / "bm25" / "negatives")]
        inputs: dict[str, Any] = {
            **self._data,
            "tasks": tasks,
            **flatten(model=system.model, training=training, negatives=setting.first_mining),
        }

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
        specialist = Specialist(
            embeddings_dir=str(root / "embeddings"),
            index_dir=str(root / "exact"),
            temperature=self._fusion.temperature,
            model_dir=str(root / "model"),
        )
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

            found = self._stages.run(f"{label}-ensemble", ensemble_stage, inputs=inputs)
            inputs = {**inputs, **found}
            specialist = dataclasses.replace(specialist, ensemble_dir=str(root / "ensemble"))
        self._models[name] = _Model(specialist, trained["parameters"], inputs)

    def fuse(
        self,
        row: str,
        names: Sequence[str],
        *,
        domain: Domain = Domain.INCLUDED,
        config: FusionConfig | None = None,
        **change: Any,
    ) -> None:
        """Fuses models' lists and evaluates them, alone and with BM25.

        One model is its own list. A row of other models than before is another stage, in another
        directory: a specialist may be added to a finished run. `change` sets fields of every
        specialist: its temperature, its members.
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
            "with_bm25": setting.hybrid,
            "measure": setting.hybrid_measure,
            "k": setting.k,
        }
        inputs = {
            **self._data,
            **flatten(fusion=settings, bm25=setting.bm25),
            "tasks": self._tasks,
            "change": change,
            "models": {name: to_plain(self._models[name].inputs) for name in names},
        }
        parameters = sum(self._models[name].parameters for name in names)

        def fuse_stage() -> dict[str, Any]:
            summary = fuse(
                specialists={
                    name: dataclasses.replace(self._models[name].specialist, **change)
                    for name in names
                },
                output_dir=str(root),
                lists_dir=str(self._root / "specialists"),
                development_split=DEVELOPMENT,
                sparse_dir=str(self._root / "bm25" / "runs"),
                tasks=self._tasks,
                tag=file_name(row),
                **settings,
                **self._where,
            )
            alphas = ", ".join(f"{task} {alpha:g}" for task, alpha in summary.alphas.items())
            for name, folder, details in (
                (row, "runs", {}),
                (_with_bm25(row), "runs_bm25", {"alpha": alphas}),
            ):
                evaluate(
                    runs_dir=str(root / folder),
                    output_dir=str(root),
                    system=name,
                    tasks=self._tasks,
                    config=setting.evaluation,
                    parameters=parameters,
                    details=details,
                    significance=None,
                    **self._where,
                )
            return dataclasses.asdict(summary)

        self._stages.run(f"{label}-fuse", fuse_stage, inputs=inputs)
        self._roots[row] = root
        for name in (row, _with_bm25(row)):
            found = read_row(root, name, self._tasks, split=_TEST)
            self._rows[name] = found
            [evaluated] = read_results(root / "results", [name])
            write_row(self._root, name, found, split=_TEST, evaluated=evaluated)

    def tables(
        self, specialists: Mapping[str, System], rows: Sequence[str]
    ) -> dict[str, ResultsTable]:
        """The paper's tables 2 to 4, from the rows' values by query."""
        singles = {name: self._rows[name] for name in specialists}
        joined = {name: self._rows[_with_bm25(name)] for name in specialists}
        own = {
            task: next(name for name, system in specialists.items() if task in (system.tasks or ()))
            for task in self._tasks
            if any(task in (system.tasks or ()) for system in specialists.values())
        }
        worst = worst_of(singles, self._setting.hybrid_measure)
        directory = self._root
        write_row(directory, OWN, pick(singles, own), split=_TEST)
        write_row(directory, WORST, pick(singles, worst), split=_TEST)
        write_row(directory, _with_bm25(OWN), pick(joined, own), split=_TEST)
        with_bm25 = [row for row in rows if row not in (WORST, _WITHOUT_DOMAIN, _EQUAL, _LITERAL)]
        tables = {
            "domains": self._table(directory, "domains", [*specialists, *rows]),
            "bm25": self._table(directory, "bm25", [BM25, *map(_with_bm25, with_bm25)]),
        }
        if self._fusion.sizes:
            sized = [_of_size(size) for size in self._fusion.sizes]
            tables["sizes"] = self._table(directory, "sizes", [*sized, MUF])
        if self._fusion.mixed is None:
            return tables
        # Of tasks that have a specialist: the indicator knows one for each.
        draws = draw_mixes(
            {task: singles[name][task].num_queries for task, name in own.items()},
            self._fusion.mixed,
        )
        fused = {name: self._rows[name] for name in rows if name not in (OWN, WORST)}
        mixed = {**singles, **fused, ORACLE: pick(singles, own)}
        for name, row in mixed.items():
            write_row(directory / "mixed", name, mix(row, draws), split=_TEST)
        tables["mixed"] = self._table(directory / "mixed", "mixed", list(mixed))
        return tables

    def uncertainty(self, specialists: Mapping[str, System]) -> None:
        """What confidences are worth, as uncertainty.csv and figures/."""
        measure = next((name for name in self._setting.evaluation.measures if name == "R@1"), None)
        if measure is None:
            logger.info("no figures of confidence: they need the measure R@1")
            return
        fused = {
            task: QueryArrays.open(split_path(self._roots[MUF] / "lists", task, _TEST), FUSED_LISTS)
            for task in self._tasks
        }
        found, weights = [], {}
        for place, (name, system) in enumerate(specialists.items()):
            directory = self._root / "specialists" / file_name(name)
            sure, correct = {}, {}
            for task, arrays in fused.items():
                column = arrays.arrays["confidence"][:, place]
                w = dict(zip(arrays.query_ids, column, strict=True))
                judged = self._rows[name][task]
                sure[task] = np.array([w[query_id] for query_id in judged.query_ids])
                correct[task] = judged.values[measure] > 0
            table = read_reliability(directory)
            own = tuple(system.tasks or ())
            found.append(SpecialistUncertainty(name, own, sure, correct, table))
        for task in self._tasks:
            columns = np.stack([one.confidence[task] for one in found], axis=1)
            weights[task] = weights_of(columns, self._fusion.config).values
        write_text(self._root / "uncertainty.csv", uncertainty_csv(found))
        for name, figure in uncertainty_figures(found, weights).items():
            with replacing(self._root / "figures" / name) as scratch:
                figure.savefig(scratch, format="png")

    def _table(self, directory: pathlib.Path, name: str, rows: Sequence[str]) -> ResultsTable:
        """Rows of a directory as a table of their own, written beside the others."""
        found = read_results(directory / "results", rows)
        table = ResultsTable.of(found, by_task=self._setting.evaluation.measures[-1])
        if self._setting.significance is not None:
            compared = compare_rows(
                directory, found, split=_TEST, config=self._setting.significance
            )
            table = dataclasses.replace(table, comparisons=compared)
        table.write(self._root, name=name)
        return table


def _of_size(members: int) -> str:
    return f"MUF, {members} members"


def _with_bm25(row: str) -> str:
    return f"{row} + BM25"


def _check(
    specialists: Mapping[str, System],
    joint: Mapping[str, System],
    fusion: Fusion,
    known: Mapping[str, Sequence[str]],
) -> None:
    """Rejects names and tasks that do not fit before anything is computed."""
    names = [*specialists, *joint]
    rows = [*names, BM25, MUF, OWN, WORST, ORACLE, _WITHOUT_DOMAIN, _EQUAL, _LITERAL]
    if len(specialists) < 2 or len(set(map(file_name, rows))) < len(rows):
        raise ConfigError(
            f"models {', '.join(names) or 'none'}",
            where="pipeline_muf",
            expected="two specialists at least; names that differ in letters or digits from each "
            "other's and from the tables' rows",
        )
    for name, system in specialists.items():
        if not system.tasks:
            raise ConfigError(
                f"specialist {name!r} has no tasks",
                where="System.tasks",
                expected="the tasks that it is trained on",
                fix=f"bind {file_name(name)}/System.tasks = ['...']",
            )
    for name, system in {**specialists, **joint}.items():
        if unknown := sorted(set(system.tasks or ()) - known.keys()):
            raise ConfigError(
                f"{name!r} is to be trained on {', '.join(unknown)}",
                where="System.tasks",
                expected=f"tasks of the token store: {', '.join(known)}",
            )
    if fusion.left_out is not None and fusion.left_out not in specialists:
        raise ConfigError(
            f"{fusion.left_out!r} is no specialist",
            where="Fusion.left_out",
            expected=f"one of {', '.join(specialists)}",
        )
    if fusion.left_out is not None and len(specialists) < 3:
        raise ConfigError(
            f"{len(specialists)} specialists without {fusion.left_out!r}",
            where="Fusion.left_out",
            expected="two left at least",
            fix="add a specialist, or set left_out to None",
        )


CONFIGURABLES = (
    *dict.fromkeys((*TASER_CONFIGURABLES, *ENSEMBLE_CONFIGURABLES, *FUSE_CONFIGURABLES)),
    Fusion,
    MixedConfig,
)
