"""Retrieval tasks over a collection's query sets, by name.

Registration needs neither data nor vocabulary, nor SeqIO unless a task has preprocessors of its
own. Those registered after a module has imported SeqIO are in SeqIO's registries, too, and SeqIO's
mixtures of them are found here.

Example:
    add_retrieval_task("trivia", collection="wikipedia")
    add_retrieval_mixture("open_qa", ["trivia", ("open_qa_nq", 2.0)], default_rate=1.0)
    find_mixture("open_qa").tasks
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

from taser_jax.data.collections.store import list_tasks
from taser_jax.data.seqio_tasks.retrieval_task import (
    Preprocessor,
    Rate,
    RetrievalMixture,
    RetrievalTask,
    number_of_queries,
)
from taser_jax.data.text.preprocessors import TaskPrompt, check_length
from taser_jax.data.token_store.store import QueryNormalization, Titles
from taser_jax.storage.errors import ConfigError, did_you_mean, how_to_install

if TYPE_CHECKING:
    import seqio

_tasks: dict[str, RetrievalTask] = {}
_mixtures: dict[str, RetrievalMixture] = {}
# Collection -> form of its passages, and the prompt before them.
_passages: dict[str, tuple[Titles, TaskPrompt]] = {}


def add_retrieval_task(
    name: str,
    *,
    collection: str,
    task: str | None = None,
    normalization: QueryNormalization = QueryNormalization.NONE,
    query_preprocessors: Sequence[Preprocessor] = (),
    prompt: TaskPrompt = TaskPrompt(),
    query_length: int | None = None,
    source: seqio.DataSource | None = None,
    source_preprocessors: Sequence[Preprocessor] = (),
) -> RetrievalTask:
    """Registers a task of a collection.

    In SeqIO its examples have `query` (token ids), `query_pretokenized`, `query_row`, `query_id`,
    `positives` and `hard_negatives` (rows of the passage store).

    Args:
        name: the name to register it under.
        collection: the collection that its queries refer to.
        task: the task's name in the collection (a folder under `queries/`); `name` if None.
        normalization: normalisation of its queries.
        query_preprocessors: functions from data set to data set for examples whose `query` is
            still text, such as filters; SeqIO runs them.
        prompt: token ids before its queries; never truncated.
        query_length: length in tokens of its queries in a token store, including special tokens and
            prompt; None means the store's.
        source: source of its queries, if they were not prepared: any SeqIO source whose examples
            have `query`, `positives` (ids of passages) and optionally `query_id` and
            `hard_negatives`. `taser tokenize` writes them beside the collection.
        source_preprocessors: functions from data set to data set that give the source's examples
            these names.

    Raises:
        ConfigError: a length that leaves no room for special tokens, a name that is taken, or
            preprocessors without SeqIO.
    """
    if query_length is not None:
        check_length(query_length)
    added = RetrievalTask(
        name,
        collection,
        task or name,
        normalization,
        prompt,
        tuple(query_preprocessors),
        query_length,
        source,
        tuple(source_preprocessors),
    )
    if query_preprocessors:
        _import_seqio(f"task {name!r}, query_preprocessors")
    _register(added)
    _tasks[name] = added
    return added


def add_retrieval_mixture(
    name: str, tasks: Sequence[str | tuple[str, Rate]], *, default_rate: Rate = number_of_queries
) -> RetrievalMixture:
    """Registers a mixture, after checking that its tasks are registered.

    Args:
        name: the name to register it under.
        tasks: their names, or (name, rate).
        default_rate: rate of tasks without one; by default their number of training queries.

    Raises:
        ConfigError: there is no task, one is not registered (names the nearest) or is named twice,
            or the mixture's name is taken.
    """
    pairs = [(task, default_rate) if isinstance(task, str) else task for task in tasks]
    rates = dict(pairs)
    if not pairs or len(rates) < len(pairs):
        names = ", ".join(task for task, _ in pairs) or "no task"
        raise ConfigError(names, where=f"mixture {name!r}", fix="name one or more, each task once")
    for task in rates:
        if task not in _tasks:
            raise _unknown(task, set(_tasks), where=f"mixture {name!r}")
    added = RetrievalMixture(name, rates, tuple(_tasks[task] for task in sorted(rates)))
    _register(added)
    _mixtures[name] = added
    return added


def add_passages(
    collection: str, *, titles: Titles = Titles.INCLUDE, prompt: TaskPrompt = TaskPrompt()
) -> None:
    """Registers the form of a collection's passages; without it, they include their titles."""
    _passages[collection] = titles, prompt


