"""Passage and query, the text records that readers produce and all stages consume."""

from __future__ import annotations

import dataclasses
import enum
import unicodedata

from taser_jax.storage.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable unit of text.

    Attributes:
        id: the source's own identifier, unique in its collection.
        text: the body; answers are matched against it, never against the title.
        title: may be empty.
        page_id: the page (article) that the passage was cut from; empty if the source has none.
    """

    id: str
    text: str
    title: str = ""
    page_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One question with its known answers.

    Attributes:
        id: unique in its task.
        text: the question itself, before any prompt or normalisation.
        task: the task (data set) it belongs to.
        positives: rows of the passage store, gold first.
        relevance: grade of each positive, parallel to `positives`; empty means all 1.
        hard_negatives: rows of the passage store that came with the data, for example BM25's.
        answers: strings, or for `regex` tasks patterns, that a passage must contain.
    """

    id: str
    text: str
    task: str
    positives: tuple[int, ...] = ()
    relevance: tuple[int, ...] = ()
    hard_negatives: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()


# Categories of white space, line ends, control characters and lone surrogates.
_SPLITTING = ("Cc", "Cs", "Zs", "Zl", "Zp")


def check_id(id: str, *, where: str) -> str:
    """The id, if files that are split at white space can hold it.

    Example:
        >>> check_id("doc-1", where="corpus.jsonl:3, field '_id'")
        'doc-1'

    Args:
        id: of a passage or a query.
        where: file:line and field.

    Raises:
        DataError: it is empty, or has white space, a line separator or a control character.
    """
    expected = (
        "an id without white space, line ends and control characters: run files and qrels are "
        "split at them"
    )
    if not id:
        raise DataError("the id is empty", where=where, expected=expected)
    # Most ids: one pass in C.
    if id.isprintable() and " " not in id:
        return id
    for character in id:
        if unicodedata.category(character) in _SPLITTING or character.isspace():
            name = unicodedata.name(character, "control character").lower()
            raise DataError(
                f"the id {id!r} has a {name} (U+{ord(character):04X})",
                where=where,
                expected=expected,
                fix="write another character in its place, in passages, queries and judgements "
                "alike",
            )
    return id


class DevelopmentSets(enum.Enum):
    """How several tasks' development sets give one figure.

    APART: the mean of the tasks' figures; every task counts the same (TACO-DR).
    COMBINED: one set of all their queries; every query counts the same, and golds are ranked among
        the passages of all (TASER, appendix D: "we combine NQ and TriviaQA development sets").
    """

    APART = "apart"
    COMBINED = "combined"
