"""Shared by the readers: records that carry their file and line, and checks on fields."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from taser_jax.data.id_index import RepeatFinder
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage, check_id, empty_passage


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """A passage quoted in a question file.

    Attributes:
        title: may be empty.
        text: the body.
        id: the passage's id in its collection; empty if the file gives none.
    """

    title: str
    text: str
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question as read from its file, before its passages are mapped to rows.

    Attributes:
        where: file:line it was read from.
        text: the question.
        id: empty if the file gives none.
        answers: strings or patterns.
        positives: gold first.
        hard_negatives: passages that look relevant but are not.
        negatives: other irrelevant passages.
    """

    where: str
    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    positives: tuple[Context, ...] = ()
    hard_negatives: tuple[Context, ...] = ()
    negatives: tuple[Context, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """One line of a qrels file.

    Attributes:
        where: file:line it was read from.
        query_id: the query.
        passage_id: the judged passage.
        relevance: grade; 0 and below mean not relevant.
    """

    where: str
    query_id: str
    passage_id: str
    relevance: int


def checked_passages(
    path: FilePath,
    located: Callable[[], Iterator[tuple[int, Passage]]],
    empty: EmptyPassages,
) -> Iterator[Passage]:
    """Passages of a file, after checks for text and unique ids.

    Args:
        path: the file, for messages.
        located: starts reading the file: (line number, passage).
        empty: what to do with passages without text.

    Yields:
        Passages in the file's order.

    Raises:
        DataError: an empty passage, an id that is empty or that run files cannot hold, or a
            repeated id, with both lines.
    """
    finder = RepeatFinder()
    for line, passage in located():
        check_id(passage.id, where=f"{os.fspath(path)}:{line}, field 'id'")
        if (repeated := finder.add(passage.id)) is not None:
            _raise_if_repeated(path, located, repeated)
        if empty is not EmptyPassages.KEEP and not passage.text.strip():
            if empty is EmptyPassages.SKIP:
                continue
            raise empty_passage(f"{os.fspath(path)}:{line}")
        yield passage
    if (repeated := finder.flush()) is not None:
        _raise_if_repeated(path, located, repeated)


def string_field(record: Mapping[str, Any], name: str, where: str) -> str:
    """The value of a required string field."""
    value = record.get(name)
    if not isinstance(value, str):
        raise DataError(
            f"no field {name!r}" if name not in record else f"found {value!r}",
            where=f"{where}, field {name!r}",
            expected="a string",
        )
    return value


def id_field(record: Mapping[str, Any], *names: str, where: str) -> str:
    """The first of the fields that exists, as a string (numbers are converted), or ''."""
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise DataError(
                f"found {value!r}", where=f"{where}, field {name!r}", expected="a string or number"
            )
        return str(value)
    return ""


def string_list(value: object, where: str) -> tuple[str, ...]:
    """A value that must be a list of strings; numbers in it are converted."""
    items = value if isinstance(value, list | tuple) else None
    if items is None or any(not isinstance(item, str | int | float) for item in items):
        raise DataError(
            f"found {_shortened(value)}, a {type(value).__name__}",
            where=where,
            expected="a list of strings",
            fix=f"write [{_shortened(value)}]" if isinstance(value, str) else 'write ["Paris"]',
        )
    return tuple(map(str, items))


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _raise_if_repeated(
    path: FilePath, located: Callable[[], Iterator[tuple[int, Passage]]], id: str
) -> None:
    # Reading again, only before an error, avoids keeping every id and line in memory.
    lines = [line for line, passage in located() if passage.id == id]
    if len(lines) > 1:
        raise DataError(
            f"the id {id!r} was already used on line {lines[0]}",
            where=f"{os.fspath(path)}:{lines[1]}, field 'id'",
            expected="a unique id for each passage",
            fix="remove the duplicate or rename it",
        )
