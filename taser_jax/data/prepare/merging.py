"""Several passage files as one collection: merges equal passages, separates clashing ids."""

from __future__ import annotations

import array
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Int32

from taser_jax.data.collections.store import PassageStore
from taser_jax.data.id_index import normalized_content
from taser_jax.data.readers.located import Context
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id


class PassageMerger:
    """Streams the passages of one or more files, and records their ids in the collection.

    A single file is passed through unchanged: row = position in the file. Several files become one
    collection in which no two passages have the same title and text (ignoring white space and
    Unicode form): the first stays, and the ids of the others become its aliases. An id that is
    already taken is written `label:id`. Merging takes some 300 bytes of memory per passage.

    Example:
        files a (id 1: "x", id 2: "y") and b (id 1: "y", id 3: "x", id 2: "z") give the rows
        1 "x", 2 "y", b:2 "z", with the aliases b:1 -> row 1, b:3 and 3 -> row 0.

    Args:
        sources: label of each file, the prefix for clashing ids -> its passages, which are read
            once; in the order of their rows.
    """

    def __init__(self, sources: Mapping[str, Iterable[Passage]]) -> None:
        self._sources = sources
        for label in sources if len(sources) > 1 else ():
            check_id(label, where=f"the label {label!r} of a file of passages")
        self.aliases: dict[str, int] = {}
        self.merged = 0
        self.renamed = 0
        self._rows_of_source: dict[str, range] = {}
        self._rows = array.array("i")

    def passages(self) -> Iterator[Passage]:
        """The merged passages in row order."""
        if len(self._sources) == 1:
            yield from next(iter(self._sources.values()))
            return
        row_of_content: dict[bytes, int] = {}
        taken: dict[str, int] = {}
        row = 0
        for label, passages in self._sources.items():
            start = row
            for passage in passages:
                content = normalized_content(passage.title, passage.text)
                encoded = content.encode("utf-8", "surrogatepass")
                key = hashlib.blake2b(encoded, digest_size=16).digest()
                name = f"{label}:{passage.id}"
                same = row_of_content.get(key)
                self._rows.append(row if same is None else same)
                if same is not None:
                    self.merged += 1
                    for alias in (name, passage.id):
                        if alias not in taken:
                            taken[alias] = self.aliases[alias] = same
                    continue
                row_of_content[key] = row
                is_repeated = taken.get(passage.id, -1) >= start
                if passage.id in taken:
                    self.renamed += 1
                    passage = dataclasses.replace(passage, id=name)
                if is_repeated or passage.id in taken:
                    problem = f"the id {passage.id!r} is used for two texts"
                    fix = "correct the file, or give it another label"
                    raise DataError(problem, where=f"passages {label!r}", fix=fix)
                taken[passage.id] = row
                yield passage
                row += 1
            self._rows_of_source[label] = range(start, row)

    def rows(self, store: PassageStore) -> Int32[np.ndarray, "passages"]:
        """Row in the collection of each passage that was read, in the order of reading."""
        if len(self._sources) == 1:
            return np.arange(len(store), dtype=np.int32)
        return np.array(self._rows, np.int32)

    def resolver(self, store: PassageStore) -> PassageResolver:
        """A resolver of the files' ids in the collection; call this after the last passage."""
        return PassageResolver(store, self._rows_of_source)


class PassageResolver:
    """Rows of the passages that question files and qrels refer to.

    Args:
        store: the collection.
        rows_of_source: label -> rows of the file's passages; empty for a single file.
    """

    def __init__(self, store: PassageStore, rows_of_source: dict[str, range]) -> None:
        self._store, self._rows_of_source = store, rows_of_source
        self._rows_of_context: dict[tuple[str, str], int | None] = {}

    def row_of_id(self, id: str, *, label: str, where: str) -> int | None:
        """Row of the passage that a file calls `id`; None if there is none.

        Args:
            id: the passage's id in its file.
            label: the file's label; "" if unknown.
            where: file:line, for messages.

        Raises:
            DataError: several files use the id for different passages, and no label is given.
        """
        if not self._rows_of_source:
            return self._store.find(id)
        labels = [label] if label else list(self._rows_of_source)
        rows = {self._row_in(name, id) for name in labels} - {None}
        if len(rows) > 1:
            raise DataError(
                f"the passage id {id!r} means different passages in the merged files",
                where=where,
                fix="name the file with QuestionFiles(..., passages=<label>), one of "
                + ", ".join(self._rows_of_source),
            )
        return rows.pop() if rows else None

    def row_of_context(self, context: Context, *, label: str, where: str) -> int | None:
        """Row of a quoted passage, by id if that is certain, otherwise by title and text."""
        if context.id and (label or not self._rows_of_source):
            row = self.row_of_id(context.id, label=label, where=where)
            if row is not None:
                return row
        key = (context.title, context.text)
        if key not in self._rows_of_context:
            rows = self._store.rows_with(title=context.title, text=context.text)
            self._rows_of_context[key] = rows[0] if rows else None
        return self._rows_of_context[key]

    def _row_in(self, label: str, id: str) -> int | None:
        row = self._store.find(f"{label}:{id}")
        if row is not None:
            return row
        row = self._store.find(id)
        if row is None:
            return None
        # Not by an alias: that is another file's id for the passage.
        own = row in self._rows_of_source[label] and self._store.ids[row] == id
        return row if own else None
