"""What run.json records of a run's data and of how its texts became tokens, and reading it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from taser_jax.data.batches.stream import Stream
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles, TokenStore
from taser_jax.storage.errors import ConfigError


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
    """How texts became tokens: one value, or one per task where they differ; unknown is absent."""
    trained_on = set(tasks)
    entries = [e for e in store.metadata.queries if e.task in trained_on and e.split == "train"]
    facts: dict[str, object] = {}
    if any(entry.normalization is not None for entry in entries):
        facts["query_normalization"] = joined({e.task: e.normalization for e in entries})
    if any(entry.prompt for entry in entries):
        facts["query_prompt"] = joined({e.task: list(e.prompt) for e in entries})
    if any(entry.length != store.metadata.query_length for entry in entries):
        facts["query_lengths"] = {entry.task: entry.length for entry in entries}
    if store.metadata.passage_prompt:
        facts["passage_prompt"] = list(store.metadata.passage_prompt)
    if store.metadata.titles is not None:
        facts["titles"] = store.metadata.titles
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
        titles: whether passages have titles.
        passage_prompt: ids before passages.
    """

    queries: QuerySettings
    query_length: int | None
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
        titles=Titles(facts.get("titles") or "include"),
        passage_prompt=tuple(facts.get("passage_prompt") or ()),
    )


def task_names(facts: Mapping[str, object]) -> tuple[str, ...]:
    """Tasks whose prompt, length or normalisation run.json names; none where all are alike."""
    by_task = (facts.get(f"query_{name}") for name in ("prompt", "lengths", "normalization"))
    return tuple(
        dict.fromkeys(name for value in by_task if isinstance(value, Mapping) for name in value)
    )


def task_prompts(facts: Mapping[str, object], task: str | None) -> dict[str, tuple[int, ...]]:
    """Prompts of the tasks whose queries are tokenised like those of `task` except for the prompt.

    Args:
        facts: run.json.
        task: the queries' task; None where tasks do not differ.

    Returns:
        Task -> ids of its prompt; of the tasks that run.json names, and of `task`.
    """
    names = task_names(facts)
    reference = text_settings(facts, task)
    prompts = {}
    for name in dict.fromkeys([*names, *([] if task is None else [task])]):
        settings = text_settings(facts, name)
        prompt = settings.queries.prompt
        queries = dataclasses.replace(reference.queries, prompt=prompt)
        if settings == dataclasses.replace(reference, queries=queries):
            prompts[name] = prompt
    return prompts


def _of_task(facts: Mapping[str, object], name: str, task: str | None) -> Any:
    value = facts.get(name)
    if not isinstance(value, Mapping) or not value:
        return value or None
    if task not in value:
        problem = f"{name} differs among the tasks, and the task is {task!r}"
        fix = f"--gin.export_model.task={next(iter(value))!r}, or ask.task"
        raise ConfigError(problem, where="run.json", expected=f"one of {', '.join(value)}", fix=fix)
    return value[task]
