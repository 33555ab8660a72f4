"""The built-in collection: docstrings of the installed packages as a multi-task retrieval set."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from taser_jax.data.pydocs.objects import (
    SPLITS,
    Corpus,
    DocumentedObject,
    assign,
    build_corpus,
    name_in_words,
    read_objects,
    shingles,
    similar_pairs,
)
from taser_jax.data.pydocs.parse import ElementKind, count_words, words
from taser_jax.data.pydocs.walk import THIRD_PARTY, package_of
from taser_jax.storage.artifacts import Fingerprint
from taser_jax.storage.progress import phase, track
from taser_jax.storage.records import Passage, Query

FORMAT_VERSION = 1
TASKS = ("summary", "parameter", "example", "code", "see_also", "lookup")
MIN_WORDS_LEFT = 20
_MAX_QUERY_WORDS = 60
_MIN_WORDS = {
    "summary": 5, "parameter": 5, "example": 6, "code": 12, "see_also": 3, "lookup": 1,
}  # fmt: skip
_MAX_PARAMETERS = 2
_SAME_QUESTION = 0.6
_MAX_GOLD_CLUSTERS, _MAX_GOLD_OBJECTS = 4, 10
# Shorter queries occur in passages by chance.
_LEAK_WORDS = 5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A possible query for an object.

    Attributes:
        task: one of `TASKS`.
        target: position of the object that answers it.
        detail: distinguishes it from the object's other candidates of the task; part of the
            query's id.
        text: the query.
        core: the part that must not occur in the corpus: a parameter's description.
        element: position of the element that it comes from and that is to be cut, or None.
        picked: whether it becomes a query; if not, it still adds gold to others.
        gold: of a query, the objects that answer it, its own first.
    """

    task: str
    target: int
    detail: str
    text: str
    core: str
    element: int | None = None
    picked: bool = True
    gold: tuple[int, ...] = ()


def _shorten(text: str) -> str:
    return " ".join(text.split()[:_MAX_QUERY_WORDS])


def _long_enough(task: str, text: str) -> bool:
    return len(words(text)) >= _MIN_WORDS[task]


def _text_candidates(objects: Sequence[DocumentedObject]) -> Iterator[Candidate]:
    """Summaries and parameters: texts that leave the passages when they become queries."""
    descriptions = Counter(
        tuple(words(e.description)) for o in objects for e in o.doc.elements if e.description
    )
    for target, item in enumerate(objects):
        elements = item.doc.elements
        left = sum(count_words(e.text) for e in elements)
        # Rare descriptions first, ties by hash, so that no position is favoured.
        parameters: list[tuple[int, str, int]] = []
        for position, element in enumerate(elements):
            if element.kind is ElementKind.SUMMARY and _long_enough("summary", element.text):
                text = _shorten(element.text)
                picked = left - count_words(element.text) >= MIN_WORDS_LEFT
                left -= count_words(element.text) if picked else 0
                yield Candidate("summary", target, "", text, text, position, picked)
            elif element.kind is ElementKind.PARAMETER and _long_enough(
                "parameter", element.description
            ):
                frequency = descriptions[tuple(words(element.description))]
                digest = hashlib.sha256(f"{item.name} {element.name}".encode()).hexdigest()
                parameters.append((frequency, digest, position))
        count = 0
        for *_, position in sorted(parameters):
            element = elements[position]
            fits = left - count_words(element.text) >= MIN_WORDS_LEFT
            picked = fits and count < _MAX_PARAMETERS
            if picked:
                left -= count_words(element.text)
                count += 1
            core = _shorten(element.description)
            detail, text = element.name.replace(" ", ""), f"{element.name}: {core}"
            yield Candidate("parameter", target, detail, text, core, position, picked)


def _code_candidates(objects: Sequence[DocumentedObject]) -> Iterator[Candidate]:
    for target, item in enumerate(objects):
        fitting = [e for e in item.doc.examples if _long_enough("example", e)]
        for number, example in enumerate(fitting):
            text = _shorten(example)
            yield Candidate("example", target, str(number), text, text, picked=number == 0)
        if item.body and _long_enough("code", item.body):
            text = _shorten(item.body)
            yield Candidate("code", target, "", text, text)


def _resolve(name: str, source: str, index: dict[str, int]) -> int | None:
    """The object that a name denotes in the docstring of `source`: nearest scope first."""
    while source:
        if (target := index.get(f"{source}.{name}")) is not None:
            return target
        source = source.rpartition(".")[0]
    return index.get(name)


def _name_candidates(objects: Sequence[DocumentedObject]) -> Iterator[Candidate]:
    index: dict[str, int] = {}
    for target, item in enumerate(objects):
        for name in item.names:
            index.setdefault(name, target)
    for source, item in enumerate(objects):
        for line in item.doc.see_also:
            other = _resolve(line.name, item.name, index)
            if other is None or other == source or not _long_enough("see_also", line.description):
                continue
            text = _shorten(line.description)
            yield Candidate("see_also", other, item.name, text, text)
    for target, item in enumerate(objects):
        text = name_in_words(".".join(item.name.split(".")[-2:]))
        yield Candidate("lookup", target, "", text, text)


def candidates(objects: Sequence[DocumentedObject]) -> list[Candidate]:
    """All candidates, in the order of the objects.

    Picked are, per object, the summary and at most two parameters, as long as 20 words of it
    remain, and the first code example. The query of a see-also line is its description of the other
    object, without the name; that object answers it, and the docstring that contains the line is
    not gold.

    Args:
        objects: all objects.
    """
    return [*_text_candidates(objects), *_code_candidates(objects), *_name_candidates(objects)]


