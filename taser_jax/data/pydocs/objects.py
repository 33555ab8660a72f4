"""Documented objects of the installed packages, one for each distinct docstring; their splits."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any

from taser_jax.data.prepare.splits import components
from taser_jax.data.pydocs import parse, walk
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

SPLITS = ("train", "validation", "test")
# Similarities of near-duplicates, of one last name and of any.
_SAME_LEAF, _SAME_TEXT = 0.5, 0.9
_TEST_SHARE, _VALIDATION_SHARE = 0.22, 0.10
_MAX_ALIASES = 12
# If more objects share a text of at least this many words, it does not distinguish them.
_MIN_BOILERPLATE_WORDS = 8
# Variables that the child interpreter needs to find packages and libraries; nothing else of the
# environment can affect a docstring.
_ENVIRONMENT = (
    "HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "SYSTEMROOT",
    "VIRTUAL_ENV",
)  # fmt: skip
_FIXED_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # never claims an accelerator
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "TZ": "UTC",
}


@dataclasses.dataclass(frozen=True)
class DocumentedObject:
    """A module, class, function, method or property with a docstring of its own.

    Attributes:
        name: canonical dotted name.
        names: every public name it was found by, `name` among them.
        doc: its parsed docstring.
        body: a function's source without docstrings and comments; empty where there is none.
    """

    name: str
    names: tuple[str, ...]
    doc: parse.ParsedDocstring
    body: str


def _child_records(roots: Sequence[str]) -> Iterator[dict[str, Any]]:
    source_root = str(pathlib.Path(walk.__file__).resolve().parents[3])
    environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ} | _FIXED_ENVIRONMENT
    paths = [source_root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    command = [sys.executable, "-P", "-W", "ignore", "-m", walk.__name__, *roots]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        raise DataError(
            f"the walk over the installed modules exited with status {done.returncode}",
            where=" ".join(roots[:4]) + (" ..." if len(roots) > 4 else ""),
            fix=f"run it directly to see why: {sys.executable} -m {walk.__name__} numpy",
        )
    yield from map(json.loads, done.stdout.splitlines())


def _merge(records: list[walk.WalkedObject]) -> Iterator[DocumentedObject]:
    """One object per distinct normalised docstring that at most a dozen objects share."""
    by_text: dict[tuple[str, ...], list[walk.WalkedObject]] = {}
    for record in sorted(records, key=lambda r: r["name"]):
        by_text.setdefault(tuple(parse.words(record["doc"])), []).append(record)
    for same in by_text.values():
        if len(same) > _MAX_ALIASES:
            continue
        # Another package may re-export the object; the name is that of the original.
        first = min(
            same, key=lambda r: (_package_rank(r["name"]), *walk.canonical_order(r["name"]))
        )
        yield DocumentedObject(
            name=first["name"],
            names=tuple(sorted({name for record in same for name in record["names"]})),
            doc=parse.parse_docstring(first["doc"]),
            body=first["body"],
        )


def _without_boilerplate(objects: list[DocumentedObject]) -> Iterator[DocumentedObject]:
    """Drops long texts that more than a dozen docstrings repeat, such as the `out` of ufuncs."""

    def key(element: parse.Element) -> tuple[str, ...]:
        return tuple(parse.words(element.description or element.text))

    holders = Counter(k for o in objects for k in {key(e) for e in o.doc.elements})
    for item in objects:
        distinct = tuple(
            e
            for e in item.doc.elements
            if holders[key(e)] <= _MAX_ALIASES or len(key(e)) < _MIN_BOILERPLATE_WORDS
        )
        yield dataclasses.replace(item, doc=dataclasses.replace(item.doc, elements=distinct))


def _package_rank(name: str) -> int:
    return ("python", *walk.THIRD_PARTY).index(walk.package_of(name))


def read_objects(packages: Sequence[str] | None = None) -> list[DocumentedObject]:
    """Walks the installed packages in a clean child interpreter.

    Args:
        packages: root modules to walk; by default the whole standard library, numpy, jax, flax
            and optax.

    Returns:
        The objects, by package and canonical name.

    Raises:
        DataError: a root does not exist, or the child interpreter fails.
    """
    walked = list(_child_records(packages or (*walk.standard_library_roots(), *walk.THIRD_PARTY)))
    failed = {record["failed"] for record in walked if "failed" in record}
    if missing := sorted(failed.intersection(packages or walk.THIRD_PARTY)):
        where, fix = "the packages whose docstrings are read", f"pip install {' '.join(missing)}"
        raise DataError(f"cannot be imported: {', '.join(missing)}", where=where, fix=fix)
    records = [record["object"] for record in walked if "object" in record]
    by_name: dict[str, DocumentedObject] = {}
    for item in _without_boilerplate(list(_merge(records))):
        by_name.setdefault(item.name, item)  # a function may have the name of its module
    return sorted(by_name.values(), key=lambda item: (_package_rank(item.name), item.name))


MAX_WORDS = 100
MIN_WORDS = 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The passages of all objects, and the rows of each object's passages.

    Attributes:
        passages: all passages, in the order of their objects; a passage's position is its row.
        rows: for each object the rows of its passages; empty if too little text was left.
        element_rows: for each object and element the row that holds the element or, if it was
            cut, the row nearest to its position.
    """

    passages: list[Passage]
    rows: list[range]
    element_rows: list[list[int]]


