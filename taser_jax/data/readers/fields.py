"""Records with named fields: JSON, Parquet, and tables whose first row names the columns."""

from __future__ import annotations

import enum
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from taser_jax.data.files import json_records
from taser_jax.data.id_index import normalized_content, text_hash
from taser_jax.data.readers.located import Context
from taser_jax.data.readers.tables import quoted_rows, wrong_columns
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError

_DELIMITERS = "\t,;|"


class Role(enum.Enum):
    """What a field holds; the value lists the names that it goes by, the usual one first."""

    ID = ("id", "_id", "docid", "doc_id", "pid", "docno", "document_id", "qid", "question_id")
    TITLE = ("title", "heading", "headline", "subject", "name")
    TEXT = ("text", "passage", "body", "content", "contents", "document", "abstract", "context")
    PAGE = ("wikipedia_id", "page_id")
    PARAGRAPH = ("paragraph_id",)
    QUESTION = ("question", "query", "anchor", "claim")
    ANSWERS = ("answers", "answer", "response")
    POSITIVE = ("positive", "positives", "pos", "positive_passages")
    NEGATIVE = ("negative", "negatives", "neg", "hard_negatives", "hard_negative")
    QUERY_ID = ("query_id", "topic_id", "topic")
    PASSAGE_ID = ("passage_id", "corpus_id")
    RELEVANCE = ("relevance", "score", "grade", "label", "rel", "judgment")


def roles_of(names: Iterable[str]) -> dict[Role, list[str]]:
    """The fields of each role.

    Example:
        >>> roles_of(["Query", "negative_1", "negative_2", "x"])[Role.NEGATIVE]
        ['negative_1', 'negative_2']
    """
    return _roles(tuple(names))


# Records of a file have few sets of fields.
@functools.lru_cache(maxsize=1024)
def _roles(names: tuple[str, ...]) -> dict[Role, list[str]]:
    found: dict[Role, list[str]] = {}
    for name in names:
        plain = re.sub(r"[\s-]+", "_", name.strip().lower())
        plain = re.sub(r"(?<=[a-z])_?\d+$", "", plain)
        for role in Role:
            if plain in role.value:
                found.setdefault(role, []).append(name)
    return found


def is_header(columns: Collection[str]) -> bool:
    """Whether a table's first row names its columns: two of them at least, by known names."""
    return sum(map(len, roles_of(columns).values())) >= 2


def first_of(record: Mapping[str, Any], role: Role) -> str | None:
    """The field of a role; the usual name goes first."""
    names = roles_of(record).get(role)
    return min(names, key=lambda name: name != role.value[0]) if names else None


def quoted_passages(record: Mapping[str, Any], role: Role, where: str) -> tuple[Context, ...]:
    """The passages that a record quotes in the fields of a role: texts, or {text, title}.

    Their ids are hashes of title and text, so that equal passages of several lines are one.

    Raises:
        DataError: a value that is neither.
    """
    contexts = []
    for name in roles_of(record).get(role, ()):
        value = record[name]
        for one in value if isinstance(value, list) else [value]:
            parts = one if isinstance(one, dict) else {"text": one}
            text, title = parts.get("text") or "", parts.get("title") or ""
            if not isinstance(text, str) or not isinstance(title, str):
                fix = "write a text, a list of texts, or {text, title}"
                raise DataError(f"found {one!r}", where=f"{where}, field {name!r}", fix=fix)
            if role is Role.TEXT and (field := first_of(record, Role.TITLE)):
                title = str(record[field] or "")
            if text.strip() or title.strip():
                id = f"{text_hash(normalized_content(title, text)):016x}"
                contexts.append(Context(title, text, id))
    return tuple(contexts)


def positives(record: Mapping[str, Any], where: str) -> tuple[Context, ...]:
    """The passages that answer a record's question: its positives, or else its text or answer."""
    for role in (Role.POSITIVE, Role.TEXT, Role.ANSWERS):
        if found := quoted_passages(record, role, where):
            return found
    return ()


def is_pair(names: Iterable[str]) -> bool:
    """Whether records of these fields quote the passages of their questions."""
    roles = roles_of(names)
    quoting = (Role.POSITIVE, Role.TEXT, Role.ANSWERS)
    return Role.QUESTION in roles and any(role in roles for role in quoting)


def is_json(path: FilePath) -> bool:
    """Whether the name is that of a JSON or JSON-lines file, gzipped or not."""
    return os.fspath(path).removesuffix(".gz").endswith((".json", ".jsonl"))


def read_records(path: FilePath) -> Iterator[tuple[int, dict[str, Any]]] | None:
    """Yields (line, field -> value) of JSON, Parquet, or a table with a header; else None.

    Columns of a table are separated by tabs, commas, semicolons or bars, whichever makes the first
    row a header.

    Raises:
        DataError: malformed input; names file:line and the fix.
    """
    if is_json(path):
        return json_records(path)
    if os.fspath(path).endswith(".parquet"):
        return _parquet(path)
    for delimiter in _DELIMITERS:
        _, header = next(quoted_rows(path, delimiter), (0, []))
        if is_header(header):
            return _table(path, delimiter)
    return None


def _table(path: FilePath, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    rows = quoted_rows(path, delimiter)
    header = [name.strip() for name in next(rows)[1]]
    for line, row in rows:
        if len(row) != len(header):
            expected = f"{len(header)}: {', '.join(header)}"
            raise wrong_columns(f"{os.fspath(path)}:{line}", len(row), expected)
        yield line, dict(zip(header, row, strict=True))


def _parquet(path: FilePath) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fix = "pip install pyarrow, or write the file as JSON lines"
        raise DataError("Parquet needs pyarrow", where=os.fspath(path), fix=fix) from error
    try:
        rows = 0
        for batch in pyarrow.parquet.ParquetFile(os.fspath(path)).iter_batches():
            for record in batch.to_pylist():
                rows += 1
                yield rows, record
    except (OSError, pyarrow.ArrowException) as error:
        fix = "copy the file again, or write it as JSON lines"
        found = f"not a Parquet file that can be read: {error}"
        raise DataError(found, where=os.fspath(path), fix=fix) from error
