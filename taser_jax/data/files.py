"""Opens text files, local, on gs:// or gzipped, with errors that name file and line."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, TypeVar
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from etils import epath

from taser_jax.storage.artifacts import FilePath, is_remote
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import check_regular, check_text

T = TypeVar("T")

# Bytes of a line, or of a record of a JSON array: a few bytes of a compressed file can claim any
# amount of memory.
LONGEST_LINE = 64 << 20
_CHUNK = 1 << 20
# If a text is merely cut off, json reports an error at most this close to its end: no literal or
# escape is longer.
_CUT_LITERAL = 16
_VISIBLE = re.compile(r"(?s)(?!(.*/)?(\.|__MACOSX/))").match
_BETWEEN_VALUES = " \t\r\n,["
# An object around the array, as in SQuAD's files.
_AROUND_ARRAY = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')


def texts_among(files: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The text files among what `visible_files` gives."""
    return [path for path in files if is_text(path) and not path.is_dir()]


def visible_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of a folder and of those in it, sorted, and links to folders, not followed.

    Without what is hidden, which is a program's, and what `taser compare` wrote.
    """
    results = {path.parent for path in folder.rglob("decided.gin")}
    # A copied site may have folders of such names.
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(
        path
        for path in paths
        if _VISIBLE(path.relative_to(folder).as_posix()) and results.isdisjoint(path.parents)
    )


def is_text(path: FilePath) -> bool:
    """Whether the name is that of a text file, gzipped or not; judgements are none."""
    name = os.path.basename(path).lower()
    return re.fullmatch(r"(?s)(?!qrels).*\.(txt|md|html?)(\.gz)?", name) is not None


def in_blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`; the last may be shorter.

    Example:
        >>> list(in_blocks("abc", 2))
        [['a', 'b'], ['c']]
    """
    remaining = iter(items)
    while block := list(itertools.islice(remaining, size)):
        yield block


@contextlib.contextmanager
def open_bytes(path: FilePath) -> Iterator[IO[bytes]]:
    """Opens a local or gs:// file for reading, unzipping `.gz` on the way.

    Args:
        path: the file; decompressed if its name ends in .gz.

    Yields:
        A binary stream.

    Raises:
        DataError: the file is missing or unreadable, or its gzip stream is damaged or truncated.
    """
    check_regular(path)
    with contextlib.ExitStack() as stack:
        try:
            # TensorFlow's file opens at the first read: a missing one should be named here.
            if is_remote(path) and not epath.Path(path).is_file():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            stream = stack.enter_context(epath.Path(path).open("rb"))
            if os.fspath(path).endswith(".gz"):
                stream = stack.enter_context(gzip.open(stream, "rb"))
        except Exception as error:
            raise _unreadable(path, error) from error
        try:
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            problem = f"the gzip stream is damaged or truncated ({error})"
            fix = "copy or download the file again, and check it with gzip -t"
            raise DataError(problem, where=os.fspath(path), fix=fix) from error


