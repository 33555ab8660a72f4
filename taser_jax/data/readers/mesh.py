"""MeSH's XML: one document for each scope note, with the name of its concept."""

from __future__ import annotations

import functools
import os
import xml.sax
import xml.sax.expatreader
import xml.sax.handler
import xml.sax.xmlreader
from collections.abc import Iterator

from taser_jax.data.files import open_bytes
from taser_jax.data.readers.located import checked_passages
from taser_jax.storage import limits
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage

_ROOTS = ("DescriptorRecordSet", "QualifierRecordSet")
_CONCEPT, _ID, _NAME, _NOTE = "Concept", "ConceptUI", "ConceptName", "ScopeNote"
_BLOCK = 1 << 20


def read_passages(
    path: FilePath, *, empty: EmptyPassages = EmptyPassages.ERROR
) -> Iterator[Passage]:
    """Scope notes of a Descriptor or Qualifier set; concepts without one are left out.

    Example:
        <Concept><ConceptUI>M0000001</ConceptUI><ConceptName><String>Calcimycin</String>
        </ConceptName><ScopeNote>An ionophorous ...</ScopeNote></Concept> is the passage M0000001
        with title "Calcimycin".

    Args:
        path: descYYYY.xml or qualYYYY.xml, local or gs://, plain or `.gz`.
        empty: what to do with scope notes without text.

    Yields:
        Passages in the file's order, as they are read; white space is joined.

    Raises:
        DataError: not XML, cut off, of another kind, or without any scope note.

    Source: MoMA (arXiv 2302.03754), appendix: MeSH's entries are ScopeNote and ConceptName.
    """
    return checked_passages(path, functools.partial(_located, path), empty)


def _located(path: FilePath) -> Iterator[tuple[int, Passage]]:
    where, found = os.fspath(path), False
    parser = xml.sax.expatreader.ExpatParser()
    concepts = _Concepts(where, parser)
    parser.setContentHandler(concepts)
    try:
        with open_bytes(path) as stream:
            while block := stream.read(_BLOCK):
                parser.feed(block)
                found |= bool(concepts.passages)
                yield from concepts.passages
                concepts.passages.clear()
        parser.close()
    except xml.sax.SAXParseException as error:
        raise DataError(
            f"not complete XML: {error.getMessage()}",
            where=f"{where}:{error.getLineNumber()}",
            expected="MeSH's XML up to the end of its root element",
            fix="download or copy the file again",
        ) from error
    if not found:
        raise DataError(
            "no concept has a ScopeNote",
            where=where,
            expected="a Descriptor or Qualifier set with scope notes",
            fix="take MeSH's full files, descYYYY.xml and qualYYYY.xml",
        )


class _Concepts(xml.sax.handler.ContentHandler):
    """Collects id, name and scope note of each concept, but not the names of its terms."""

    def __init__(self, where: str, place: xml.sax.xmlreader.Locator) -> None:
        super().__init__()
        self._place = place
        self.passages: list[tuple[int, Passage]] = []
        self._where = where
        self._path: list[str] = []
        self._texts: dict[str, list[str]] = {}
        # Of the concept so far.
        self._line, self._size = 0, 0

    def startElement(self, name: str, attrs: xml.sax.xmlreader.AttributesImpl) -> None:
        del attrs
        if not self._path and name not in _ROOTS:
            raise DataError(
                f"the root element is {name!r}",
                where=f"{self._where}:{self._place.getLineNumber()}",
                expected=" or ".join(_ROOTS),
                fix="give MeSH's Descriptor or Qualifier file",
            )
        self._path.append(name)
        if name == _CONCEPT:
            self._texts, self._size = {}, 0
            self._line = self._place.getLineNumber() or 0

    def characters(self, content: str) -> None:
        self._size += len(content)
        if self._size > limits.line_bytes():
            raise limits.line_too_long(self._where, self._line)
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
        self.passages.append((self._line, Passage(id=id_, text=text, title=title)))