def name_in_words(name: str) -> str:
    """A dotted name as words.

    Example:
        >>> name_in_words("numpy.linalg.matrix_rank"), name_in_words("json.JSONEncoder")
        ('numpy linalg matrix rank', 'json JSON Encoder')
    """
    name = name.removeprefix("builtins.")
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return " ".join(re.split(r"[._\s]+", spaced)).strip()


def _pieces(text: str) -> list[str]:
    """A text as pieces of at most `MAX_WORDS` words, cut between sentences if possible."""
    if parse.count_words(text) <= MAX_WORDS:
        return [text]
    pieces = []
    for sentence in parse.sentences(text):
        tokens = sentence.split()
        pieces += [" ".join(tokens[i : i + MAX_WORDS]) for i in range(0, len(tokens), MAX_WORDS)]
    return pieces


def _chunks(pieces: Sequence[str]) -> list[list[int]]:
    """Groups neighbouring pieces into chunks of about equal length; positions of the pieces."""
    total = sum(map(parse.count_words, pieces))
    target = total / max(1, -(-total // MAX_WORDS))
    chunks: list[list[int]] = []
    length = 0
    for position, piece in enumerate(pieces):
        size = parse.count_words(piece)
        # A chunk ends once it has its share, or if the piece would make it too long.
        if not chunks or length + size > MAX_WORDS or length >= target:
            chunks.append([])
            length = 0
        chunks[-1].append(position)
        length += size
    if len(chunks) > 1 and length < MIN_WORDS:
        chunks[-2].extend(chunks.pop())
    return chunks


def build_corpus(objects: Sequence[DocumentedObject], cuts: Sequence[Collection[int]]) -> Corpus:
    """Makes passages from every object's elements that were not cut.

    Args:
        objects: all objects, in the order of the corpus.
        cuts: for each object the positions of the elements that became queries.

    Returns:
        The corpus; an object with fewer than `MIN_WORDS` remaining words has no passage.
    """
    corpus = Corpus([], [], [])
    for item, cut in zip(objects, cuts, strict=True):
        pieces: list[str] = []
        owners: list[int] = []
        for position, element in enumerate(item.doc.elements):
            if position not in cut:
                new = _pieces(element.text)
                pieces += new
                owners += [position] * len(new)
        start = len(corpus.passages)
        element_rows = [start] * len(item.doc.elements)
        if sum(map(parse.count_words, pieces)) >= MIN_WORDS:
            for number, chunk in enumerate(_chunks(pieces)):
                first = owners[chunk[0]]
                element_rows[first:] = [start + number] * (len(element_rows) - first)
                corpus.passages.append(
                    Passage(
                        id=f"{item.name}#{number}",
                        text=" ".join(pieces[p] for p in chunk),
                        title=name_in_words(item.name),
                        page_id=item.name,
                    )
                )
        corpus.rows.append(range(start, len(corpus.passages)))
        corpus.element_rows.append(element_rows)
    return corpus


def split_of(family: str) -> str:
    """The split of a family of objects, by the SHA-256 of its name.

    Args:
        family: canonical name of the family's first object.
    """
    share = int.from_bytes(hashlib.sha256(family.encode()).digest()[:8], "big") / 2**64
    if share < _TEST_SHARE:
        return "test"
    return "validation" if share < _TEST_SHARE + _VALIDATION_SHARE else "train"


def assign(objects: Sequence[DocumentedObject]) -> tuple[list[str], list[int]]:
    """The split and the cluster of near-duplicates of each object.

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
        by_leaf.setdefault(item.name.rpartition(".")[2], []).append(index)
    same_leaf = [
        (i, j)
        for group in by_leaf.values()
        for i, j in itertools.combinations(group, 2)
        if jaccard(sets[i], sets[j]) >= _SAME_LEAF
    ]
    cluster = components(len(objects), same_text)
    family = components(len(objects), [*same_text, *same_leaf])
    names: dict[int, str] = {}
    for index, head in enumerate(family):
        names[head] = min(names.get(head, objects[index].name), objects[index].name)
    return [split_of(names[head]) for head in family], cluster


def shingles(text: str, size: int) -> frozenset[tuple[str, ...]]:
    """Every run of `size` words; the whole text if it is shorter."""
    tokens = parse.words(text)
    starts = range(max(1, len(tokens) - size + 1)) if tokens else ()
    return frozenset(tuple(tokens[i : i + size]) for i in starts)


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
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for j, members in enumerate(sets):
        rarest = sorted(members, key=lambda m: (frequency[m], m))
        prefix = rarest[: len(rarest) - math.ceil(threshold * len(rarest)) + 1]
        candidates: set[int] = set()
        for member in prefix:
            candidates.update(holders[member])
            holders[member].append(j)
        for i in sorted(candidates):
            if jaccard(sets[i], members) >= threshold:
                yield i, j
