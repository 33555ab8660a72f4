"""Thesauri and ontologies, as JSON lines or OBO: one document for each defined term."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator

from taser_jax.data.files import json_lines, numbered_lines
from taser_jax.data.readers.located import checked_passages, id_field, string_field
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage

# def: "text, with \" for a quote" [where it is from]
_DEFINITION = re.compile(r'"((?:[^"\\]|\\.)*)"')


def read_passages(
    path: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[Passage]:
    r"""Terms with a definition, as title and text; terms without one are left out.

    JSON lines have `name`, `definition` and optionally `id`; without it, the id is the name with _
    for spaces. In OBO files the `[Term]` stanzas with `def:` are read, except obsolete ones.

    Example:
        {"id": "DOID:4", "name": "disease", "definition": "A disease is ..."}

    Args:
        path: OBO if the name ends in .obo or .obo.gz, else JSON lines; local or gs://.
        empty: has no effect, since terms without text are skipped; all readers have it.

    Yields:
        Passages in the file's order, as they are read.

    Raises:
        DataError: a defined term without a name, an id used twice, or no term with a definition.
    """
    is_obo = os.fspath(path).removesuffix(".gz").endswith(".obo")
    read = functools.partial(_defined, path, _obo_terms if is_obo else _json_terms)
    return checked_passages(path, read, empty)


def _defined(
    path: FilePath, read: Callable[[FilePath], Iterator[tuple[int, Passage]]]
) -> Iterator[tuple[int, Passage]]:
    found = False
    for line, passage in read(path):
        if not passage.text.strip():
            continue
        if not passage.title.strip():
            raise DataError(
                f"the term {passage.id!r} has no name",
                where=f"{os.fspath(path)}:{line}, field 'name'",
                expected="a name for each term with a definition",
            )
        found = True
        yield line, passage
    if not found:
        raise DataError(
            "no term has a definition",
            where=os.fspath(path),
            expected="terms with a name and a definition",
            fix="take a thesaurus with definitions: names alone say nothing to a retriever",
        )


def _json_terms(path: FilePath) -> Iterator[tuple[int, Passage]]:
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        fields = {
            name: string_field(record, name, where) if record.get(name) is not None else ""
            for name in ("name", "definition")
        }
        # Names have spaces, which ids cannot have.
        id_ = id_field(record, "id", where=where) or "_".join(fields["name"].split())
        yield line, Passage(id=id_, text=fields["definition"], title=fields["name"])


def _obo_terms(path: FilePath) -> Iterator[tuple[int, Passage]]:
    stanza, start, fields = "", 0, dict[str, str]()
    for line, content in numbered_lines(path):
        content = content.strip()
        if content.startswith("[") and content.endswith("]"):
            yield from _obo_term(stanza, start, fields)
            stanza, start, fields = content, line, {}
        elif ": " in content:
            name, _, value = content.partition(": ")
            fields.setdefault(name, value)
    yield from _obo_term(stanza, start, fields)


def _obo_term(stanza: str, line: int, fields: dict[str, str]) -> Iterator[tuple[int, Passage]]:
    quoted = _DEFINITION.match(fields.get("def", ""))
    if stanza != "[Term]" or quoted is None or fields.get("is_obsolete") == "true":
        return
    text = re.sub(r"\\(.)", r"\1", quoted[1])
    yield line, Passage(id=fields.get("id", ""), text=text, title=fields.get("name", ""))
