"""Retrieval tasks over a collection's query sets and passage store, by name.

Registration needs neither data nor vocabulary: both are looked up when a task is used, in the
`use_data` context around the use. Nor does it need SeqIO, unless a task has preprocessors of its
own. Once a module has imported SeqIO, all tasks and mixtures are in SeqIO's registries too, and
what is registered there is found here.

Example:
    add_retrieval_task("trivia", collection="wikipedia")
    add_retrieval_mixture("open_qa", ["trivia", ("open_qa_nq", 2.0)], default_rate=1.0)

    with use_data(data_dir="data", vocabulary=load_vocabulary("vocabulary")):
        (task,) = retrieval_tasks("trivia")
        tokens = [query.tokens for query in task.tokenized("validation", 32)]
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from taser_jax.data.collections.store import list_tasks
from taser_jax.data.seqio_tasks import names
from taser_jax.data.seqio_tasks.merged_collections import MergedSource, moved_tasks
from taser_jax.data.seqio_tasks.retrieval_task import (
    CollectionPassages,
    PassageTask,
    QueryTask,
    Rate,
    RetrievalMixture,
    RetrievalTask,
    number_of_queries,
)
from taser_jax.data.seqio_tasks.sources import OwnSource, PassageSource, QuerySource
from taser_jax.data.text.preprocessors import check_length
from taser_jax.data.text.prompts import TaskPrompt
from taser_jax.data.token_store.text_settings import QueryNormalization, Titles
from taser_jax.storage.errors import ConfigError

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

    from taser_jax.data.seqio_tasks.in_seqio import SeqioMixture

# Mixtures that `add_collection` registered.
_whole: set[str] = set()
Preprocessor = Callable[["tf.data.Dataset"], "tf.data.Dataset"]


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
) -> QueryTask:
    """Registers a task of a collection, and the collection's passages if they are not registered.

    In SeqIO its examples have `query` (token ids), `query_pretokenized`, `query_row`, `query_id`,
    `positives` and `hard_negatives` (rows of the passage store).

    Args:
        name: the name to register it under.
        collection: the collection that its queries refer to.
        task: the task's name in the collection (a folder under `queries/`); `name` if None.
        normalization: normalisation of its queries, applied first.
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

    Returns:
        The task.

    Raises:
        ConfigError: a length that leaves no room for special tokens, a name that is taken, or
            preprocessors without SeqIO.
    """
    if query_length is not None:
        check_length(query_length)
    if passages_task(collection) not in names.all_names():
        add_passages_task(passages_task(collection), collection=collection)
    queries = name if task is None else task
    if source is None:
        found = QuerySource(collection, queries, query_length=query_length)
    else:
        found = OwnSource(
            collection,
            queries,
            source,
            preprocessors=source_preprocessors,
            query_length=query_length,
        )
    plain = RetrievalTask(name, found, normalization, prompt)
    if query_preprocessors:
        names.check_free(name)
        in_seqio = names.seqio(f"task {name!r}, query_preprocessors")
        return in_seqio.add_task(plain, query_preprocessors=query_preprocessors)
    names.register(plain)
    return plain


def add_passages_task(
    name: str, *, collection: str, titles: Titles = Titles.INCLUDE
) -> CollectionPassages:
    """Registers the passages of a collection, in row order.

    `add_retrieval_task` does this with titles under the name `passages_task(collection)`. Call this
    function for another form of the passages, and pass its name to `tokenize_collection`.
    """
    passages = CollectionPassages(name, PassageSource(collection), titles)
    names.register(passages)
    return passages


def add_retrieval_mixture(
    name: str,
    tasks: Sequence[str | tuple[str, Rate]],
    *,
    default_rate: Rate = number_of_queries,
) -> RetrievalMixture | SeqioMixture:
    """Registers a mixture, after checking that its tasks are registered.

    Args:
        name: the name to register it under.
        tasks: their names, or (name, rate).
        default_rate: rate of tasks without one; by default their number of training queries.

    Returns:
        The mixture.

    Raises:
        ConfigError: there is no task, one is not registered (names the nearest) or is named twice,
            or the mixture's name is taken.
    """
    if not tasks:
        raise ConfigError("no task", where=f"mixture {name!r}", expected="one or more")
    pairs = [(task, default_rate) if isinstance(task, str) else task for task in tasks]
    rates = dict(pairs)
    if len(rates) < len(pairs):
        raise ConfigError(
            f"tasks {', '.join(name for name, _ in pairs)}",
            where=f"mixture {name!r}",
            expected="each task once",
        )
    found = [find_mixture_or_task(task, where=f"mixture {name!r}") for task in rates]
    plain = all(isinstance(task, RetrievalTask) for task in found)
    if plain and all(map(_is_plain, rates.values())):
        mixture = RetrievalMixture(name, rates)
        names.register(mixture)
        return mixture
    names.check_free(name)
    return names.seqio(f"mixture {name!r}").add_mixture(name, rates)


def remove(name: str) -> None:
    """Removes a task or mixture, if it is registered, so that another can have its name."""
    _whole.discard(name)
    names.remove(name)


def add_collection(
    data_dir: str | os.PathLike[str],
    collection: str,
    *,
    prompt: TaskPrompt = TaskPrompt(),
    titles: Titles = Titles.INCLUDE,
) -> str:
    """Registers all tasks of a prepared collection with default settings, and a mixture of them.

    Task `what` of collection `faq` becomes `faq.what`, and the mixture is `faq`. A module for
    `taser tokenize` to import is needed only for other settings. Registering again replaces all.

    Args:
        data_dir: folder of collections.
        collection: one that was prepared.
        prompt: prompt before the queries of all tasks.
        titles: how the passages' titles become tokens.

    Returns:
        The mixture's name: the collection's.

    Raises:
        ConfigError: the collection has no queries.
    """
    passages = passages_task(collection)
    if passages in _whole:
        remove(passages)
    # Those that a module registered keep their form.
    if passages not in names.all_names():
        add_passages_task(passages, collection=collection, titles=titles)
        _whole.add(passages)
    added = []
    for task in list_tasks(data_dir, collection):
        name = re.sub(r"[^\w.:]", "_", f"{collection}.{task}")
        remove(name)
        add_retrieval_task(name, collection=collection, task=task, prompt=prompt)
        added.append(name)
    if collection in _whole:
        remove(collection)
    add_retrieval_mixture(collection, added)
    _whole.add(collection)
    return collection


def is_registered(name: str) -> bool:
    """Whether a module registered this mixture or task; `add_collection`'s do not count."""
    return name in names.all_names() - _whole


