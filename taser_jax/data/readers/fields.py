"""Records of files by the names of their fields: tables, JSON, Parquet."""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import enum
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.readers.dialects import as_dpr
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, normalized_content, text_hash
from taser_jax.storage.typed_files import typed

# A longer column means an unclosed quote that swallowed the following lines.
_LONGEST_FIELD = 1 << 24
_DELIMITERS = "\t,;|"
_NO_LITERAL = (TypeError, ValueError, SyntaxError, MemoryError, RecursionError)
# Paragraph and character in it. A whole paragraph ends at this character.
Position = tuple[int, int]
PARAGRAPH_END = (1 << 31) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of a page, from `start` up to but excluding `end`.

    Attributes:
        start: paragraph and character of the first character.
        end: paragraph and character after the last one.
    """

    start: Position
    end: Position

    def overlaps(self, other: Span) -> bool:
        """Whether the two spans share a character."""
        return self.start < other.end and other.start < self.end

    def whole_paragraphs(self) -> Span:
        """The paragraphs that the span touches."""
        return Span((self.start[0], 0), (self.end[0], PARAGRAPH_END))


def lines_of(path: FilePath) -> Iterator[tuple[str, str]]:
    """Yields (file:line, line)."""
    return ((f"{os.fspath(path)}:{number}", line) for number, line in numbered_lines(path))


def plain_rows(path: FilePath, delimiter: str | None = "\t") -> Iterator[tuple[str, list[str]]]:
    """Yields (file:line, columns); a quote is an ordinary character, None any white space."""
    for where, line in lines_of(path):
        columns = line.rstrip("\r\n").split(delimiter)
        if columns not in ([], [""]):
            yield where, columns


def quoted_rows(path: FilePath, delimiter: str = "\t") -> Iterator[tuple[str, list[str]]]:
    """Yields (file:line of a row's beginning, columns), with csv's double quotes.

    A quoted column may span lines. A line whose quotes are not csv's is taken as it is.

    Example:
        A column `"a ""b"" c"` is `a "b" c`, and `"a" b`, which is none of csv's, is `"a" b`.

    Raises:
        DataError: a column that spans what seem to be rows of their own.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines = lines_of(path)
    while True:
        lines, following = itertools.tee(lines)
        if (start := next(following, None)) is None:
            return
        where, line = start
        try:
            row = next(csv.reader((each for _, each in lines), delimiter=delimiter, strict=True))
        except csv.Error:
            row, lines = line.rstrip("\r\n").split(delimiter), following
        if any("\n" in column for column in row) and _spans_rows(row, delimiter):
            fix = 'close the quote, or write "" for one that belongs to the text'
            raise DataError("a quote left open, which rows follow", where=where, fix=fix)
        if row:
            yield where, row


def _spans_rows(row: Sequence[str], delimiter: str) -> bool:
    """Whether each line that a row was read from has as many columns, and an id like the first's.

    Example:
        The row [1, "a,b⏎2,c", "d"] was read from `1,"a,b` and `2,c",d`. Of `1,"a, b⏎c, d",e` the
        second line has no id like `1`.
    """
    lines = delimiter.join(row).split("\n")
    if {line.count(delimiter) for line in lines} != {len(row) - 1} or len(row) < 2:
        return False
    # Letters and digits, whatever their number: `p12` is like `p9`.
    ids = (line.partition(delimiter)[0] for line in lines)
    kinds = {re.sub(r"[^\W\d]+", "a", re.sub(r"\d+", "0", id)) for id in ids}
    return len(kinds) == 1 and " " not in kinds.pop()


class Role(enum.Enum):
    """What a field holds; the value lists the names that it goes by, the usual one first."""

    ID = "id _id"
    TITLE = "title heading headline subject name"
    TEXT = "text passage body content contents page_content document abstract context definition"
    PAGE = "wikipedia_id page_id"
    PARAGRAPH = "paragraph_id"
    QUESTION = "question query anchor claim"
    ANSWERS = "answers answer response"
    POSITIVE = "positive positives pos positive_passages positive_ctxs"
    NEGATIVE = (
        "negative negatives neg hard_negatives hard_negative hard_negative_ctxs negative_passages"
    )
    OTHER_NEGATIVE = "negative_ctxs"
    QUERY_ID = "query_id qid question_id topic_id"
    PASSAGE_ID = "passage_id corpus_id chunk_id docid doc_id pid docno document_id cord_uid"
    RELEVANCE = "relevance score grade label rel judgment"


# Of records that quote the passages of their questions.
_ANSWERING = (Role.POSITIVE, Role.TEXT, Role.ANSWERS)
_REFUTING = r"-\d.*|0+([.,]0+)?|false|no|(ir|no[nt][ _-]?)relevant"


# Records of a file have few sets of fields.
@functools.lru_cache(maxsize=1024)
def roles_of(names: tuple[str, ...]) -> Mapping[Role, list[str]]:
    """The fields of each role, those of the usual name first.

    Example:
        >>> roles_of(("Query", "negative_1", "negative_2", "x"))[Role.NEGATIVE]
        ['negative_1', 'negative_2']
    """
    plain = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in names}
    # text1 and text2 are two things, answer1 to answer4 a choice.
    numbered = re.compile(r"\A((hard_)?(pos|neg)[a-z_]*?)_?\d+\Z")
    plain = {name: numbered.sub(r"\1", word) for name, word in plain.items()}
    fields = {
        role: [name for usual in role.value.split() for name in names if plain[name] == usual]
        for role in Role
    }
    return {role: of_role for role, of_role in fields.items() if of_role}


