"""`taser pipeline muf`: specialists trained apart and fused by confidence; DPR-MUF's tables."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from taser_jax.assembly.config import TrainingConfig
from taser_jax.commands.pipelines.retrieval_stages import Setting, System, check_untrained
from taser_jax.commands.pipelines.taser import begin_pipeline
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.storage.artifacts import file_name
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger
from taser_jax.systems.muf.stages import Fusion, MufStages
from taser_jax.systems.muf.tables import OTHER_ROWS, write_tables


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
    resume at the interrupted stage. A specialist added to a finished run is trained, and fusions
    with it run anew; everything else is reused.

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
        The tables: "domains", "bm25" and, where there are mixes or sizes, "mixed" and "sizes".

    Raises:
        ConfigError: names, tasks or steps that do not fit, or another run's directory.
        StorageError: the directory cannot be written.
    """
    store = setting.open_tokens()
    untrained = untrained or {}
    _check(specialists, joint, fusion, store.tasks)
    unseen: dict[str, str] = {}
    if leave_one_out is LeaveOneOut.EACH:
        without = without_each(specialists, joint, setting.training)
        joint, unseen = {**joint, **without}, dict(zip(specialists, without, strict=True))
    trained = {**specialists, **joint}
    check_untrained(setting, untrained, trained, where="pipeline_muf.untrained")
    begin_pipeline(setting.output_dir, config_text)
    run = MufStages(setting, fusion)
    run.bm25()
    for name, system in untrained.items():
        run.untrained(name, system)
    for name, system in trained.items():
        run.model(name, system, with_ensemble=name in specialists)
    fusions = run.fusions(specialists)
    models = [*untrained, *joint]
    for name in (*specialists, *models):
        run.fuse(name, [name])
    tables = write_tables(
        setting,
        run.rows,
        run.own(specialists),
        specialists=list(specialists),
        models=models,
        fusions=fusions,
        unseen=unseen,
        sizes=fusion.sizes,
        mixed=fusion.mixed,
    )
    for name, table in tables.items():
        print(f"\n{table.to_text()}")
        logger.info("table: %s (and .csv, .png)", f"{setting.output_dir}/{name}.md")
    return tables


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
        title = f"there are {len(joint)} joint models, and specialists of {', '.join(tasks)}"
        fix = "bind a joint model and specialists without a common task, or set it to 'none'"
        raise ConfigError(title, where="pipeline_muf.leave_one_out", fix=fix)
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
    rows = [*names, *OTHER_ROWS]
    if len(specialists) < 2 or len(set(map(file_name, rows))) < len(rows):
        title = f"the models are {', '.join(names) or 'none'}"
        fix = "give two specialists at least, and names that differ from the tables' other rows"
        raise ConfigError(title, where="pipeline_muf", fix=fix)
    for name, system in specialists.items():
        if not system.tasks:
            fix = f"bind {file_name(name)}/System.tasks = ['...']"
            raise ConfigError(f"specialist {name!r} has no tasks", where="System.tasks", fix=fix)
    for name, system in {**specialists, **joint}.items():
        if unknown := sorted(set(system.tasks or ()) - tasks.keys()):
            title = f"{name!r} is to be trained on {', '.join(unknown)}"
            fix = f"choose tasks of the token store: {', '.join(tasks)}"
            raise ConfigError(title, where="System.tasks", fix=fix)
    left = [name for name in specialists if name != fusion.left_out]
    if fusion.left_out is not None and not 1 < len(left) < len(specialists):
        title = f"without {fusion.left_out!r} the specialists are {', '.join(left)}"
        fix = f"name one of three or more, or set it to None: there are {', '.join(specialists)}"
        raise ConfigError(title, where="Fusion.left_out", fix=fix)
