"""What several commands share: tasks of a collection, run files, answers in passages."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.evaluation.metrics import AnswerMatch, AnswerMatcher
from taser_jax.retrieval.bm25 import Bm25Config, Bm25Index, title_and_text
from taser_jax.retrieval.runs import NO_ROW, Run, read_trec_run
from taser_jax.storage.artifacts import split_path
from taser_jax.storage.errors import ConfigError, check_known, check_names_some


def run_path(runs_dir: str | pathlib.Path, task: str, split: str) -> pathlib.Path:
    """Path of the run of a task and split in a folder of runs."""
    return split_path(runs_dir, task, split, ".trec")


def tasks_with(
    store: PassageStore,
    *,
    split: str,
    tasks: Sequence[str] | None = None,
    where: str = "SPLIT",
    fix: str | None = None,
) -> list[str]:
    """The tasks of a collection that have a split.

    Args:
        store: its passages.
        split: "train", "validation" or "test".
        tasks: tasks wanted; None means every task that has the split.
        where: the setting that names the split, for messages.
        fix: what to do where it is missing; None means to take or prepare another.

    Raises:
        ConfigError: a task wanted does not exist or has no such split, or none has it or is wanted.
    """
    splits_of = store.tasks
    check_names_some(tasks)
    check_known(tasks or (), splits_of, where="TASKS")
    for task in tasks or ():
        if split not in splits_of[task]:
            problem = f"task {task!r} has no split {split!r}"
            fix = fix or f"take one of {', '.join(splits_of[task])}, or prepare this one"
            raise ConfigError(problem, where=where, fix=fix)
    with_split = list(tasks or ()) or sorted(task for task in splits_of if split in splits_of[task])
    if not with_split:
        problem = f"no task of collection {store.name!r} has a split {split!r}"
        raise ConfigError(problem, where=where, fix=fix or "prepare queries for it")
    return with_split


def read_task_run(runs_dir: str | pathlib.Path, queries: QuerySet, store: PassageStore) -> Run:
    """The run of a query set, aligned with it; empty for queries without results."""
    path = run_path(runs_dir, queries.task, queries.split)
    if not path.exists():
        fix = f"run `taser search` or `taser bm25` first, with --gin.SPLIT={queries.split}"
        raise ConfigError("no run of this task and split here", where=str(path), fix=fix)
    return read_trec_run(path, store.row_of, query_ids=[query.id for query in queries])


def open_bm25(store: PassageStore, index_dir: str | pathlib.Path, config: Bm25Config) -> Bm25Index:
    """BM25's index of a collection's titles and texts; built where there is none."""
    prints = {"collection": store.fingerprint}
    texts = map(title_and_text, store)
    return Bm25Index.build(texts, index_dir, config=config, fingerprints=prints)


def own_rows(store: PassageStore, query_ids: Sequence[str]) -> np.ndarray:
    """Row of the passage with each query's id; -1 if there is none."""
    rows = [store.find(query_id) for query_id in query_ids]
    return np.array([NO_ROW if row is None else row for row in rows], np.int32)


def check_own_passages(own_passage_tasks: Sequence[str], store: PassageStore) -> None:
    """Refuses a task that does not exist, or none of whose queries has the id of a passage.

    Raises:
        ConfigError: naming the task.
    """
    check_known(own_passage_tasks, store.tasks, where="OWN_PASSAGE_TASKS")
    for task in own_passage_tasks:
        sets = (store.queries(task, split) for split in store.tasks[task])
        if all(store.find(query.id) is None for queries in sets for query in queries):
            problem = f"no query of task {task!r} has the id of a passage"
            fix = "leave the task out: its queries are no passages, or have other ids"
            raise ConfigError(problem, where="OWN_PASSAGE_TASKS", fix=fix)


def answer_matcher(store: PassageStore, task: str, regex_tasks: Sequence[str]) -> AnswerMatcher:
    """Looks a task's answers up in the passages of a store.

    The last store's matchers stay in memory: the rows of a pipeline share the passages they read.
    """
    match = AnswerMatch.REGEX if task in regex_tasks else AnswerMatch.STRING
    matchers = _matchers_of(str(store.directory), store.fingerprint)
    if match not in matchers:
        matchers[match] = AnswerMatcher(
            lambda rows: [passage.text for passage in store.get_many(rows)], match=match
        )
    return matchers[match]


@functools.lru_cache(maxsize=1)
def _matchers_of(directory: str, fingerprint: str) -> dict[AnswerMatch, AnswerMatcher]:
    return {}