def as_list(value: object) -> object:
    """A list that a table's column has, as in DPR's .qa.csv; other values as they are.

    Example:
        >>> as_list("['Ada', 'Lovelace']"), as_list("[1] says so")
        (['Ada', 'Lovelace'], '[1] says so')
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(*_NO_LITERAL):
            return ast.literal_eval(value.strip())
    return value


def content_id(title: str, text: str) -> str:
    """An id made of the content, so that equal passages without ids are one."""
    return f"{text_hash(normalized_content(title, text)):016x}"


class _Quoted(msgspec.Struct):
    """A passage that a record quotes: DPR's context, or a text alone."""

    text: str = ""
    title: str = ""
    passage_id: str | int = ""
    psg_id: str | int = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One row or object of a file, whose fields go by their roles.

    Attributes:
        where: file:line of its beginning.
        values: field -> value.
    """

    where: str
    values: Mapping[str, object]

    def first(self, *roles: Role) -> str | None:
        """The field of the first of these roles that there is; the usual name goes first."""
        fields = roles_of(tuple(self.values))
        return next((fields[role][0] for role in roles if role in fields), None)

    def place(self, field: str) -> str:
        """file:line and field, for messages."""
        return f"{self.where}, field {field!r}"

    def string(self, *roles: Role, required: str = "") -> str:
        """The field of the first of these roles as a string, integers too; empty if there is none.

        Raises:
            DataError: another value, or none, where a field is `required` by its usual name.
        """
        field = self.first(*roles)
        if field is None and required:
            fix = f"give every record a field {required!r}"
            raise DataError(f"no field {required!r}", where=self.place(required), fix=fix)
        value = None if field is None else self.values[field]
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            fix = "write a string or an integer"
            raise DataError(f"found {value!r}", where=self.place(field or ""), fix=fix)
        return "" if value is None else str(value)

    def passages(self, role: Role) -> tuple[Passage, ...]:
        """The passages that the fields of a role quote: texts, or {text, title}.

        Raises:
            DataError: a value that is neither.
        """
        fix = "write a text, a list of texts, or {text, title}"
        contexts = []
        # Of several answers, say a person's and a model's, the first counts, as everywhere.
        count = 1 if role in (Role.TEXT, Role.ANSWERS) else None
        for field in roles_of(tuple(self.values)).get(role, [])[:count]:
            value: Any = as_list(self.values[field])
            for content in value if isinstance(value, list) else [value]:
                parts = content if isinstance(content, dict) else {"text": content}
                quoted = typed(parts, _Quoted, where=self.place(field), fix=fix)
                text, title = quoted.text, quoted.title
                if role is Role.TEXT and (titled := self.first(Role.TITLE)):
                    title = str(self.values[titled] or "")
                id = str(quoted.passage_id) or str(quoted.psg_id)
                if id or text.strip() or title.strip():
                    contexts.append(Passage(id or content_id(title, text), text, title))
        return tuple(contexts)

    def positives(self) -> tuple[Passage, ...]:
        """The passages that answer its question: its positives, or else its text or answer.

        A list of positives stands for itself, also if it is empty.
        """
        is_list = isinstance(self.values.get(self.first(Role.POSITIVE) or ""), list)
        roles = (Role.POSITIVE,) if is_list else _ANSWERING
        return next(filter(None, map(self.passages, roles)), ())

    def is_refuted(self) -> bool:
        """Whether a grade of 0 or below, or a word, says that what it quotes is no answer."""
        grade = str(self.values.get(self.first(Role.RELEVANCE) or "")).strip().lower()
        return re.fullmatch(_REFUTING, grade) is not None

    def is_pair(self) -> bool:
        """Whether it has a question and quotes a passage that answers it."""
        return None not in (self.first(Role.QUESTION), self.first(*_ANSWERING))


def is_json(path: FilePath) -> bool:
    """Whether the name is that of a JSON or JSON-lines file, gzipped or not."""
    return os.fspath(path).lower().removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson"))


def read_json(path: FilePath) -> Iterator[Record]:
    """Records of JSON lines, or of an array."""
    return _placed(path, json_records(path))


def _placed(path: FilePath, numbered: Iterable[tuple[int, dict[str, object]]]) -> Iterator[Record]:
    for number, values in numbered:
        where = f"{os.fspath(path)}:{number}"
        yield from (Record(where, each) for each in as_dpr(values, where=where))


def read_records(path: FilePath) -> Iterator[Record] | None:
    """Records of JSON, Parquet, Arrow, or a table with a header; None of another file.

    Columns of a table are separated by tabs, commas, semicolons or bars, whichever makes the first
    row a header.

    Raises:
        DataError: malformed input; names file:line and the fix.
    """
    if is_json(path):
        return read_json(path)
    if os.fspath(path).lower().endswith((".parquet", ".arrow")):
        return _placed(path, enumerate(_arrow(path), start=1))
    for delimiter in _DELIMITERS:
        rows = quoted_rows(path, delimiter)
        where, header = next(rows, ("", []))
        if re.fullmatch("sep=.?", "".join(header)):
            # Tells Excel what separates the columns.
            where, header = next(rows, ("", []))
        names = [re.sub(r"(?i)\Aquestions\Z", "question", name.strip()) for name in header]
        known = roles_of(tuple(names))
        # A header has two names at least that are known; of a .csv or .tsv, a text's is enough.
        is_named = re.search(r"(?i)\.[ct]sv\b", os.fspath(path)) and Role.TEXT in known
        if is_named or sum(map(len, known.values())) >= 2:
            # Spreadsheets write empty columns, too.
            if len(filled := list(filter(None, names))) > len(set(filled)):
                problem = f"two columns have one name: {', '.join(filled)}"
                raise DataError(problem, where=where, fix="rename or remove one of them")
            return named(rows, names, f"{len(names)}: {', '.join(names)}")
    return None


def named(
    rows: Iterable[tuple[str, list[str]]], names: Sequence[str], expected: str, *, optional: int = 0
) -> Iterator[Record]:
    """Rows as records of these fields, of which the last may be absent where they are optional.

    Raises:
        DataError: a row of too few or too many columns; says what is expected.
    """
    for where, row in rows:
        if not len(names) - optional <= len(row) <= len(names):
            fix = "check for a missing tab, tabs or newlines within a text, or a quote left open"
            if optional and len(row) == 1:
                fix = "name the columns in a first line, such as id,title,text or question,answer; "
                fix += "save what is no table as .txt"
            raise DataError(f"{len(row)} columns, not {expected}", where=where, fix=fix)
        # A column without a name is empty, or numbers the rows, as pandas writes it.
        yield Record(where, {name: value for name, value in zip(names, row, strict=False) if name})


# Ends the name of a file that is one of several: "-00000-of-00003".
SHARD = re.compile(r"-\d{5}(-of-\d{5})$")


def first_shard(path: pathlib.Path) -> pathlib.Path:
    """The first of the files that a table is divided into; otherwise the file itself.

    Example:
        train-00001-of-00002.parquet goes with train-00000-of-00002.parquet.
    """
    is_table = path.suffix.lower() in (".parquet", ".arrow")
    return path.with_stem(SHARD.sub(r"-00000\1", path.stem)) if is_table else path


def _arrow(path: FilePath) -> Iterator[dict[str, object]]:
    """Rows of a Parquet file, or of an Arrow file as Hugging Face's `datasets` writes it.

    A first shard stands for all.
    """
    import pyarrow.parquet

    file = pathlib.Path(path)
    shards = [each for each in sorted(file.parent.glob("*")) if first_shard(each) == file]
    if (ending := SHARD.search(file.stem)) and len(shards) != int(ending[1].rpartition("-")[2]):
        problem, fix = f"{len(shards)} of these shards are there", "copy the missing ones, too"
        raise DataError(problem, where=os.fspath(path), fix=fix)
    for shard in map(os.fspath, shards or [file]):
        batches: Iterable[Any]
        try:
            if shard.endswith(".arrow"):
                batches = pyarrow.ipc.open_stream(pyarrow.memory_map(shard))
            else:
                batches = pyarrow.parquet.ParquetFile(shard).iter_batches()
            for batch in batches:
                yield from batch.to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            fix = "copy the file again, or write it as JSON lines"
            raise DataError(f"no rows of Arrow: {error}", where=shard, fix=fix) from error