def passages_task(collection: str) -> str:
    """Name under which a collection's passages are registered."""
    return f"{collection}_passages"


def find_mixture_or_task(name: str, *, where: str = "MIXTURE_OR_TASK_NAME") -> Any:
    """A registered mixture, task or collection's passages; other SeqIO tasks come unchanged.

    Args:
        name: the registered name.
        where: the setting that refers to it, for the message.

    Raises:
        ConfigError: the name is not registered; suggests the nearest.
    """
    if (found := names.registered_here(name)) is not None:
        return found
    if name not in (known := names.all_names()):
        nearest = difflib.get_close_matches(name, known, n=3)
        raise ConfigError(
            f"no mixture or task {name!r} is registered",
            where=where,
            expected=f"one of {', '.join(sorted(known)) or '(none is registered)'}",
            fix=f"did you mean {' or '.join(map(repr, nearest))}?"
            if nearest
            else "import the module that registers it",
        )
    return names.seqio(name).find(name)


def retrieval_tasks(name: str) -> list[QueryTask]:
    """The retrieval tasks of a mixture, or the one task, sorted by name.

    Tasks of several collections are those of one merged collection, named as the mixture is;
    `tokenize_collection` writes it.

    Raises:
        ConfigError: not registered, not retrieval tasks, or two of one query set.
    """
    tasks = _registered_tasks(name)
    collections = {task.source.collection for task in tasks}
    return tasks if len(collections) == 1 else moved_tasks(name, tasks)


