"""Retrieval tasks as SeqIO tasks over a collection's query sets and passage store.

Registration needs neither data nor vocabulary: both are looked up when a task is used, in the
`use_data` context around the use.

Example:
    add_retrieval_task("trivia", collection="wikipedia")
    seqio.MixtureRegistry.add("open_qa", ["trivia", ("open_qa_nq", 2.0)], default_rate=1.0)

    with use_data(data_dir="data", vocabulary=load_vocabulary("vocabulary")):
        task = seqio.get_mixture_or_task("trivia")
        dataset = task.get_dataset({"query": 32}, split="validation", shuffle=False)
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Sequence

import seqio
import tensorflow as tf

from taser_jax.data.collections.store import list_tasks
from taser_jax.data.seqio_tasks.context import require_data
from taser_jax.data.seqio_tasks.merged_collections import MergedSource, moved_tasks
from taser_jax.data.seqio_tasks.sources import OwnSource, PassageSource, QuerySource
from taser_jax.data.seqio_tasks.tokenizers import TOKENS, PassageTokenizer, QueryTokenizer
from taser_jax.data.text import preprocessors
from taser_jax.data.text.preprocessors import check_length
from taser_jax.data.text.prompts import TaskPrompt
from taser_jax.data.token_store.text_settings import QueryNormalization, QuerySettings, Titles
from taser_jax.errors import ConfigError

# Mixtures that `add_collection` registered.
_whole: set[str] = set()
Preprocessor = Callable[[tf.data.Dataset], tf.data.Dataset]
Rate = float | Callable[[seqio.Task], float]


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
) -> seqio.Task:
    """Registers a task of a collection, and the collection's passages if they are not registered.

    Its examples have `query` (token ids), `query_pretokenized`, `query_row`, `query_id`,
    `positives` and `hard_negatives` (rows of the passage store).

    Args:
        name: name in SeqIO's registry.
        collection: the collection that its queries refer to.
        task: the task's name in the collection (a folder under `queries/`); `name` if None.
        normalization: normalisation of its queries, applied first.
        query_preprocessors: functions from data set to data set for examples whose `query` is
            still text, such as filters.
        prompt: token ids before its queries; never truncated.
        query_length: length in tokens of its queries in a token store, including special tokens and
            prompt; None means the store's.
        source: where its queries come from, if they were not prepared: any SeqIO source whose
            examples have `query`, `positives` (ids of passages) and perhaps `query_id` and
            `hard_negatives`. `taser tokenize` writes them beside the collection.
        source_preprocessors: functions from data set to data set that give the source's examples
            these names.

    Returns:
        The SeqIO task.

    Raises:
        ConfigError: a length that leaves no room for special tokens.
    """
    if query_length is not None:
        check_length(query_length)
    if passages_task(collection) not in seqio.TaskRegistry.names():
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
    return seqio.TaskRegistry.add(
        name,
        source=found,
        preprocessors=[*query_preprocessors, QueryTokenizer(normalization, prompt)],
        output_features={"query": TOKENS},
    )


def add_passages_task(name: str, *, collection: str, titles: Titles = Titles.INCLUDE) -> seqio.Task:
    """Registers the passages of a collection, in row order: `passage` (token ids), `passage_row`.

    `add_retrieval_task` does this with titles under the name `passages_task(collection)`. Call this
    function for another form of the passages, and pass its name to `tokenize_collection`.
    """
    return seqio.TaskRegistry.add(
        name,
        source=PassageSource(collection),
        preprocessors=[PassageTokenizer(titles)],
        output_features={"passage": TOKENS},
    )


def add_retrieval_mixture(
    name: str,
    tasks: Sequence[str | tuple[str, Rate]],
    *,
    default_rate: Rate = seqio.mixing_rate_num_examples,
) -> seqio.Mixture:
    """Registers a mixture, after checking that its tasks are registered.

    Args:
        name: name in SeqIO's registry.
        tasks: their names, or (name, rate).
        default_rate: rate of tasks without one; by default their number of queries.

    Returns:
        The SeqIO mixture.

    Raises:
        ConfigError: there is no task, or one is not registered; names the nearest.
    """
    if not tasks:
        raise ConfigError("no task", where=f"mixture {name!r}", expected="one or more")
    for task in tasks:
        find_mixture_or_task(task if isinstance(task, str) else task[0], where=f"mixture {name!r}")
    return seqio.MixtureRegistry.add(name, list(tasks), default_rate=default_rate)


def add_collection(
    data_dir: str | os.PathLike[str], collection: str, *, prompt: TaskPrompt = TaskPrompt()
) -> str:
    """Registers all tasks of a prepared collection as they are, and a mixture of them.

    A task of a collection `faq` is `faq.what`, the mixture `faq`: the module that `taser tokenize`
    otherwise imports is needed only for what differs from this. Registering again replaces both.

    Args:
        data_dir: folder of collections.
        collection: one that was prepared.
        prompt: before the queries of all tasks.

    Returns:
        The mixture's name: the collection's.

    Raises:
        ConfigError: the collection has no queries.
    """
    names = []
    for task in list_tasks(data_dir, collection):
        name = re.sub(r"[^\w.:]", "_", f"{collection}.{task}")
        if name in seqio.TaskRegistry.names():
            seqio.TaskRegistry.remove(name)
        add_retrieval_task(name, collection=collection, task=task, prompt=prompt)
        names.append(name)
    if collection in _whole:
        seqio.MixtureRegistry.remove(collection)
    add_retrieval_mixture(collection, names)
    _whole.add(collection)
    return collection


def is_registered(name: str) -> bool:
    """Whether a module registered this mixture or task; `add_collection`'s do not count."""
    known = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
    return name in known - _whole


