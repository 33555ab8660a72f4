"""Candidate queries of each object, by task, the objects that answer them, and their split."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from taser_jax.data.prepare.splits import components
from taser_jax.data.pydocs.objects import DocumentedObject, name_in_words
from taser_jax.data.pydocs.parse import ElementKind, count_words, words

SPLITS = ("train", "validation", "test")
_SAME_LEAF = 0.5
_SAME_TEXT = 0.9
_TEST_SHARE, _VALIDATION_SHARE = 0.22, 0.10


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The split and cluster of each object.

    Attributes:
        split: one of `SPLITS` per object.
        cluster: the number of each object's cluster; its texts are near-duplicates, and its objects
            share their gold.
    """

    split: tuple[str, ...]
    cluster: tuple[int, ...]


def split_of(family: str) -> str:
    """The split of a family of objects, by the SHA-256 of its name.

    Args:
        family: canonical name of the family's first object.
    """
    share = int.from_bytes(hashlib.sha256(family.encode()).digest()[:8], "big") / 2**64
    if share < _TEST_SHARE:
        return "test"
    return "validation" if share < _TEST_SHARE + _VALIDATION_SHARE else "train"


def assign(objects: Sequence[DocumentedObject]) -> Assignment:
    """Finds near-duplicates and splits the objects.

    Objects whose four-word shingles have a Jaccard similarity of at least 0.9 form a cluster.
    Clusters, and objects of the same last name with a similarity of at least 0.5, form a family,
    which lies in one split.

    Args:
        objects: all objects, in any order: only their text matters.
    """
    sets = [shingles(" ".join(e.text for e in o.doc.elements), 4) for o in objects]
    same_text = list(similar_pairs(sets, _SAME_TEXT))
    by_leaf: dict[str, list[int]] = {}
    for index, item in enumerate(objects):
        by_leaf.setdefault(item.leaf, []).append(index)
    same_leaf = [
        (i, j)
        for group in by_leaf.values()
        for position, i in enumerate(group)
        for j in group[position + 1 :]
        if jaccard(sets[i], sets[j]) >= _SAME_LEAF
    ]
    cluster = components(len(objects), same_text)
    family = components(len(objects), [*same_text, *same_leaf])
    names: dict[int, str] = {}
    for index, head in enumerate(family):
        names[head] = min(names.get(head, objects[index].name), objects[index].name)
    return Assignment(tuple(split_of(names[head]) for head in family), tuple(cluster))


def shingles(text: str, size: int) -> frozenset[tuple[str, ...]]:
    """Every run of `size` words; the whole text if it is shorter."""
    tokens = words(text)
    if len(tokens) <= size:
        return frozenset([tuple(tokens)]) if tokens else frozenset()
    return frozenset(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))


def jaccard(a: frozenset[Hashable], b: frozenset[Hashable]) -> float:
    """Shared members over all members; 0 for two empty sets."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared) if shared else 0.0


def similar_pairs(
    sets: Sequence[frozenset[tuple[str, ...]]], threshold: float
) -> Iterator[tuple[int, int]]:
    """Every pair of sets whose Jaccard similarity reaches the threshold, exactly.

    Two sets at least as similar as `threshold` share a member among the `n - ceil(threshold n) + 1`
    rarest of each (prefix filtering: Chaudhuri, Ganti and Kaushik, ICDE 2006), so only sets that
    share a rare member are compared.

    Args:
        sets: the sets; empty ones match none.
        threshold: the lowest similarity, above 0.

    Yields:
        Positions (i, j), i < j, each pair once.
    """
    frequency = Counter(member for members in sets for member in members)
    holders: dict[tuple[str, ...], list[int]] = {}
    for j, members in enumerate(sets):
        rarest = sorted(members, key=lambda m: (frequency[m], m))
        prefix = rarest[: len(rarest) - math.ceil(threshold * len(rarest)) + 1]
        candidates: set[int] = set()
        for member in prefix:
            holders_of_member = holders.setdefault(member, [])
            candidates.update(holders_of_member)
            holders_of_member.append(j)
        for i in sorted(candidates):
            if jaccard(sets[i], members) >= threshold:
                yield i, j


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
        if (target := index.get(f"{scope}.{name}")) is not None:
            return target
        scope = scope.rpartition(".")[0]
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
