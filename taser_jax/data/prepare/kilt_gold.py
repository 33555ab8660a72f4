"""From KILT's provenance to rows of a collection."""

from __future__ import annotations

import array
import enum
from collections.abc import Iterable, Iterator

import numpy as np

from taser_jax.data.collections.store import PassageStore
from taser_jax.data.id_index import HashIndex, text_hash
from taser_jax.data.readers.kilt import KiltPassage, Provenance, Span
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


class Gold(enum.Enum):
    """Which passages a provenance makes gold.

    PASSAGE: the one with its passage id, or those that overlap its characters or, if none does, its
        paragraphs. None if the file or the passages lack positions.
    PAGE: all passages of its page, as TACO-DR does for AIDA.
    FINEST: as PASSAGE, or as PAGE if that gives none.
    """

    PASSAGE = "passage"
    PAGE = "page"
    FINEST = "finest"


class ProvenanceIndex:
    """Records the page and position of each streamed passage of a collection.

    It takes 8 bytes per passage, and 16 more if the passages have positions in their pages. Pages
    are identified by 64-bit hashes: among 6 million pages, two share one in one of a million
    collections.
    """

    def __init__(self) -> None:
        self._pages = array.array("Q")
        self._spans = array.array("i")
        self._has_spans = False
        self._store: PassageStore | None = None
        self._by_page: HashIndex | None = None

    def watch(self, passages: Iterable[KiltPassage]) -> Iterator[Passage]:
        """The passages in row order, which are recorded as they are read."""
        for row, one in enumerate(passages):
            self._has_spans = self._has_spans if row else one.span is not None
            self._pages.append(text_hash(one.passage.page_id))
            if self._has_spans:
                assert one.span is not None
                self._spans.extend((*one.span.start, *one.span.end))
            yield one.passage

    def close(self, store: PassageStore) -> None:
        """Prepares for queries, once all passages have been written to `store`."""
        self._store = store
        self._by_page = HashIndex.from_hashes(np.frombuffer(self._pages, np.uint64))

    def has_page(self, page_id: str) -> bool:
        """Whether any passage is of this page."""
        return bool(page_id) and bool(self._rows_of_page(page_id))

    def rows(self, provenance: Provenance, gold: Gold, where: str) -> tuple[list[int], bool]:
        """Gold rows of a provenance, and whether they are a whole page for lack of a position.

        Args:
            provenance: its page must be in the collection (`has_page`).
            gold: which passages are gold.
            where: file:line, for messages.

        Raises:
            DataError: its passage is not in the collection, or is of another page.
        """
        page = self._rows_of_page(provenance.page_id)
        if gold is Gold.PAGE:
            return page, False
        if provenance.passage_id:
            return [self._row_of_passage(provenance, page, where)], False
        rows = self._overlapping(page, provenance.span)
        if rows or gold is Gold.PASSAGE:
            return rows, False
        return page, True

    def _rows_of_page(self, page_id: str) -> list[int]:
        assert self._by_page is not None
        return self._by_page.candidates(text_hash(page_id))

    def _row_of_passage(self, provenance: Provenance, page: list[int], where: str) -> int:
        assert self._store is not None
        row = self._store.find(provenance.passage_id)
        at = f"{where}, field 'passage_id'"
        if row is None:
            raise DataError(
                f"no passage has the id {provenance.passage_id!r}",
                where=at,
                expected=f"an id of the collection, such as {self._store.ids[0]!r}",
                fix="give the passage file that the queries were made from",
            )
        if row not in page:
            raise DataError(
                f"passage {provenance.passage_id!r} is not of page {provenance.page_id!r}",
                where=at,
                expected=f"a passage of the page, such as {self._store.ids[page[0]]!r}",
                fix="give the passage file that the queries were made from",
            )
        return row

    def _overlapping(self, page: list[int], span: Span | None) -> list[int]:
        if span is None or not self._has_spans:
            return []
        for wanted in (span, span.whole_paragraphs()):
            if rows := [row for row in page if self._span(row).overlaps(wanted)]:
                return rows
        return []

    def _span(self, row: int) -> Span:
        a, b, c, d = self._spans[4 * row : 4 * row + 4]
        return Span((a, b), (c, d))
