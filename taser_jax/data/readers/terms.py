"""Defined terms, a document for each: MeSH's scope notes, and thesauri as JSON lines."""

from __future__ import annotations

import os
import xml.sax
import xml.sax.expatreader
import xml.sax.handler
import xml.sax.xmlreader
from collections.abc import Iterator

import msgspec

from taser_jax.data import files
from taser_jax.data.files import json_lines, open_bytes
from taser_jax.data.readers.located import LocatedPassage
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage
from taser_jax.storage.typed_files import typed

_ROOTS = ("DescriptorRecordSet", "QualifierRecordSet")
_CONCEPT, _ID, _NAME, _NOTE = "Concept", "ConceptUI", "ConceptName", "ScopeNote"
_BLOCK = 1 << 20


def scope_notes(path: FilePath) -> Iterator[LocatedPassage]:
    """Scope notes of a Descriptor or Qualifier set; concepts without one are left out.

    Example:
        <Concept><ConceptUI>M0000001</ConceptUI><ConceptName><String>Calcimycin</String>
        </ConceptName><ScopeNote>An ionophorous ...</ScopeNote></Concept> is the passage M0000001
        with title "Calcimycin"; white space is joined.

    Args:
        path: descYYYY.xml or qualYYYY.xml, local or gs://, plain or `.gz`.

    Raises:
        DataError: not XML, cut off, of another kind, or without any scope note.

    Source: MoMA (arXiv 2302.03754), appendix: MeSH's entries are ScopeNote and ConceptName.
    """
    where, any_note = os.fspath(path), False
    parser = xml.sax.expatreader.ExpatParser()
    concepts = _Concepts(where, parser)
    parser.setContentHandler(concepts)
    try:
        with open_bytes(path) as stream:
            while block := stream.read(_BLOCK):
                parser.feed(block)
                any_note |= bool(concepts.passages)
                yield from concepts.passages
                concepts.passages.clear()
        parser.close()
    except xml.sax.SAXParseException as error:
        message = f"not complete XML: {error.getMessage()}"
        at = f"{where}:{error.getLineNumber()}"
        raise DataError(message, where=at, fix="download or copy the file again") from error
    if not any_note:
        fix = "take MeSH's full files, descYYYY.xml and qualYYYY.xml"
        raise DataError("no concept has a ScopeNote", where=where, fix=fix)


class _Concepts(xml.sax.handler.ContentHandler):
    """Collects id, name and scope note of each concept, but not the names of its terms."""

    def __init__(self, where: str, place: xml.sax.xmlreader.Locator) -> None:
        super().__init__()
        self._place = place
        self.passages: list[LocatedPassage] = []
        self._where = where
        self._path: list[str] = []
        self._texts: dict[str, list[str]] = {}
        # Of the concept so far.
        self._line, self._size = 0, 0

    def startElement(self, name: str, attrs: xml.sax.xmlreader.AttributesImpl) -> None:
        del attrs
        if not self._path and name not in _ROOTS:
            at = f"{self._where}:{self._place.getLineNumber()}"
            fix = f"give MeSH's Descriptor or Qualifier file, whose root is {' or '.join(_ROOTS)}"
            raise DataError(f"the root element is {name!r}", where=at, fix=fix)
        self._path.append(name)
        if name == _CONCEPT:
            self._texts, self._size = {}, 0
            self._line = self._place.getLineNumber() or 0

    def characters(self, content: str) -> None:
        self._size += len(content)
        if self._size > files.LONGEST_LINE:
            raise files.line_too_long(self._where, self._line)
        parts = self._path[-3:]
        for field in (_ID, _NAME, _NOTE):
            if parts[-2:] == [_CONCEPT, field] or parts == [_CONCEPT, field, "String"]:
                self._texts.setdefault(field, []).append(content)

    def endElement(self, name: str) -> None:
        self._path.pop()
        if name != _CONCEPT or _NOTE not in self._texts:
            return
        id_, title, text = (
            " ".join("".join(self._texts.get(field, [])).split()) for field in (_ID, _NAME, _NOTE)
        )
        self.passages.append(LocatedPassage(self._line, Passage(id=id_, text=text, title=title)))


class _Term(msgspec.Struct):
    name: str = ""
    definition: str = ""
    id: str | int = ""


def defined_terms(path: FilePath) -> Iterator[LocatedPassage]:
    """Terms with a definition, as title and text; terms without one are left out.

    They have `name`, `definition` and optionally `id`; without it, the id is the name with _ for
    spaces.

    Example:
        {"id": "DOID:4", "name": "disease", "definition": "A disease is ..."}

    Args:
        path: JSON lines, local or gs://.

    Raises:
        DataError: a defined term without a name, or no term with a definition.
    """
    any_defined = False
    for line, record in json_lines(path):
        where = f"{os.fspath(path)}:{line}"
        term = typed(record, _Term, where=where, fix="write {name, definition, id}")
        if not term.definition.strip():
            continue
        if not term.name.strip():
            where, message = f"{where}, field 'name'", f"the term {str(term.id)!r} has no name"
            raise DataError(message, where=where, fix="name it, or remove its definition")
        any_defined = True
        # Names have spaces, which ids cannot have.
        id_ = str(term.id) or "_".join(term.name.split())
        yield LocatedPassage(line, Passage(id_, term.definition, term.name))
    if not any_defined:
        fix = "take a thesaurus with definitions: names alone say nothing to a retriever"
        raise DataError("no term has a definition", where=os.fspath(path), fix=fix)
