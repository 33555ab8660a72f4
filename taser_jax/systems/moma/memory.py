"""`taser memory`: adds memories to a mixture, removes and lists them; embeddings by their text.

<directory>/<hash>/hashes.npy     a hash of each text's tokens
<directory>/<hash>/               the embeddings in that order, as `taser encode` writes them
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import types
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int, UInt64

from taser_jax.assembly.model_directory import LoadedModel, check_vocabulary, load_model
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import first_host_only, writes
from taser_jax.models.batch import Embedded, Role
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.encoding import EncodeConfig, encode_texts
from taser_jax.storage.artifacts import (
    MEMORIES,
    METADATA,
    FilePath,
    fingerprint,
    replacing,
    require_equal,
)
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger, phase
from taser_jax.systems.moma.memories import (
    PARTS,
    Manifest,
    Memory,
    Mixture,
    read_manifest,
    text_hashes,
    write_manifest,
)

_HASHES = "hashes.npy"


class EmbeddingsByText:
    """Embeddings of texts in any order; equal texts share one.

    Args:
        directory: the directory that `encode_missing` wrote.
        hashes: hashes of the texts, from `text_hashes`.
        fingerprints: what the embeddings must be of, from `tower_fingerprints`.

    Raises:
        DataError: a text was not encoded.
        FingerprintError: the embeddings are of another tower.
    """

    def __init__(
        self,
        directory: FilePath,
        hashes: UInt64[np.ndarray, " texts"],
        fingerprints: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        self._parts, encoded = _parts(directory, fingerprints)
        self._starts = np.cumsum([0, *map(len, self._parts)])
        if not np.isin(hashes, encoded).all():
            fix = "run `taser memory add` again; it encodes what is missing"
            raise DataError("documents without an embedding", where=str(directory), fix=fix)
        order = np.argsort(encoded, kind="stable")
        self._places = order[np.searchsorted(encoded[order], hashes)]
        self.shape: tuple[int, int] = (len(hashes), self._parts[0].shape[1])

    @classmethod
    def of_mixture(cls, mixture: Mixture) -> EmbeddingsByText:
        """Embeddings of a mixture's documents, which one index reads as one.

        Equation 4 of MoMA: the documents of all memories compete by score.
        """
        return cls(mixture.manifest.embeddings, mixture.hashes)

    def __getitem__(self, rows: slice) -> Float32[np.ndarray, "rows dim"]:
        """Embeddings of consecutive rows."""
        return self.take(np.arange(*rows.indices(self.shape[0])))

    def take(self, rows: Int[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        """Embeddings of the given rows, in their order."""
        places = self._places[rows]
        part = np.searchsorted(self._starts, places, side="right") - 1
        embeddings = np.empty((len(places), self.shape[1]), np.float32)
        for number in np.unique(part):
            here = part == number
            embeddings[here] = self._parts[number].take(places[here] - self._starts[number])
        return embeddings


class EmbeddedPassages:
    """A token store's passages as embeddings, in place of their tokens.

    Args:
        directory: the directory that `encode_missing` wrote.
        store: the passages.
        tower: fingerprint of the passage tower.

    Raises:
        DataError: a passage was not encoded.
        FingerprintError: the embeddings are of another tower.
    """

    def __init__(self, directory: FilePath, store: TokenStore, *, tower: str) -> None:
        fingerprints, hashes = tower_fingerprints(tower, store), text_hashes(store.passages)
        self._embeddings = EmbeddingsByText(directory, hashes, fingerprints)
        self.lengths: Int[np.ndarray, " texts"] = store.passages.lengths

    @classmethod
    def encoded_by(
        cls, model: LoadedModel, directory: FilePath, store: TokenStore, *, config: EncodeConfig
    ) -> EmbeddedPassages:
        """All passages, after encoding those that no memory or run has encoded."""
        encode_missing(directory, model, store, config=config)
        return cls(directory, store, tower=model.passage_fingerprint)

    def tokens(self, rows: Int[np.ndarray, " rows"]) -> Embedded:
        """Embeddings of some passages."""
        return Embedded(self._embeddings.take(rows))


def encode_missing(
    directory: FilePath, model: LoadedModel, store: TokenStore, *, config: EncodeConfig
) -> int:
    """Encodes the passages that have no embedding yet; if interrupted, call it again.

    Args:
        directory: directory of one tower's embeddings; gets a folder for the new ones.
        model: the model whose passage tower encodes.
        store: the passages.
        config: sizes of batches.

    Returns:
        The number of texts encoded.

    Raises:
        FingerprintError: the directory has embeddings of another tower.
    """
    texts, fingerprints = store.passages, tower_fingerprints(model.passage_fingerprint, store)
    hashes, first = np.unique(text_hashes(texts), return_index=True)
    _, encoded = _parts(directory, fingerprints)
    is_new = ~np.isin(hashes, encoded)
    if not is_new.any():
        return 0
    rows = np.sort(first[is_new])
    new = TokenArray(texts.ids[rows], texts.lengths[rows])
    new_hashes = text_hashes(new)
    part_dir = pathlib.Path(directory) / fingerprint([new_hashes])
    part_dir.mkdir(parents=True, exist_ok=True)
    with replacing(part_dir / _HASHES) as scratch, open(scratch, "wb") as file:
        np.save(file, new_hashes)
    encode_fn = model.encode_fn(Role.PASSAGE)
    encode_texts(encode_fn, new, part_dir, fingerprints=fingerprints, config=config)
    return len(new)


def tower_fingerprints(tower: str, store: TokenStore) -> dict[str, str]:
    """What the embeddings of a store's passages depend on, besides their texts.

    Args:
        tower: fingerprint of the passage tower.
        store: the passages.
    """
    return {"model": tower, "vocabulary": store.metadata.vocabulary_fingerprint}


def _parts(
    directory: FilePath, fingerprints: Mapping[str, str]
) -> tuple[list[Embeddings], UInt64[np.ndarray, " texts"]]:
    """All finished embeddings, which must be of this tower, and the hash of each of their rows."""
    folders = [path.parent for path in sorted(pathlib.Path(directory).glob(f"*/{METADATA}"))]
    hashes = [np.load(folder / _HASHES) for folder in folders]
    parts = [Embeddings(folder) for folder in folders]
    for part in parts:
        fix = "keep each passage tower's embeddings in a directory of their own"
        require_equal(f"embeddings by text {directory}", part.fingerprints, fingerprints, fix)
    return parts, np.concatenate([np.zeros(0, np.uint64), *hashes])


class MemoryAction(enum.Enum):
    """What `taser memory` does with a mixture: add a memory, remove one, or list all."""

    ADD = "add"
    REMOVE = "remove"
    LIST = "list"


def memory(
    *,
    memory_dir: str,
    action: MemoryAction = MemoryAction.LIST,
    name: str | None = None,
    token_store: str | None = None,
    model_dir: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> list[str]:
    """Adds a memory to a mixture or removes one; prints the memories with their sizes.

    Args:
        memory_dir: the mixture; adding creates it.
        action: add, remove or list.
        name: the memory's name in the mixture; listing needs none.
        token_store: its documents' tokens; only adding needs them.
        model_dir: the model that looks documents up, MoMA's f_a; only adding needs it.
        config: sizes of batches.

    Returns:
        The names of the mixture's memories.

    Raises:
        ConfigError: a name, a token store or a model is missing, or there is no such memory.
        DataError: listing without a mixture.
    """
    if action is MemoryAction.ADD:
        given = _given(action, name=name, token_store=token_store, model_dir=model_dir)
        add_memory(**given, memory_dir=memory_dir, config=config)
    elif action is MemoryAction.REMOVE:
        others = remove_memory(**_given(action, name=name), memory_dir=memory_dir)
        if not others.memories:
            return []
    mixture = Mixture.open(memory_dir)
    for each in mixture.manifest.memories:
        print(f"{each.name}: {each.documents:,} documents of collection {each.collection}")
    print(f"together {len(mixture):,} different documents")
    return mixture.manifest.names


def _given(action: MemoryAction, **values: str | None) -> dict[str, str]:
    """The arguments that an action needs.

    Raises:
        ConfigError: one is missing.
    """
    for name, value in values.items():
        if not value:
            where, fix = f"taser memory {action.value}", f"give --gin.{name.upper()}=..."
            raise ConfigError(f"{name.upper()} is missing", where=where, fix=fix)
    return {name: value for name, value in values.items() if value}


@writes("{memory_dir}", kinds=[MEMORIES])
@first_host_only
def add_memory(
    *,
    name: str,
    token_store: str,
    model_dir: str,
    memory_dir: str,
    shared_embeddings: str | None = None,
    config: EncodeConfig = EncodeConfig(),
) -> dict[str, int]:
    """Adds a collection to a mixture; encodes only documents that no memory there has had.

    To extend a memory, add the larger collection under the same name. Embeddings depend on the
    passage tower alone: a model with another query tower uses the same ones.

    Args:
        name: the memory's name in the mixture.
        token_store: its documents' tokens.
        model_dir: the model that looks documents up, MoMA's f_a.
        memory_dir: the mixture; created where absent.
        shared_embeddings: a directory of embeddings for all mixtures of one passage tower; None is
            the mixture's own. A mixture keeps the directory that it was created with.
        config: sizes of batches.

    Returns:
        Documents "encoded", and "kept" from before, in the whole mixture.

    Raises:
        ConfigError: the name is another collection's.
        DataError: the token store has no passages.
        FingerprintError: another vocabulary, or the mixture was encoded by another passage tower.
    """
    store, model = TokenStore.open(token_store), load_model(model_dir)
    if not len(store):
        fix = "tokenize a collection with passages"
        raise DataError(f"memory {name!r} has no documents", where=token_store, fix=fix)
    check_vocabulary(model.vocabulary_dir, store)
    fingerprints = tower_fingerprints(model.passage_fingerprint, store)
    directory = shared_embeddings or str(pathlib.Path(memory_dir) / PARTS)
    before = read_manifest(memory_dir) or Manifest(fingerprints, (), directory)
    fix = "add this model's memories to a directory of their own"
    require_equal(f"memories {memory_dir}", before.fingerprints, fingerprints, fix)
    added = Memory(
        name,
        str(pathlib.Path(token_store)),
        store.metadata.collection,
        store.metadata.passages_fingerprint,
        len(store),
    )
    memories = {memory.name: memory for memory in before.memories}
    if name in memories and memories[name].collection != added.collection:
        problem = f"memory {name!r} is collection {memories[name].collection!r}"
        fix = f"choose another NAME, or `taser memory remove` {name!r} first"
        raise ConfigError(problem, where=memory_dir, fix=fix)
    with phase(f"memory {name}"):
        encoded = encode_missing(before.embeddings, model, store, config=config)
    memories[name] = added
    manifest = dataclasses.replace(before, memories=tuple(memories.values()))
    write_manifest(memory_dir, manifest)
    reused = len(Mixture(manifest)) - encoded
    logger.info("memory %s: %s encoded, %s kept", name, f"{encoded:,}", f"{reused:,}")
    return {"encoded": encoded, "kept": reused}


@writes("{memory_dir}", kinds=[MEMORIES])
@first_host_only
def remove_memory(*, name: str, memory_dir: str) -> Manifest:
    """Removes a memory from a mixture; its embeddings stay, so that adding it again encodes none.

    Args:
        name: the memory.
        memory_dir: the mixture.

    Returns:
        The others.

    Raises:
        ConfigError: there is no such memory.
    """
    manifest = read_manifest(memory_dir) or Manifest({}, ())
    others = tuple(memory for memory in manifest.memories if memory.name != name)
    if len(others) == len(manifest.memories):
        fix = f"name one of {', '.join(memory.name for memory in others) or 'those you add'}"
        raise ConfigError(f"there is no memory {name!r}", where="NAME", fix=fix)
    manifest = dataclasses.replace(manifest, memories=others)
    write_manifest(memory_dir, manifest)
    logger.info("memory %s: removed", name)
    return manifest