@contextlib.contextmanager
def open_text(path: FilePath) -> Iterator[codecs.StreamReader]:
    r"""Opens a local, gs:// or `.gz` file as UTF-8 text, with newlines unchanged.

    Prefer `numbered_lines`, whose errors name the line.

    Args:
        path: the file.

    Yields:
        A text stream; a leading byte order mark is dropped.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with open_bytes(path) as stream:
        try:
            yield codecs.getreader("utf-8-sig")(stream)
        except UnicodeDecodeError as error:
            raise _not_utf8(os.fspath(path), error) from error


def numbered_lines(path: FilePath) -> Iterator[tuple[int, str]]:
    r"""Yields (line number from 1, line with its newline), reading as a stream.

    Args:
        path: a UTF-8 text file, local or gs://, gzipped if it ends in .gz.

    Yields:
        Line number and line; a final line may lack a newline.

    Raises:
        DataError: missing file, empty file, broken gzip, or a line that is not UTF-8 or longer
            than the limit.
    """
    number = 0
    with open_bytes(path) as stream:
        for number, line in enumerate(_lines(stream), start=1):
            if len(line) > LONGEST_LINE:
                raise line_too_long(path, number)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{os.fspath(path)}:{number}", error) from error
    if number == 0:
        raise _empty(path)


def first_lines(path: FilePath, count: int = 1) -> list[str]:
    """The first lines that are not blank, without their newlines; errors as of `numbered_lines`."""
    lines = (line.rstrip("\r\n") for _, line in numbered_lines(path) if line.strip())
    return list(itertools.islice(lines, count))


def tagged_blocks(path: FilePath, tag: str) -> Iterator[tuple[str, str]]:
    """Yields (file:line, content, with both tags) of each <tag>...</tag> of TREC.

    Raises:
        DataError: one that has no end.
    """
    start, lines = "", list[str]()
    # What follows the last one has to end, too.
    for number, content in itertools.chain(numbered_lines(path), [(0, f"<{tag}>")]):
        for line in re.split(rf"(?i)(?<=</{tag}>)", content):
            if re.match(rf"(?i)\s*<{tag}[\s>]", line):
                if start:
                    fix = f"write </{tag}> after it, or copy the file again"
                    raise DataError(f"a <{tag}> that does not end", where=start, fix=fix)
                start, lines = f"{os.fspath(path)}:{number}", []
            lines.append(line)
            if start and line.lower().endswith(f"</{tag}>"):
                yield start, "".join(lines)
                start = ""


def xml_elements(path: FilePath, *tags: str) -> Iterator[tuple[str, Element]]:
    """Yields (file:line of its end, element) of these tags; what has been read is emptied.

    Raises:
        DataError: XML that is malformed or cut off, or that declares entities, which a few lines
            can make as large as the memory.
    """
    parser: XMLPullParser[Element] = XMLPullParser(["end"])
    where = os.fspath(path)
    try:
        for number, content in numbered_lines(path):
            where = f"{os.fspath(path)}:{number}"
            if "<!ENTITY" in content:
                fix = "write what they stand for in their places, and remove <!ENTITY ...>"
                raise DataError("it declares entities", where=where, fix=fix)
            parser.feed(content)
            for event in parser.read_events():
                element = event[-1]
                assert isinstance(element, Element)
                # Of a name in a namespace, {http://...}topic, the last part counts.
                element.tag = element.tag.rpartition("}")[2]
                if element.tag in tags:
                    yield where, element
                    # Millions of elements would fill the memory.
                    element.clear()
        parser.close()
    except ParseError as error:
        fix = "correct it (& in a text is &amp;), or copy the file again"
        raise DataError(f"not complete XML: {error}", where=where, fix=fix) from error


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines; at most one byte more than the limit is read of each."""
    if not isinstance(stream, io.BufferedIOBase):
        # TensorFlow's files on buckets read whole lines only.
        yield from stream
        return
    while line := stream.readline(LONGEST_LINE + 1):
        yield line


def line_too_long(path: FilePath, line: int) -> DataError:
    """The error for a line, or for one record of a JSON array, beyond the limit."""
    return DataError(
        f"longer than {LONGEST_LINE >> 20:,} MiB",
        where=f"{os.fspath(path)}:{line}",
        expected="lines within the limit: one passage, query or record each",
        fix="check that the file has line ends, and is what it should be",
    )


def json_lines(path: FilePath) -> Iterator[tuple[int, dict[str, object]]]:
    """Yields (line number, object) of a JSON-lines file; blank lines are skipped."""
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _malformed_json(path, number, error) from error
        check_text(value, written=line, where=f"{os.fspath(path)}:{number}")
        yield number, _as_object(path, number, value)


