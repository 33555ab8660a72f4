"""`settings.jsonl`: the settings a model was trained with, and from which step on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from taser_jax.assembly.config import TrainingConfig
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models import config_io
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.artifacts import FilePath, write_text
from taser_jax.storage.errors import DataError, FingerprintError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import flatten

SETTINGS_FILE = "settings.jsonl"

Changes = Mapping[str, tuple[object, object]]
"""Path of a setting -> (its former value, its value now)."""

_UNSET = "unset"
# Of these, none changes what a step computes, but for the schedule that follows the steps.
_MAY_CHANGE = (
    "training.loop.",
    "training.checkpoints.",
    "training.validation",
    "training.mesh.",
    "training.rules.",
    "training.num_chunks",
    "training.length_buckets",
    "training.schedule_steps",
    "training.states_dir",
    "training.teacher_embeddings",
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
    history = _read(model_dir)
    changes = _changes(history[-1]["settings"], _plain(settings)) if history else {}
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


def record_settings(model_dir: FilePath, settings: Mapping[str, object], *, step: int) -> None:
    """Adds the settings to settings.jsonl if they are new; from step 0 on, begins it anew."""
    history = _read(model_dir) if step else []
    plain = _plain(settings)
    if history and history[-1]["settings"] == plain:
        return
    history.append({"after_step": step, "settings": plain})
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in history)
    write_text(epath.Path(model_dir) / SETTINGS_FILE, "".join(lines))


def _read(model_dir: FilePath) -> list[dict[str, Any]]:
    path = epath.Path(model_dir) / SETTINGS_FILE
    if not path.is_file():
        return []
    try:
        history = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if all(isinstance(entry["settings"], dict) for entry in history):
            return history
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    expected = 'lines with an "after_step" and "settings"'
    fix = "restore the file, or delete it: settings are then no longer compared"
    raise DataError("not a history of settings", where=str(path), expected=expected, fix=fix)


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings as JSON gives them back."""
    return json.loads(json.dumps(dict(settings)))


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