def passages_task(collection: str) -> str:
    """Name of a collection's passages in SeqIO's registry."""
    return f"{collection}_passages"


def find_mixture_or_task(
    name: str, *, where: str = "MIXTURE_OR_TASK_NAME"
) -> seqio.Mixture | seqio.Task:
    """A registered mixture or task.

    Args:
        name: name in SeqIO's registry.
        where: what refers to it, for the message.

    Raises:
        ConfigError: the name is not registered; suggests the nearest.
    """
    registered = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
    if name not in registered:
        nearest = difflib.get_close_matches(name, registered, n=3)
        raise ConfigError(
            f"no mixture or task {name!r} is registered",
            where=where,
            expected=f"one of {', '.join(sorted(registered)) or '(none is registered)'}",
            fix=f"did you mean {' or '.join(map(repr, nearest))}?"
            if nearest
            else "import the module that registers it",
        )
    return seqio.get_mixture_or_task(name)


def retrieval_tasks(name: str) -> list[seqio.Task]:
    """The retrieval tasks of a mixture, or the one task, sorted by name.

    Tasks of several collections are those of one merged collection, named as the mixture is;
    `tokenize_collection` writes it.

    Raises:
        ConfigError: not registered, not retrieval tasks, or two of one query set.
    """
    tasks = _registered_tasks(name)
    collections = {task.source.collection for task in tasks}
    return tasks if len(collections) == 1 else moved_tasks(name, tasks)


def _registered_tasks(name: str) -> list[seqio.Task]:
    found = find_mixture_or_task(name)
    tasks = found.tasks if isinstance(found, seqio.Mixture) else [found]
    sources: dict[tuple[str, str], str] = {}
    for task in tasks:
        if not isinstance(task.source, QuerySource):
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


def find_passages_task(collection: str, tasks: Sequence[seqio.Task] = ()) -> str:
    """Name of a collection's passages in SeqIO's registry; registers them if need be.

    Args:
        collection: whose passages; the form of a merged collection's is that of the collections
            that its tasks come from.
        tasks: its retrieval tasks.

    Raises:
        ConfigError: several collections whose passages have different forms.
    """
    name = passages_task(collection)
    if name in seqio.TaskRegistry.names():
        return name
    forms = {
        label: passage_titles(find_mixture_or_task(passages_task(label)))
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
        raise ConfigError(
            f"the passages of its collections have different forms: {described}",
            where=f"mixture {collection!r}",
            expected="one form",
            fix=f"register it with add_passages_task({name!r}, collection={collection!r})",
        )
    add_passages_task(name, collection=collection, titles=found)
    return name


def check_query_room(task: seqio.Task, length: int) -> None:
    """Refuses a length that leaves no room after a task's prompt; call it inside `use_data`.

    Raises:
        ConfigError: names the task.
    """
    vocabulary = require_data().vocabulary
    for step in task.preprocessors:
        if isinstance(step, QueryTokenizer):
            try:
                preprocessors.query_room(vocabulary, length, prompt=step.prompt.ids(vocabulary))
            except ConfigError as error:
                raise ConfigError(
                    error.found,
                    where=f"task {task.name!r}, {error.where}",
                    expected=error.expected,
                    fix=error.fix,
                ) from error


def query_settings(task: seqio.Task) -> QuerySettings | None:
    """Settings of a task's queries, inside `use_data`; None if its own code tokenises them."""
    for step in task.preprocessors:
        if isinstance(step, QueryTokenizer):
            return QuerySettings(
                step.normalization, tuple(step.prompt.ids(require_data().vocabulary))
            )
    return None


def passage_titles(task: seqio.Task) -> Titles | None:
    """Whether the passages' tokens include titles; None if the task's own code makes them."""
    steps = [step for step in task.preprocessors if isinstance(step, PassageTokenizer)]
    return steps[0].titles if steps else None


def mixture_rates(name: str, *, trained: Collection[str] | None = None) -> dict[str, float]:
    """SeqIO's mixing weights, by the tasks' names in their collection (as in the token store).

    Rates that are functions of the task's size, such as `seqio.mixing_rate_num_examples`, need the
    `use_data` context. A single task has weight 1.

    Args:
        name: of the mixture or task.
        trained: the tasks with a train split, whose size a rate may be a function of; None is all.
    """
    mixture = find_mixture_or_task(name)
    # SeqIO knows the rates of the tasks that are registered, not of those moved to a merged one.
    pairs = zip(_registered_tasks(name), retrieval_tasks(name), strict=True)
    return {
        moved.source.task: (
            float(mixture.get_rate(task)) if isinstance(mixture, seqio.Mixture) else 1.0
        )
        for task, moved in pairs
        if trained is None or moved.source.task in trained
    }