def fair_questions(
    all_candidates: Sequence[Candidate], splits: Sequence[str], cluster: Sequence[int]
) -> Iterator[Candidate]:
    """Keeps the picked candidates whose answers are few and lie in one split.

    Queries of a task that are equal as words, or whose two-word shingles have a Jaccard similarity
    of at least 0.6, are equivalent: the objects of all of them, and the objects of the same
    clusters, answer each. A query with more than 4 clusters or 10 objects as answers, or with
    answers in two splits, is dropped.

    Args:
        all_candidates: of all tasks; those not picked only add gold.
        splits: the split of each object.
        cluster: its cluster, whose objects share their gold.

    Yields:
        One question per distinct text of a task.
    """
    members: dict[int, list[int]] = {}
    for target, number in enumerate(cluster):
        members.setdefault(number, []).append(target)
    for task in TASKS:
        by_text: dict[tuple[str, ...], list[Candidate]] = {}
        for candidate in all_candidates:
            if candidate.task == task:
                by_text.setdefault(tuple(words(candidate.text)), []).append(candidate)
        groups = list(by_text.values())
        neighbours: list[list[int]] = [[i] for i in range(len(groups))]
        sets = [shingles(group[0].text, 2) for group in groups]
        for i, j in similar_pairs(sets, _SAME_QUESTION):
            neighbours[i].append(j)
            neighbours[j].append(i)
        for group, near in zip(groups, neighbours, strict=True):
            asked = next((c for c in group if c.picked), None)
            if asked is None:
                continue
            targets = {c.target for other in near for c in groups[other]}
            clusters = {cluster[t] for t in targets}
            gold = {t for number in clusters for t in members[number]}
            one_split = len({splits[t] for t in gold}) == 1
            few = len(clusters) <= _MAX_GOLD_CLUSTERS and len(gold) <= _MAX_GOLD_OBJECTS
            if one_split and few:
                others = sorted(gold - {asked.target})
                yield dataclasses.replace(asked, gold=(asked.target, *others))


def cut_elements(
    objects: Sequence[DocumentedObject], questions: Sequence[Candidate]
) -> list[set[int]]:
    """Removes each query's text from all docstrings that contain it, as long as 20 words remain.

    Args:
        objects: all objects.
        questions: the queries.

    Returns:
        For each object the positions of the elements to cut.
    """
    cuts: list[set[int]] = [set() for _ in objects]
    for question in questions:
        if question.element is not None:
            cuts[question.target].add(question.element)
    asked = {tuple(words(q.core)) for q in questions if q.task != "lookup"}
    for item, cut in zip(objects, cuts, strict=True):
        elements = item.doc.elements
        left = sum(count_words(e.text) for i, e in enumerate(elements) if i not in cut)
        for position, element in enumerate(elements):
            said = tuple(words(_shorten(element.description or element.text)))
            size = count_words(element.text)
            if position not in cut and said in asked and left - size >= MIN_WORDS_LEFT:
                cut.add(position)
                left -= size
    return cuts


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


def _query(asked: Candidate, corpus: Corpus, name: str) -> Query:
    """The query with its rows; the passage nearest to the query's original position comes first."""
    own = list(corpus.rows[asked.target])
    if asked.element is not None:
        nearest = corpus.element_rows[asked.target][asked.element]
        own.sort(key=lambda row: (row != nearest, row))
    rows = [*own, *(row for target in asked.gold[1:] for row in corpus.rows[target])]
    parts = (package_of(name), asked.task, name, *([asked.detail] if asked.detail else []))
    return Query(id=":".join(parts), text=asked.text, task=asked.task, positives=tuple(rows))


def _without_leaks(questions: Sequence[Candidate], corpus: Corpus) -> list[Candidate]:
    cores = ["" if q.task == "lookup" else q.core for q in questions]
    texts = ["" if q.task == "lookup" else q.text for q in questions]
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
        splits, cluster = assign(objects)
        questions = list(fair_questions(candidates(objects), splits, cluster))
        corpus = build_corpus(objects, cut_elements(objects, questions))
        # An object whose text is too short to be a passage answers nothing.
        answered = [
            dataclasses.replace(q, gold=tuple(t for t in q.gold if corpus.rows[t]))
            for q in questions
            if corpus.rows[q.target]
        ]
        fair = _without_leaks(answered, corpus)
        queries: dict[str, dict[str, list[Query]]] = {t: {s: [] for s in SPLITS} for t in TASKS}
        seen: Counter[str] = Counter()
        for question in fair:
            target = question.target
            query = _query(question, corpus, objects[target].name)
            seen[query.id] += 1
            if seen[query.id] > 1:  # a class can name a parameter in two sections
                query = dataclasses.replace(query, id=f"{query.id}:{seen[query.id]}")
            queries[question.task][splits[target]].append(query)
    versions = {name: importlib.metadata.version(name) for name in THIRD_PARTY}
    return PydocsCollection(
        passages=corpus.passages,
        queries=queries,
        checksum=_checksum(corpus.passages, queries),
        versions={"python": platform.python_version(), **versions},
    )


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
        if len(tokens) >= _LEAK_WORDS:
            by_start.setdefault(tuple(tokens[:_LEAK_WORDS]), []).append((position, tokens))
    leaks: set[int] = set()
    for passage in passages:
        tokens = words(passage)
        for start in range(len(tokens) - _LEAK_WORDS + 1):
            for position, query in by_start.get(tuple(tokens[start : start + _LEAK_WORDS]), ()):
                if tokens[start : start + len(query)] == query:
                    leaks.add(position)
    return sorted(leaks)
