"""A mixture of memories: several collections of documents, to augment queries with, as one.

    <memory_dir>/memories.json          the memories, and the model that encodes them
    <memory_dir>/parts/<hash>/          embeddings, with the hash of each document's tokens;
                                        mixtures with the same passage tower may share a directory

Rows of a mixture number the documents of its memories, one memory after another. Texts that occur
in several memories are one document, that of the first.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jaxtyping import Bool, Int, UInt64

from taser_jax.data.batches.stream import Texts
from taser_jax.data.token_store.arrays import Ragged, TokenArray, TokenizedQueries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Augmented, States, Tokens
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.storage.typed_files import read_typed, to_plain

MANIFEST = "memories.json"
# The memory that holds the queries' positives and the end retriever's negatives.
SOURCE = "source"
# Where a mixture's embeddings are, unless it shares those of others.
PARTS = "parts"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """One memory of a mixture.

    Attributes:
        name: its name in the mixture.
        token_store: directory of its tokens.
        collection: its collection, for ids and texts.
        passages: fingerprint of its tokens.
        documents: number of its documents.
    """

    name: str
    token_store: str
    collection: str
    passages: str
    documents: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `memories.json`.

    Attributes:
        fingerprints: those of the model's passage tower and of the vocabulary.
        memories: the memories in the order of their rows.
        embeddings: directory of the passage tower's embeddings, by text.
    """

    fingerprints: Mapping[str, str]
    memories: tuple[Memory, ...]
    embeddings: str = PARTS

    @property
    def names(self) -> list[str]:
        """Names of the memories."""
        return [memory.name for memory in self.memories]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the documents, whichever model encodes them."""
        return artifacts.fingerprint_json(
            [[memory.name, memory.passages] for memory in self.memories]
        )


def _with_paths(manifest: Manifest, path_of: Callable[[str], str]) -> Manifest:
    memories = (
        dataclasses.replace(memory, token_store=path_of(memory.token_store))
        for memory in manifest.memories
    )
    embeddings = path_of(manifest.embeddings)
    return dataclasses.replace(manifest, memories=tuple(memories), embeddings=embeddings)


def read_manifest(memory_dir: artifacts.FilePath) -> Manifest | None:
    """The manifest of a directory; None if it has none."""
    path = pathlib.Path(memory_dir) / MANIFEST
    if not path.exists():
        return None
    fix = "add the memories to another directory with `taser memory add`"
    written = read_typed(path, Manifest, fix=fix, version=_VERSION)
    return _with_paths(written, functools.partial(os.path.join, path.parent))


def write_manifest(memory_dir: artifacts.FilePath, manifest: Manifest) -> None:
    """Writes `memories.json`; its paths are relative to it."""
    relative = _with_paths(manifest, functools.partial(artifacts.path_from, memory_dir))
    value = {"format_version": _VERSION, **to_plain(relative)}
    artifacts.write_json(pathlib.Path(memory_dir) / MANIFEST, value)


def text_hashes(texts: TokenArray) -> UInt64[np.ndarray, " texts"]:
    """A number for each text's tokens, equal for equal texts."""
    digests = (
        hashlib.blake2b(np.asarray(ids[:length], "<i4").tobytes(), digest_size=8).digest()
        for ids, length in zip(texts.ids, texts.lengths, strict=True)
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


class Mixture:
    """The documents of all memories, each text once.

    Args:
        manifest: the memories.

    Raises:
        DataError: no memory, or tokens that have changed since they were added.
    """

    def __init__(self, manifest: Manifest) -> None:
        if not manifest.memories:
            fix = "add one with `taser memory add`"
            raise DataError("the mixture has no memory", where=MANIFEST, fix=fix)
        self.manifest = manifest
        self.stores = [TokenStore.open(memory.token_store) for memory in manifest.memories]
        for memory, store in zip(manifest.memories, self.stores, strict=True):
            if store.metadata.passages_fingerprint != memory.passages:
                problem = f"the tokens of memory {memory.name!r} have changed since they were added"
                fix = f"remove {memory.name!r} and add it again"
                raise FingerprintError(problem, where=str(store.directory), fix=fix)
        hashes = np.concatenate([text_hashes(store.passages) for store in self.stores])
        self._starts = np.cumsum([0, *map(len, self.stores)])
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        # Documents in the order of their first texts.
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        self._texts, self._document = first[order], rank[inverse]
        self.hashes: UInt64[np.ndarray, " documents"] = hashes[self._texts]

    @classmethod
    def open(cls, memory_dir: artifacts.FilePath) -> Mixture:
        """Opens the mixture of a directory.

        Raises:
            DataError: the directory has none.
        """
        manifest = read_manifest(memory_dir)
        if manifest is None:
            fix = "add one with `taser memory add`, or correct MEMORY_DIR"
            raise DataError("the directory has no memories", where=os.fspath(memory_dir), fix=fix)
        return cls(manifest)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the passage tower, the vocabulary and the documents."""
        return {**self.manifest.fingerprints, "mixture": self.manifest.fingerprint}

    @property
    def length(self) -> int:
        """Tokens that documents are padded to."""
        return max(store.metadata.passage_length for store in self.stores)

    @functools.cached_property
    def lengths(self) -> Int[np.ndarray, " documents"]:
        """Real tokens of each document."""
        return np.concatenate([store.passages.lengths for store in self.stores])[self._texts]

    def places(
        self, rows: Int[np.ndarray, " rows"]
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """The number of each document's memory, and its row in that memory."""
        texts = self._texts[rows]
        memory = np.searchsorted(self._starts, texts, side="right") - 1
        return memory, texts - self._starts[memory]

    def gold(self, source: str, queries: TokenizedQueries) -> Ragged:
        """Each query's positives, rows of the memory `source`, as rows of the mixture.

        Raises:
            ConfigError: there is no memory of that name.
            FingerprintError: it is another collection than that of the queries.
        """
        names = self.manifest.names
        fix = f"name the memory of the queries' positives: {', '.join(names)}"
        if source not in names:
            raise ConfigError(f"there is no memory {source!r}", where="without_gold_of", fix=fix)
        number, positives = names.index(source), queries.positives
        collection = {"collection": self.stores[number].metadata.collection_fingerprint}
        own = {"collection": queries.collection_fingerprint}
        artifacts.require_equal(f"memory {source!r}", collection, own, fix)
        rows = self._starts[number] + positives.values
        return dataclasses.replace(positives, values=self._document[rows])

    def tokens(self, rows: Int[np.ndarray, " rows"]) -> Tokens:
        """Ids and mask of documents, padded to `length`."""
        rows = np.asarray(rows)
        memory, places = self.places(rows)
        ids = np.zeros((len(rows), self.length), np.int32)
        for number in np.unique(memory):
            here = memory == number
            of_memory = self.stores[number].passages.ids[places[here]]
            ids[here, : of_memory.shape[1]] = of_memory
        return Tokens(ids, np.arange(self.length) < self.lengths[rows][:, None])


@dataclasses.dataclass(frozen=True)
class AugmentedTexts:
    """Queries with their documents, as batches and encoders read them.

    Attributes:
        queries: the queries.
        rows: rows of each query's documents, -1 for none. [queries, K]
        documents: rows -> documents, as tokens, states or, for late fusion, as embeddings.
    """

    queries: Texts
    rows: Int[np.ndarray, "queries documents"]
    documents: Callable[[Int[np.ndarray, " rows"]], Tokens | States | np.ndarray]

    @property
    def lengths(self) -> Int[np.ndarray, " queries"]:
        """Real tokens of each query."""
        return self.queries.lengths

    def tokens(self, rows: Int[np.ndarray, " rows"]) -> Augmented:
        """Some queries with their documents."""
        query = self.queries.tokens(rows)
        assert isinstance(query, Tokens | States)
        chosen = self.rows[rows]
        present: Bool[np.ndarray, "queries documents"] = chosen >= 0
        documents = self.documents(np.where(present, chosen, 0).reshape(-1))
        documents = jax.tree.map(lambda a: a.reshape(*chosen.shape, *a.shape[1:]), documents)
        return Augmented(query, documents, present)
