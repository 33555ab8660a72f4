"""What run.json records of a run: its settings, its data, and how its texts became tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from taser_jax.assembly.config import TrainingConfig
from taser_jax.assembly.model_directory import read_settings
from taser_jax.data.batches.every_task import Stream
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles, TokenStore
from taser_jax.models import config_io
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import flatten

Changes = Mapping[str, tuple[object, object]]
"""Path of a setting -> (its former value, its value now)."""

_UNSET = "unset"
# Of these, none changes what a step computes, but for the schedule that follows the steps.
_MAY_CHANGE = (
    "training.loop.",
    "training.checkpoints.",
    "training.validation",
    "training.mesh.",
    "training.num_chunks",
    "training.length_buckets",
    "training.states_dir",
    "training.pretrained.source",
)


def settings_of(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    store: TokenStore,
    queries: Mapping[str, TokenizedQueries],
) -> dict[str, object]:
    """Every setting and fingerprint that decides what is trained, by its path.

    Args:
        model: the model, with its vocabulary's size.
        training: how it is trained.
        store: tokens of the passages.
        queries: task -> queries trained on, with their negatives.
    """
    content = {task: of_task.fingerprint for task, of_task in queries.items()}
    return flatten(
        model=json.loads(config_io.to_json(model)),
        training=training,
        data={"passages": store.metadata.passages_fingerprint, "queries": content},
    )


def check_settings(
    model_dir: FilePath, settings: Mapping[str, object], *, step: int, accept_changes: bool
) -> Changes:
    """Compares a run's settings with those that its newest checkpoint was trained with.

    Example:
        Another learning rate in the directory of a model of 300 steps is refused::

            models/faq: settings differ from those that step 300 was trained with:
                training.optimizer.learning_rate: was 2e-05, now 5e-05
              expected: the former settings; steps, periods, validation and mesh may change
              fix: train into a new MODEL_DIR, ...

    Args:
        model_dir: the directory.
        settings: of this run, from `settings_of`.
        step: of the newest checkpoint.
        accept_changes: whether settings of training and data may differ; a model's never may.

    Returns:
        What differs and may; empty where no settings were kept.

    Raises:
        FingerprintError: naming every setting that may not change, old and new.
    """
    former = read_settings(model_dir)
    # As JSON gives them back.
    changes = _changes(former, json.loads(json.dumps(dict(settings)))) if former else {}
    refused = {
        name: change
        for name, change in changes.items()
        if not (name.startswith(_MAY_CHANGE) or accept_changes) or name.startswith("model.")
    }
    if refused:
        of_model = any(name.startswith("model.") for name in refused)
        go_on = "" if of_model else ", or go on with --gin.train.accept_changes=True"
        problem = f"settings differ from those that step {step} was trained with:{_listed(refused)}"
        expected = "the former settings; steps, periods, validation and mesh may change"
        fix = f"train into a new MODEL_DIR, go back to the former settings{go_on}"
        raise FingerprintError(problem, where=str(model_dir), expected=expected, fix=fix)
    if changes:
        logger.info("settings changed after step %d:%s", step, _listed(changes))
    return changes


def _changes(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """What differs; settings that only one version of the code has are none of the user's.

    Example:
        `training.multitask` gone is a change where `training.multitask.batching.total` came.
    """

    def exists(name: str) -> bool:
        parents = (name[:dot] for dot, letter in enumerate(name) if letter == ".")
        children = (other.startswith(f"{name}.") for other in new)
        return name in new or any(parent in new for parent in parents) or any(children)

    names = [name for name in old if name.startswith("data.") or exists(name)]
    names += [name for name in new if name.startswith("data.") and name not in old]
    return {
        name: (old.get(name, _UNSET), new.get(name, _UNSET))
        for name in names
        if old.get(name, _UNSET) != new.get(name, _UNSET)
    }


def _listed(changes: Changes) -> str:
    return "".join(f"\n    {name}: was {old}, now {new}" for name, (old, new) in changes.items())


def data_facts(stream: Stream, store: TokenStore, *, train_steps: int) -> dict[str, object]:
    """Facts about a run's data."""
    return {
        "batches_per_epoch": stream.batches_per_epoch,
        "steps_per_epoch": stream.steps_per_epoch,
        "epochs": round(train_steps / stream.steps_per_epoch, 2),
        "data_fingerprint": stream.fingerprint,
        "collection": store.metadata.collection,
        "collection_fingerprint": store.metadata.collection_fingerprint,
        **_text_facts(store, stream.batches_per_epoch),
    }


def _text_facts(store: TokenStore, tasks: Iterable[str]) -> dict[str, object]:
    """How texts became tokens: one value, or one per task where they differ."""
    trained_on = set(tasks)
    entries = [e for e in store.metadata.queries if e.task in trained_on and e.split == "train"]
    facts: dict[str, object] = {
        "query_normalization": joined({entry.task: entry.normalization for entry in entries}),
        "titles": store.metadata.titles,
    }
    if any(entry.prompt for entry in entries):
        facts["query_prompt"] = joined({e.task: list(e.prompt) for e in entries})
    if any(entry.length != store.metadata.query_length for entry in entries):
        facts["query_lengths"] = {entry.task: entry.length for entry in entries}
    if store.metadata.passage_prompt:
        facts["passage_prompt"] = list(store.metadata.passage_prompt)
    return facts


def joined(by_task: Mapping[str, object]) -> object:
    """The value of all tasks where it is one, or else task -> value."""
    first, *others = by_task.values()
    return first if all(other == first for other in others) else dict(by_task)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a run's texts became tokens.

    Attributes:
        queries: prompt and markers of the task's queries.
        query_length: tokens per query; None if unknown.
        passage_length: tokens per passage; None if unknown.
        titles: whether passages have titles.
        passage_prompt: ids before passages.
    """

    queries: QuerySettings
    query_length: int | None
    passage_length: int | None
    titles: Titles
    passage_prompt: tuple[int, ...] = ()


def text_settings(facts: Mapping[str, Any], task: str | None) -> TextSettings:
    """How texts became tokens, from run.json; defaults for what it does not record.

    Args:
        facts: run.json.
        task: the queries' task; needed where tasks differ.

    Raises:
        ConfigError: tasks differ, and `task` is none of them.
    """
    normalization = _of_task(facts, "query_normalization", task)
    prompt = _of_task(facts, "query_prompt", task)
    lengths = facts.get("query_lengths")
    length = _of_task(facts, "query_lengths", task) if lengths else facts.get("query_length")
    return TextSettings(
        queries=QuerySettings(QueryNormalization(normalization or "none"), tuple(prompt or ())),
        query_length=length,
        passage_length=facts.get("passage_length"),
        titles=Titles(facts.get("titles") or "include"),
        passage_prompt=tuple(facts.get("passage_prompt") or ()),
    )


def task_names(facts: Mapping[str, object]) -> tuple[str, ...]:
    """Tasks whose prompt, length or normalisation run.json names; none where all are alike."""
    by_task = (facts.get(f"query_{name}") for name in ("prompt", "lengths", "normalization"))
    return tuple(
        dict.fromkeys(name for value in by_task if isinstance(value, Mapping) for name in value)
    )


def _of_task(facts: Mapping[str, object], name: str, task: str | None) -> Any:
    value = facts.get(name)
    if not isinstance(value, Mapping) or not value:
        return value or None
    if task not in value:
        problem = f"{name} differs among the tasks, and the task is {task!r}"
        fix = f"--gin.export_model.task={next(iter(value))!r}, or ask.task"
        raise ConfigError(problem, where="run.json", expected=f"one of {', '.join(value)}", fix=fix)
    return value[task]
