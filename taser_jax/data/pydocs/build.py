"""The built-in collection: docstrings of the installed packages as a multi-task retrieval set."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from taser_jax.data.pydocs.objects import Corpus, build_corpus, read_objects
from taser_jax.data.pydocs.parse import words
from taser_jax.data.pydocs.tasks import (
    SPLITS,
    TASKS,
    Question,
    assign,
    candidates,
    cut_elements,
    fair_questions,
)
from taser_jax.data.pydocs.walk import THIRD_PARTY, package_of
from taser_jax.storage.artifacts import Fingerprint
from taser_jax.storage.progress import phase, track
from taser_jax.storage.records import Passage, Query

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class PydocsCollection:
    """Passages of docstrings, and queries of several tasks over them.

    A query's id starts with the package of the object that answers it ("numpy:..."). Equal versions
    give equal ids.

    Attributes:
        passages: the corpus; `page_id` is the object's canonical name.
        queries: task -> split -> queries; positives are rows of `passages`.
        checksum: checksum of all passages and queries; equal for equal versions.
        versions: versions of Python and of the packages that were read.
    """

    passages: list[Passage]
    queries: dict[str, dict[str, list[Query]]]
    checksum: str
    versions: dict[str, str]


def _query(question: Question, corpus: Corpus, name: str) -> Query:
    """The query with its rows; the passage nearest to the query's original position comes first."""
    asked = question.candidate
    own = list(corpus.rows[asked.target])
    if asked.element is not None:
        nearest = corpus.element_rows[asked.target][asked.element]
        own.sort(key=lambda row: (row != nearest, row))
    rows = [*own, *(row for target in question.gold[1:] for row in corpus.rows[target])]
    parts = (package_of(name), asked.task, name, *([asked.detail] if asked.detail else []))
    return Query(id=":".join(parts), text=asked.text, task=asked.task, positives=tuple(rows))


def _without_leaks(questions: Sequence[Question], corpus: Corpus) -> list[Question]:
    cores = ["" if q.candidate.task == "lookup" else q.candidate.core for q in questions]
    texts = ["" if q.candidate.task == "lookup" else q.candidate.text for q in questions]
    passages = [f"{p.title}\n{p.text}" for p in corpus.passages]
    leaks = find_leaks([*cores, *texts], track(passages, "looking for leaks", unit="passage"))
    leaking = {position % len(questions) for position in leaks}
    return [q for position, q in enumerate(questions) if position not in leaking]


def _checksum(passages: list[Passage], queries: dict[str, dict[str, list[Query]]]) -> str:
    total = Fingerprint().add(FORMAT_VERSION)
    for passage in passages:
        total.add(passage.id).add(passage.title).add(passage.text).add(passage.page_id)
    for task, splits in queries.items():
        for split, members in splits.items():
            total.add(task).add(split).add(len(members))
            for query in members:
                total.add(query.id).add(query.text).add(np.asarray(query.positives, np.int32))
    return total.hex()


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in THIRD_PARTY}
    return {"python": platform.python_version(), **versions}


def build_pydocs(packages: Sequence[str] | None = None) -> PydocsCollection:
    """Builds the collection from the docstrings of the installed packages.

    Nothing is downloaded; it takes less than a minute on one core. The same versions give the same
    collection, byte for byte. Splits are by object: no passage of a validation or test query is a
    training positive of any task.

    Args:
        packages: root modules to read, e.g. `("json", "optax")`; by default the standard library,
            numpy, jax, flax and optax.

    Raises:
        DataError: a package is missing.
    """
    with phase("reading docstrings"):
        objects = read_objects(packages)
    with phase("making queries"):
        assignment = assign(objects)
        questions = list(fair_questions(candidates(objects), assignment))
        corpus = build_corpus(objects, cut_elements(objects, questions))
        # An object whose text is too short to be a passage answers nothing.
        answered = [
            dataclasses.replace(q, gold=tuple(t for t in q.gold if corpus.rows[t]))
            for q in questions
            if corpus.rows[q.candidate.target]
        ]
        fair = _without_leaks(answered, corpus)
        queries: dict[str, dict[str, list[Query]]] = {t: {s: [] for s in SPLITS} for t in TASKS}
        seen: Counter[str] = Counter()
        for question in fair:
            target = question.candidate.target
            query = _query(question, corpus, objects[target].name)
            seen[query.id] += 1
            if seen[query.id] > 1:  # a class can name a parameter in two sections
                query = dataclasses.replace(query, id=f"{query.id}:{seen[query.id]}")
            queries[question.candidate.task][assignment.split[target]].append(query)
    return PydocsCollection(
        passages=corpus.passages,
        queries=queries,
        checksum=_checksum(corpus.passages, queries),
        versions=_versions(),
    )


_MIN_WORDS = 5


def find_leaks(queries: Sequence[str], passages: Iterable[str]) -> list[int]:
    """Positions of the queries of five or more words that a passage contains verbatim.

    Texts are compared as sequences of lower-cased words, ignoring punctuation and line breaks.

    Example:
        >>> find_leaks(["the sum of two numbers", "two numbers"], ["Is the sum, of two numbers."])
        [0]

    Args:
        queries: texts that must not occur in passages.
        passages: texts to search; read once.

    Returns:
        Sorted positions in `queries`.
    """
    by_start: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for position, text in enumerate(queries):
        tokens = words(text)
        if len(tokens) >= _MIN_WORDS:
            by_start.setdefault(tuple(tokens[:_MIN_WORDS]), []).append((position, tokens))
    leaks: set[int] = set()
    for passage in passages:
        tokens = words(passage)
        for start in range(len(tokens) - _MIN_WORDS + 1):
            for position, query in by_start.get(tuple(tokens[start : start + _MIN_WORDS]), ()):
                if tokens[start : start + len(query)] == query:
                    leaks.add(position)
    return sorted(leaks)
