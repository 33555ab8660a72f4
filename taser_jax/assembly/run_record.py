"""What a training run leaves beside its checkpoints, for people and for later commands."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from taser_jax.assembly.model_directory import MODEL_FILE, RUN_FILE, VOCABULARY
from taser_jax.assembly.plans import BatchPlan
from taser_jax.data.token_store.store import TokenStore
from taser_jax.data.token_store.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.errors import ConfigError
from taser_jax.models import config_io
from taser_jax.models.build import ModelConfig


def data_facts(plan: BatchPlan, store: TokenStore, *, train_steps: int) -> dict[str, Any]:
    """What the data of a run was."""
    return {
        "batches_per_epoch": plan.batches_per_epoch,
        "steps_per_epoch": plan.steps_per_epoch,
        "epochs": round(train_steps / plan.steps_per_epoch, 2),
        "data_fingerprint": plan.fingerprint,
        "collection": store.metadata.collection,
        "collection_fingerprint": store.metadata.collection_fingerprint,
        **_text_facts(store, plan.batches_per_epoch),
    }


def _text_facts(store: TokenStore, tasks: Iterable[str]) -> dict[str, Any]:
    """How texts became tokens: one value, or one a task where tasks differ; unknown is left out."""
    wanted = set(tasks)
    entries = [e for e in store.metadata.queries if e.task in wanted and e.split == "train"]
    facts: dict[str, Any] = {}
    if any(entry.normalization is not None for entry in entries):
        facts["query_normalization"] = _joined({e.task: e.normalization for e in entries})
    if any(entry.prompt for entry in entries):
        facts["query_prompt"] = _joined({e.task: list(e.prompt) for e in entries})
    if any(entry.length != store.metadata.query_length for entry in entries):
        facts["query_lengths"] = {entry.task: entry.length for entry in entries}
    if store.metadata.titles is not None:
        facts["titles"] = store.metadata.titles
    return facts


def _joined(by_task: Mapping[str, Any]) -> Any:
    first, *others = by_task.values()
    return first if all(other == first for other in others) else dict(by_task)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a run's texts became tokens.

    Attributes:
        queries: of the task asked for.
        query_length: tokens of its queries; None where nothing tells it.
        titles: whether passages have them.
    """

    queries: QuerySettings
    query_length: int | None
    titles: Titles


def read_facts(model_dir: pathlib.Path) -> dict[str, Any]:
    """run.json; empty where a model was trained before it was written."""
    path = model_dir / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def text_settings(facts: Mapping[str, Any], task: str | None) -> TextSettings:
    """What run.json says of texts; what it does not say is as for a task without settings.

    Args:
        facts: run.json.
        task: whose queries; needed where tasks differ.

    Raises:
        ConfigError: tasks differ, and `task` is none of them.
    """
    prompt = _of_task(facts, "query_prompt", task) or ()
    lengths = facts.get("query_lengths")
    length = _of_task(facts, "query_lengths", task) if lengths else facts.get("query_length")
    return TextSettings(
        queries=QuerySettings(
            QueryNormalization(_of_task(facts, "query_normalization", task) or "none"),
            tuple(prompt),
        ),
        query_length=length,
        titles=Titles(facts.get("titles") or "include"),
    )


def _of_task(facts: Mapping[str, Any], name: str, task: str | None) -> Any:
    value = facts.get(name)
    if not isinstance(value, Mapping):
        return value
    if task not in value:
        raise ConfigError(
            f"{name} differs among the tasks, and the task is {task!r}",
            where=RUN_FILE,
            expected=f"one of {', '.join(value)}",
            fix=f"--gin.TASK={next(iter(value))!r}",
        )
    return value[task]


def write_run_record(
    model_dir: epath.PathLike,
    *,
    model_config: ModelConfig,
    facts: Mapping[str, Any],
    parameter_table: str,
    config_text: str,
    vocabulary: pathlib.Path | None,
) -> None:
    """Writes model.json, config.gin, model-info.txt, run.json and the vocabulary.

    Args:
        model_dir: made where absent; a directory or a gs:// address.
        model_config: the model.
        facts: of the run; JSON-able.
        parameter_table: every parameter with shape, axes and sharding.
        config_text: the Gin configuration as it was resolved.
        vocabulary: directory of the vocabulary, copied; None where it is there already.
    """
    model_dir = epath.Path(model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / MODEL_FILE).write_text(config_io.to_json(model_config), encoding="utf-8")
    (model_dir / "config.gin").write_text(config_text, encoding="utf-8")
    (model_dir / "model-info.txt").write_text(parameter_table + "\n", encoding="utf-8")
    (model_dir / RUN_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if vocabulary is not None:
        for source in sorted(vocabulary.rglob("*")):
            if source.is_file():
                target = model_dir / VOCABULARY / source.relative_to(vocabulary).as_posix()
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