def remove(name: str) -> None:
    """Removes a task or mixture, if it is registered, so that another can have its name."""
    _tasks.pop(name, None)
    _mixtures.pop(name, None)
    if seqio := sys.modules.get("seqio"):
        seqio.TaskRegistry.remove(name)
        seqio.MixtureRegistry.remove(name)


def names() -> set[str]:
    """All registered names; once a module has imported SeqIO, those of its mixtures, too."""
    seqio = sys.modules.get("seqio")
    return {*_tasks, *_mixtures, *(seqio.MixtureRegistry.names() if seqio else ())}


def find_mixture(name: str) -> RetrievalMixture:
    """A registered mixture, or a task as a mixture of its own.

    Raises:
        ConfigError: not registered (names the nearest), not of retrieval tasks, of tasks of several
            collections, or two of its tasks are of one query set.
    """
    if name in _tasks:
        mixture = RetrievalMixture(name, {name: 1.0}, (_tasks[name],))
    elif name in _mixtures:
        mixture = _mixtures[name]
    elif name in names():
        mixture = _import_seqio(name).find_mixture(name, _tasks)
    else:
        raise _unknown(name, names(), where="MIXTURE_OR_TASK_NAME")
    where = f"mixture {name!r}"
    if len(collections := sorted({task.collection for task in mixture.tasks})) > 1:
        problem = f"its tasks are of {len(collections)} collections, {', '.join(collections)}"
        fix = "prepare their files as one: `taser prepare FOLDER FOLDER --gin.COLLECTION=NAME`"
        raise ConfigError(problem, where=where, fix=fix)
    task_of_queries: dict[str, str] = {}
    for task in mixture.tasks:
        former = task_of_queries.setdefault(task.query_set, task.name)
        if former != task.name:
            problem = f"{former!r} and {task.name!r} are the same queries"
            fix = "name each task of a collection once"
            raise ConfigError(problem, where=where, fix=fix)
    return mixture


def mixture_of_collection(
    data_dir: str | os.PathLike[str],
    collection: str,
    *,
    prompt: TaskPrompt = TaskPrompt(),
    titles: Titles = Titles.INCLUDE,
    passage_prompt: TaskPrompt = TaskPrompt(),
) -> RetrievalMixture:
    """All tasks of a prepared collection with default settings, which are not registered.

    Task `what` of collection `faq` is named `faq.what`, and the mixture `faq`.

    Args:
        data_dir: folder of collections.
        collection: one that was prepared with queries.
        prompt: prompt before the queries of all tasks.
        titles: how the passages' titles become tokens, unless a module registered it.
        passage_prompt: prompt before the passages, unless a module registered one.
    """
    tasks = [
        RetrievalTask(f"{collection}.{task}", collection, task, prompt=prompt)
        for task in list_tasks(data_dir, collection)
    ]
    return RetrievalMixture(
        collection,
        dict.fromkeys((task.name for task in tasks), number_of_queries),
        tuple(tasks),
        titles,
        passage_prompt,
    )


def form_of_passages(
    collection: str, mixture: RetrievalMixture | None = None
) -> tuple[Titles, TaskPrompt]:
    """How a collection's passages become tokens: as registered, else as the mixture says."""
    if mixture is None:
        return _passages.get(collection, (Titles.INCLUDE, TaskPrompt()))
    return _passages.get(collection, (mixture.titles, mixture.passage_prompt))


def _register(item: RetrievalTask | RetrievalMixture) -> None:
    """Refuses a name that is taken; registers with SeqIO if that has been imported."""
    seqio = sys.modules.get("seqio")
    if item.name in names() or (seqio and item.name in seqio.TaskRegistry.names()):
        fix = "choose another name, or remove the former with taser_jax.tasks.remove_task"
        where = "registration of tasks"
        raise ConfigError(f"{item.name!r} is registered already", where=where, fix=fix)
    if seqio:
        _import_seqio(item.name).add(item)


def _unknown(name: str, registered: set[str], *, where: str) -> ConfigError:
    return ConfigError(
        f"no mixture or task {name!r} is registered",
        where=where,
        expected=f"one of {', '.join(sorted(registered)) or '(none is registered)'}",
        fix=did_you_mean(name, registered) or "import the module that registers it",
    )


def _import_seqio(needed_by: str) -> types.ModuleType:
    try:
        from taser_jax.data.seqio_tasks import in_seqio
    except ImportError as error:
        problem = f"SeqIO or TensorFlow is not installed ({error})"
        expected = "both, for preprocessors, sources and rates that SeqIO runs"
        fix = how_to_install("tensorflow")
        raise ConfigError(problem, where=needed_by, expected=expected, fix=fix) from error
    return in_seqio
