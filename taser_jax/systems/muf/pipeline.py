"""`taser pipeline muf`: specialists trained apart and fused by confidence; DPR-MUF's tables."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.evaluate import EvaluationConfig, evaluate
from taser_jax.commands.inputs import tasks_with
from taser_jax.commands.pipelines.retrieval_stages import (
    DEVELOPMENT,
    RetrievalStages,
    Setting,
    System,
    check_untrained,
)
from taser_jax.commands.pipelines.stages import pipeline_records
from taser_jax.data.collections.store import PassageStore
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.evaluation.results import read_results
from taser_jax.retrieval.fusion import Weighting
from taser_jax.storage.artifacts import file_name, fingerprint_json
from taser_jax.storage.errors import ConfigError, check_known
from taser_jax.storage.progress import logger
from taser_jax.systems.muf import tables
from taser_jax.systems.muf.ensemble import ensemble
from taser_jax.systems.muf.ensemble_files import Ensemble, EnsembleTraining
from taser_jax.systems.muf.fuse import AddedBm25, Domain, FusionSummary, fuse
from taser_jax.systems.muf.oracle import BayesianConfig
from taser_jax.systems.muf.specialists import Weighing


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How specialists are weighed and fused.

    Attributes:
        ensemble: how each specialist's ensemble is trained.
        weighing: depth of the lists, confidences, temperatures, weights.
        sizes: numbers of members that further rows fuse with, for the curve over sizes (the
            paper's figure 2); the first members of each ensemble.
        left_out: a specialist that further rows do without, as the paper's do without SQuAD.
        mixed: the mixes of queries.
        oracle: how the Bayesian oracle of the mixes searches; None leaves its row out.
    """

    ensemble: EnsembleTraining = EnsembleTraining()
    weighing: Weighing = Weighing()
    sizes: tuple[int, ...] = ()
    left_out: str | None = None
    mixed: tables.MixedConfig = tables.MixedConfig()
    oracle: BayesianConfig | None = BayesianConfig()


@dataclasses.dataclass(frozen=True)
class _Model:
    """A trained model: its folder, its parameters, and those of a member of its ensemble."""

    root: pathlib.Path
    parameters: int
    member_parameters: int = 0


class MufStages(RetrievalStages):
    """The stages of one directory.

    Args:
        setting: what all stages share.
        fusion: how specialists are fused.

    Attributes:
        values: row -> its values by query, of all fusions so far.
    """

    def __init__(self, setting: Setting, fusion: Fusion) -> None:
        # BM25's lists are as deep as the specialists' that they are added to.
        super().__init__(
            dataclasses.replace(setting, k=max(setting.k, fusion.weighing.fusion.depth))
        )
        self._fusion, collection = fusion, self.store.metadata.collection
        self._fusing: dict[str, Any] = {
            "data_dir": setting.data_dir,
            "collection": collection,
            "lists_dir": self.root / "specialists",
            "weighing": fusion.weighing,
            "k": setting.k,
            "evaluation": setting.evaluation,
            "own_passage_tasks": list(setting.own_passage_tasks),
        }
        passages = PassageStore.open(setting.data_dir, collection)
        self._tasks = tasks_with(passages, split=tables.TEST, tasks=setting.tasks)
        self._models: dict[str, _Model] = {}
        self.values: dict[str, tables.Evaluations] = {}

    def model(self, name: str, system: System, *, with_ensemble: bool) -> None:
        """Trains, encodes and indexes a model, and a specialist's ensemble."""
        label, setting = file_name(name), self.setting
        training = system.training(setting.training)
        tasks, negatives = list(system.tasks or self._tasks), self.root / "bm25" / "negatives"
        trained = self.train(label, system.model, training, negatives_dirs=[negatives], tasks=tasks)
        self.retrieve(label, splits=())
        root, member_parameters = self.root / label, 0
        if with_ensemble:
            self.stages.run(
                f"{label}-ensemble",
                _ensemble,
                embeddings_dir=root / "embeddings",
                output_dir=root / "ensemble",
                training=self._fusion.ensemble,
                token_store=setting.token_store,
                tasks=tasks,
                negatives_dirs=[str(negatives)],
            )
            member_parameters = Ensemble.open(str(root / "ensemble")).member_parameters
        self._models[name] = _Model(root, trained.parameters, member_parameters)

    def untrained(self, name: str, system: System) -> None:
        """Imports, encodes and indexes a model with its pretrained weights."""
        label = file_name(name)
        parameters = self.import_model(label, system.model)
        self.retrieve(label, splits=())
        self._models[name] = _Model(self.root / label, parameters)

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
        for size in fusion.sizes:
            self.fuse(tables.of_size(size), singles, members=size)
        if fusion.oracle is not None:
            tasks = list(self.own(specialists))
            self.fuse(tables.BAYESIAN, singles, oracle=fusion.oracle, tasks=tasks)
        return [*rows, tables.WITHOUT_DOMAIN, tables.EQUAL]

    def own(self, specialists: Mapping[str, System]) -> dict[str, str]:
        """Task -> its specialist; the first of several."""
        owner: dict[str, str] = {}
        for name, system in specialists.items():
            for task in system.tasks or ():
                owner.setdefault(task, name)
        return {task: owner[task] for task in self._tasks if task in owner}

    def fuse(
        self,
        row: str,
        names: Sequence[str],
        *,
        domain: Domain = Domain.INCLUDED,
        weighing: Weighing | None = None,
        members: int | None = None,
        oracle: BayesianConfig | None = None,
        tasks: Sequence[str] | None = None,
    ) -> None:
        """Fuses models' lists and evaluates them, alone and, without an oracle, with BM25.

        A single model's lists are taken as they are. Stage and folder depend on the models, so that
        a specialist can be added to a finished run.
        """
        setting = self.setting
        label = f"{file_name(row)}-{fingerprint_json(list(names))[:6]}"
        root, tasks = self.root / "fusions" / label, tasks or self._tasks
        fusing = self._fusing | ({} if weighing is None else {"weighing": weighing})
        folders, bm25 = {row: "runs"}, AddedBm25()
        if oracle is None:
            folders[tables.with_bm25(row)] = "runs_bm25"
            runs_dir = str(self.root / "bm25" / "runs")
            bm25 = AddedBm25(runs_dir, setting.hybrid, setting.hybrid_measure)
        models = {name: self._models[name] for name in names}
        count = members or self._fusion.ensemble.model.members
        if not fusing["weighing"].fusion.weighs(len(names)):
            count = 0
        parameters = sum(
            model.parameters + count * model.member_parameters for model in models.values()
        )
        read = ("embeddings", "exact", "ensemble")
        self.stages.run(
            f"{label}-fuse",
            _fuse_and_evaluate,
            folders=folders,
            parameters=parameters,
            read=[model.root / part for model in models.values() for part in read],
            specialists={name: model.root for name, model in models.items()},
            output_dir=root,
            split=tables.TEST,
            tasks=tasks,
            tag=file_name(row),
            domain=domain,
            bm25=bm25,
            members=members,
            oracle=oracle,
            **fusing,
        )
        for name in folders:
            self.values[name] = evaluations = tables.read_row(root, name, tasks, split=tables.TEST)
            [evaluated] = read_results(root / "results", [name])
            tables.write_row(self.root, name, evaluations, split=tables.TEST, evaluated=evaluated)