def json_records(path: FilePath) -> Iterator[tuple[int, dict[str, object]]]:
    """Yields (line number, object) of a JSON array of objects or of a JSON-lines file.

    The first characters decide which of the two it is; an array may be the field "data" of an
    object. An array is read as a stream: memory holds about one object, not the file.
    """
    with open_text(path) as text:
        start = text.read(4096, 4096)
    if not start.strip():
        raise _empty(path)
    around = _AROUND_ARRAY.match(start)
    if around or start.lstrip()[0] == "[":
        yield from _json_array(path, around.end() if around else 0)
    else:
        yield from json_lines(path)


def _json_array(path: FilePath, begin: int) -> Iterator[tuple[int, dict[str, object]]]:
    decoder = json.JSONDecoder()
    buffer, position = "", 0
    at_end = False
    with open_text(path) as text:
        line = 1 + text.read(begin, begin).count("\n") if begin else 1
        while True:
            start = position
            while position < len(buffer) and buffer[position] in _BETWEEN_VALUES:
                position += 1
            line += buffer.count("\n", start, position)
            if buffer[position : position + 1] == "]":
                return
            where = f"{os.fspath(path)}:{line}"
            try:
                value, stop = decoder.raw_decode(buffer, position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or (
                    error.pos >= len(buffer) - _CUT_LITERAL
                )
                if not is_cut:
                    at = line + buffer.count("\n", position, error.pos)
                    raise _malformed_json(path, at, error) from error
                if at_end:
                    fix = "the file is truncated: copy or download it again"
                    raise DataError("the JSON array is not closed", where=where, fix=fix) from error
                unparsed = buffer[position:]
                if len(unparsed) > LONGEST_LINE:
                    raise line_too_long(path, line) from error
                # Growing by at least the retained length keeps parsing a huge value linear.
                size = max(_CHUNK, len(unparsed))
                more = text.read(size, size)
                buffer, position, at_end = unparsed + more, 0, not more
                continue
            except (ValueError, RecursionError) as error:
                raise _malformed_json(path, line, error) from error
            check_text(value, written=buffer[position:stop], where=where)
            yield line, _as_object(path, line, value)
            line += buffer.count("\n", position, stop)
            position = stop


def _as_object(path: FilePath, line: int, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        problem = f"found a JSON {type(value).__name__}, not an object, {{...}}"
        fix = "write one object per line, or one array of objects"
        raise DataError(problem, where=f"{os.fspath(path)}:{line}", fix=fix)
    return value


def _malformed_json(path: FilePath, line: int, error: Exception) -> DataError:
    # Other errors come from numbers of thousands of digits and nesting thousands of levels deep.
    problem = str(error)
    if isinstance(error, json.JSONDecodeError):
        problem = f"{error.msg} (column {error.colno})"
    fix = "correct it; each line is one object, or the file one array of objects"
    return DataError(f"not valid JSON: {problem}", where=f"{os.fspath(path)}:{line}", fix=fix)


def _empty(path: FilePath) -> DataError:
    fix = "check that the command that wrote it finished"
    return DataError("the file is empty", where=os.fspath(path), fix=fix)


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    bad = error.object[error.start : error.start + 1].hex()
    # Windows' "Unicode" begins with one of these.
    utf_16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    other = "windows-1252 (or windows-1251, gb18030, cp932, cp949: look at the result)"
    fix = f"convert it with iconv -t utf-8 -f {'utf-16' if utf_16 else other}"
    if error.object.startswith((b"PK\x03\x04", b"%PDF")):
        fix = "save it as CSV or as text: it is a file of Office or a PDF"
    return DataError(f"not UTF-8: byte 0x{bad} ({error.reason})", where=where, fix=fix)


def _unreadable(path: FilePath, error: Exception) -> DataError:
    reason = getattr(error, "strerror", None) or str(error)
    fix = "check the path's spelling and the file's permissions"
    return DataError(f"cannot be read: {reason}", where=os.fspath(path), fix=fix)
