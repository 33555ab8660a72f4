"""Cuts the remaining text of each docstring into passages of about a hundred words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from taser_jax.data.pydocs.objects import DocumentedObject
from taser_jax.data.pydocs.parse import count_words, sentences
from taser_jax.storage.records import Passage

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
    if count_words(text) <= MAX_WORDS:
        return [text]
    pieces = []
    for sentence in sentences(text):
        tokens = sentence.split()
        pieces += [" ".join(tokens[i : i + MAX_WORDS]) for i in range(0, len(tokens), MAX_WORDS)]
    return pieces


def _chunks(pieces: Sequence[str]) -> list[list[int]]:
    """Groups neighbouring pieces into chunks of about equal length; positions of the pieces."""
    total = sum(map(count_words, pieces))
    target = total / max(1, -(-total // MAX_WORDS))
    chunks: list[list[int]] = []
    length = 0
    for position, piece in enumerate(pieces):
        size = count_words(piece)
        # A chunk ends once it has its share, or if the piece would make it too long.
        if not chunks or length + size > MAX_WORDS or length >= target:
            chunks.append([])
            length = 0
        chunks[-1].append(position)
        length += size
    last = sum(count_words(pieces[p]) for p in chunks[-1]) if chunks else 0
    if len(chunks) > 1 and last < MIN_WORDS:
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
        if sum(map(count_words, pieces)) >= MIN_WORDS:
            chunks = _chunks(pieces)
            for number, chunk in enumerate(chunks):
                for piece in chunk:
                    for later in range(owners[piece], len(element_rows)):
                        element_rows[later] = start + number
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
