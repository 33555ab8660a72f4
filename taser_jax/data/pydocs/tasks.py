"""Candidate queries of each object, by task, and the objects that answer them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from taser_jax.data.pydocs.objects import DocumentedObject, name_in_words
from taser_jax.data.pydocs.parse import ElementKind, count_words, words
from taser_jax.data.pydocs.splits import Assignment, shingles, similar_pairs

TASKS = ("summary", "parameter", "example", "code", "see_also", "lookup")
MIN_WORDS_LEFT = 20
_MAX_QUERY_WORDS = 60
_MIN_WORDS = {
    "summary": 5, "parameter": 5, "example": 6, "code": 12, "see_also": 3, "lookup": 1,
}  # fmt: skip
_MAX_PARAMETERS = 2
_SAME_QUESTION = 0.6
_MAX_GOLD_CLUSTERS, _MAX_GOLD_OBJECTS = 4, 10


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
    """

    task: str
    target: int
    detail: str
    text: str
    core: str
    element: int | None = None
    picked: bool = True


@dataclasses.dataclass(frozen=True)
class Question:
    """A candidate that passed all filters, with the objects that answer it, its own first."""

    candidate: Candidate
    gold: tuple[int, ...]


def _shorten(text: str) -> str:
    return " ".join(text.split()[:_MAX_QUERY_WORDS])


def _long_enough(task: str, text: str) -> bool:
    return len(words(text)) >= _MIN_WORDS[task]


def _parameter_key(description: str) -> str:
    return " ".join(words(description))


def _rank(owner: str, frequency: int, name: str) -> tuple[int, str]:
    """Rare descriptions first, ties by hash, so that no position is favoured."""
    return frequency, hashlib.sha256(f"{owner} {name}".encode()).hexdigest()


def _text_candidates(objects: Sequence[DocumentedObject]) -> Iterator[Candidate]:
    """Summaries and parameters: texts that leave the passages when they become queries."""
    descriptions = Counter(
        _parameter_key(e.description) for o in objects for e in o.doc.elements if e.description
    )
    for target, item in enumerate(objects):
        elements = item.doc.elements
        left = sum(count_words(e.text) for e in elements)
        parameters: list[tuple[tuple[int, str], int]] = []
        for position, element in enumerate(elements):
            if element.kind is ElementKind.SUMMARY and _long_enough("summary", element.text):
                text = _shorten(element.text)
                picked = left - count_words(element.text) >= MIN_WORDS_LEFT
                left -= count_words(element.text) if picked else 0
                yield Candidate("summary", target, "", text, text, position, picked)
            elif element.kind is ElementKind.PARAMETER and _long_enough(
                "parameter", element.description
            ):
                frequency = descriptions[_parameter_key(element.description)]
                parameters.append((_rank(item.name, frequency, element.name), position))
        count = 0
        for _, position in sorted(parameters):
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
    scope = source
    while scope:
        if (found := index.get(f"{scope}.{name}")) is not None:
            return found
        scope = scope.rpartition(".")[0]
    return index.get(name)


def _name_candidates(objects: Sequence[DocumentedObject]) -> Iterator[Candidate]:
    index: dict[str, int] = {}
    for target, item in enumerate(objects):
        for name in item.names:
            index.setdefault(name, target)
    for source, item in enumerate(objects):
        for line in item.doc.see_also:
            found = _resolve(line.name, item.name, index)
            if found is None or found == source or not _long_enough("see_also", line.description):
                continue
            text = _shorten(line.description)
            yield Candidate("see_also", found, item.name, text, text)
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
    return [
        *_text_candidates(objects),
        *_code_candidates(objects),
        *_name_candidates(objects),
    ]


def fair_questions(
    all_candidates: Sequence[Candidate], assignment: Assignment
) -> Iterator[Question]:
    """Keeps the picked candidates whose answers are few and lie in one split.

    Queries of a task that are equal as words, or whose two-word shingles have a Jaccard similarity
    of at least 0.6, are equivalent: the objects of all of them, and the objects of the same
    clusters, answer each. A query with more than 4 clusters or 10 objects as answers, or with
    answers in two splits, is dropped.

    Args:
        all_candidates: of all tasks; those not picked only add gold.
        assignment: splits and clusters of the objects.

    Yields:
        One question per distinct text of a task.
    """
    members: dict[int, list[int]] = {}
    for target, cluster in enumerate(assignment.cluster):
        members.setdefault(cluster, []).append(target)
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
            clusters = {assignment.cluster[t] for t in targets}
            gold = {t for cluster in clusters for t in members[cluster]}
            one_split = len({assignment.split[t] for t in gold}) == 1
            few = len(clusters) <= _MAX_GOLD_CLUSTERS and len(gold) <= _MAX_GOLD_OBJECTS
            if one_split and few:
                others = sorted(gold - {asked.target})
                yield Question(asked, (asked.target, *others))


def cut_elements(
    objects: Sequence[DocumentedObject], questions: Sequence[Question]
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
        if question.candidate.element is not None:
            cuts[question.candidate.target].add(question.candidate.element)
    asked = {tuple(words(q.candidate.core)) for q in questions if q.candidate.task != "lookup"}
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