@functools.wraps(ensemble)
def _ensemble(**arguments: Any) -> dict[str, str]:
    return dict(ensemble(**arguments).fingerprints)


@writes("{output_dir}")
def _fuse_and_evaluate(
    *,
    folders: Mapping[str, str],
    parameters: int,
    read: Sequence[str],
    output_dir: str,
    evaluation: EvaluationConfig,
    **options: Any,
) -> FusionSummary:
    """Fuses and evaluates.

    `folders` are row -> folder of its runs; on what the specialists' folders hold, `read`, the
    stage depends.
    """
    del read
    summary = fuse(output_dir=output_dir, evaluation=evaluation, **options)
    shared = {name: options[name] for name in ("data_dir", "collection", "tasks")}
    alphas = ", ".join(f"{task} {alpha:g}" for task, alpha in summary.alphas.items())
    for name, folder in folders.items():
        evaluate(
            runs_dir=str(pathlib.Path(output_dir) / folder),
            output_dir=output_dir,
            system=name,
            config=evaluation,
            parameters=parameters,
            details={"alpha": alphas} if folder == "runs_bm25" else {},
            significance=None,
            **shared,
        )
    return summary


class LeaveOneOut(enum.Enum):
    """Whether joint models are trained that have not seen a domain.

    NONE: only those of `joint`. EACH: one without each specialist's tasks.
    """

    NONE = "none"
    EACH = "each"