def _registered_tasks(name: str) -> list[QueryTask]:
    found = find_mixture_or_task(name)
    tasks = [find_mixture_or_task(task) for task in getattr(found, "task_names", [name])]
    sources: dict[tuple[str, str], str] = {}
    for task in tasks:
        if not isinstance(getattr(task, "source", None), QuerySource):
            raise ConfigError(
                f"{task.name!r} is not a retrieval task",
                where=f"mixture or task {name!r}",
                fix="register it with add_retrieval_task",
            )
        key = task.source.collection, task.source.task
        if key in sources:
            raise ConfigError(
                f"{sources[key]!r} and {task.name!r} are the same queries",
                where=f"mixture {name!r}",
                expected="each task of a collection once",
            )
        sources[key] = task.name
    return tasks


def find_passages(name: str | None, collection: str, tasks: Sequence[QueryTask]) -> PassageTask:
    """The registered passages of a collection; registers their usual form if necessary.

    Args:
        name: the registered name; None for the collection's usual form.
        collection: the collection; passages of a merged one have the form of the collections that
            its tasks come from.
        tasks: its retrieval tasks.

    Raises:
        ConfigError: not registered, not the passages of this collection, or several collections
            whose passages have different forms.
    """
    usual = passages_task(collection)
    if name in (None, usual) and usual not in names.all_names():
        return add_passages_task(usual, collection=collection, titles=_titles(collection, tasks))
    name = name or usual
    found = find_mixture_or_task(name)
    source = getattr(found, "source", None)
    if not isinstance(source, PassageSource) or source.collection != collection:
        raise ConfigError(
            f"{name!r} is not the passages of collection {collection!r}",
            where="passages",
            fix="register them with add_passages_task",
        )
    return found


def _titles(collection: str, tasks: Sequence[QueryTask]) -> Titles:
    """The one form of the passages of the collections that tasks come from."""
    forms: dict[str, Titles | None] = {
        label: find_mixture_or_task(passages_task(label)).titles
        for task in tasks
        if isinstance(task.source, MergedSource)
        for label in [task.source.original.collection]
    }
    titles = set(forms.values()) or {Titles.INCLUDE}
    found = titles.pop()
    if titles or found is None:
        described = ", ".join(
            f"{label} {'its own' if form is None else f'titles={form.value}'}"
            for label, form in forms.items()
        )
        name = passages_task(collection)
        raise ConfigError(
            f"the passages of its collections have different forms: {described}",
            where=f"mixture {collection!r}",
            expected="one form",
            fix=f"register it with add_passages_task({name!r}, collection={collection!r})",
        )
    return found


def mixture_rates(name: str, *, trained: Collection[str] | None = None) -> dict[str, float]:
    """Mixing weights, by the tasks' names in their collection (as in the token store).

    Rates that are functions of the task's size, such as `number_of_queries`, need the `use_data`
    context. A single task has weight 1.

    Args:
        name: name of the mixture or task.
        trained: the tasks with a train split, whose size a rate may depend on; None means all.
    """
    mixture = find_mixture_or_task(name)
    # Rates are of the tasks that are registered, not of those moved to a merged collection.
    pairs = zip(_registered_tasks(name), retrieval_tasks(name), strict=True)
    return {
        moved.source.task: mixture.rate(task) if hasattr(mixture, "rate") else 1.0
        for task, moved in pairs
        if trained is None or moved.source.task in trained
    }


def _is_plain(rate: object) -> bool:
    """Whether a rate works without SeqIO; functions of a SeqIO task do not."""
    return not callable(rate) or rate is number_of_queries