@writes("{setting.output_dir}", kinds=[])
def pipeline_muf(
    *,
    setting: Setting,
    specialists: Mapping[str, System],
    joint: Mapping[str, System],
    leave_one_out: LeaveOneOut = LeaveOneOut.NONE,
    untrained: Mapping[str, System] | None = None,
    fusion: Fusion = Fusion(),
    config_text: str = "",
) -> Mapping[str, ResultsTable]:
    """Trains specialists and joint models, fuses the specialists, and prints DPR-MUF's tables.

    BM25 and its negatives -> train, encode and index every model on its own tasks -> an ensemble
    for every specialist -> lists of all tasks' queries -> temperatures -> fused lists -> tables:
    of single, joint and fused models by task (domains.md, the paper's table 2), on mixes of tasks
    (mixed.md, table 3) and with BM25 added (bm25.md, table 4). If interrupted, rerun the command to
    resume. Of a specialist that is added later, only its training and fusions with it are run.

    Args:
        setting: what all stages share; `setting.tasks` are those searched.
        specialists: name -> a model with `tasks` of its own.
        joint: name -> a model of several tasks, to compare with; its `train_steps` should let it
            see as many queries as the specialists together.
        leave_one_out: 'each': for every specialist, the first joint model is trained again on the
            other specialists' tasks, for as many steps as they have together ("Joint without NQ").
        untrained: name -> a model that is shown as its pretrained weights left it.
        fusion: ensembles, weights and mixes.
        config_text: written to config.gin.

    Returns:
        The tables: "domains", "bm25", "mixed" and, where there are sizes, "sizes".

    Raises:
        ConfigError: names, tasks or steps that do not fit, or another run's directory.
        StorageError: the directory cannot be written.
    """
    store = setting.open_tokens()
    untrained = untrained or {}
    _check(specialists, joint, fusion, store.tasks)
    tables.check(specialists, setting, fusion.mixed, store.metadata.collection)
    unseen: dict[str, str] = {}
    if leave_one_out is LeaveOneOut.EACH:
        without = without_each(specialists, joint, setting.training)
        joint, unseen = {**joint, **without}, dict(zip(specialists, without, strict=True))
    trained = {**specialists, **joint}
    check_untrained(setting, untrained, trained, where="pipeline_muf.untrained")
    with pipeline_records(setting.output_dir, config_text):
        run = MufStages(setting, fusion)
        run.bm25(("train", DEVELOPMENT, tables.TEST))
        for name, system in untrained.items():
            run.untrained(name, system)
        for name, system in trained.items():
            run.model(name, system, with_ensemble=name in specialists)
        fusions = run.fusions(specialists)
        models = [*untrained, *joint]
        for name in (*specialists, *models):
            run.fuse(name, [name])
        shown = tables.write_tables(
            setting,
            run.values,
            run.own(specialists),
            specialists=list(specialists),
            models=models,
            fusions=fusions,
            unseen=unseen,
            sizes=fusion.sizes,
            mixed=fusion.mixed,
        )
        for name, table in shown.items():
            print(f"\n{table.to_text()}")
            logger.info("table: %s (and .csv, .png)", f"{setting.output_dir}/{name}.md")
        return shown


def without_each(
    specialists: Mapping[str, System], joint: Mapping[str, System], training: TrainingConfig
) -> dict[str, System]:
    """A joint model of the others for each specialist, of as many queries as they see together.

    Example:
        With 100 steps each of SQuAD, NQ and FewRel, the model "Joint without NQ" is the first joint
        model, trained on the other two sets for 200 steps.

    Args:
        specialists: name -> a model with tasks of its own.
        joint: name -> a joint model; the first one is trained again.
        training: what all trainings share.

    Returns:
        Name -> the model, in the order of specialists.

    Raises:
        ConfigError: no joint model, or a task of two specialists.
    """
    tasks = [task for system in specialists.values() for task in system.tasks or ()]
    if not joint or len(set(tasks)) < len(tasks):
        problem = f"there are {len(joint)} joint models, and specialists of {', '.join(tasks)}"
        fix = "bind a joint model and specialists without a common task, or set it to 'none'"
        raise ConfigError(problem, where="pipeline_muf.leave_one_out", fix=fix)
    name, system = next(iter(joint.items()))
    models = {}
    for left_out in specialists:
        others = [other for single, other in specialists.items() if single != left_out]
        models[f"{name} without {left_out}"] = dataclasses.replace(
            system,
            tasks=[task for other in others for task in other.tasks or ()],
            train_steps=sum(other.training(training).loop.train_steps for other in others),
        )
    return models


def _check(
    specialists: Mapping[str, System],
    joint: Mapping[str, System],
    fusion: Fusion,
    tasks: Mapping[str, Sequence[str]],
) -> None:
    """Rejects names and tasks that do not fit before anything is computed."""
    names = [*specialists, *joint]
    rows = [*names, *tables.OTHER_ROWS]
    if len(specialists) < 2 or len(set(map(file_name, rows))) < len(rows):
        problem = f"the models are {', '.join(names) or 'none'}"
        fix = "give two specialists at least, and names that differ from the tables' other rows"
        raise ConfigError(problem, where="pipeline_muf", fix=fix)
    for name, system in specialists.items():
        if not system.tasks:
            fix = f"bind {file_name(name)}/System.tasks = ['...']"
            raise ConfigError(f"specialist {name!r} has no tasks", where="System.tasks", fix=fix)
    for name, system in {**specialists, **joint}.items():
        check_known(system.tasks or (), tasks, where=f"System.tasks of {name!r}")
    members = fusion.ensemble.model.members
    if wrong := [size for size in fusion.sizes if not 2 <= size <= members]:
        problem, fix = f"{wrong[0]} members of an ensemble of {members}", f"take 2 to {members}"
        raise ConfigError(problem, where="Fusion.sizes", fix=fix)
    left = [name for name in specialists if name != fusion.left_out]
    if fusion.left_out is not None and not 1 < len(left) < len(specialists):
        problem = f"without {fusion.left_out!r} the specialists are {', '.join(left)}"
        fix = f"name one of three or more, or set it to None: there are {', '.join(specialists)}"
        raise ConfigError(problem, where="Fusion.left_out", fix=fix)
