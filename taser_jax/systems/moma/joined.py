"""Embeddings of documents, found by their text and computed once; one index over a mixture."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, UInt64

from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.models.batch import Embedded
from taser_jax.retrieval.embeddings import Embeddings, EncodeFn, encode_texts
from taser_jax.retrieval.encode_config import EncodeConfig
from taser_jax.storage.artifacts import METADATA, FilePath, fingerprint, replacing, require_equal
from taser_jax.storage.errors import DataError
from taser_jax.systems.moma.memories import Mixture, text_hashes

_HASHES = "hashes.npy"


class EmbeddingsByText:
    """Embeddings of texts in any order, found by a hash of their tokens; equal texts share one.

    Args:
        directory: the directory that `encode_missing` wrote.
        hashes: hashes of the texts, from `text_hashes`.

    Raises:
        DataError: a text was not encoded.
    """

    def __init__(self, directory: FilePath, hashes: UInt64[np.ndarray, " texts"]) -> None:
        self._parts, known = _parts(directory)
        self._starts = np.cumsum([0, *map(len, self._parts)])
        order = np.argsort(known, kind="stable")
        at = np.minimum(np.searchsorted(known[order], hashes), max(len(known) - 1, 0))
        self._places = order[at] if len(known) else at
        if not len(known) or (known[self._places] != hashes).any():
            raise DataError(
                "documents without an embedding",
                where=str(directory),
                expected="every memory encoded to the end",
                fix="run `taser memory add` again; it encodes what is missing",
            )
        self.shape: tuple[int, int] = (len(hashes), self._parts[0].shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop."""
        return self.take(np.arange(start, min(stop, self.shape[0])))

    def take(self, rows: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Embeddings of the given rows, in their order."""
        places = self._places[rows]
        part = np.searchsorted(self._starts, places, side="right") - 1
        found = np.empty((len(places), self.shape[1]), np.float32)
        for number in np.unique(part):
            here = part == number
            found[here] = self._parts[number].take(places[here] - self._starts[number])
        return found


class JoinedEmbeddings(EmbeddingsByText):
    """Embeddings of a mixture's documents, row by row; an index reads them as one.

    Equation 4 of MoMA: one index of all memories, so that their documents compete by score.

    Args:
        mixture: the documents.

    Raises:
        DataError: a document was not encoded.
    """

    def __init__(self, mixture: Mixture) -> None:
        self.fingerprints: Mapping[str, str] = mixture.fingerprints
        super().__init__(mixture.manifest.embeddings_dir, mixture.hashes)


class EmbeddedTexts:
    """A token store's passages as embeddings, in place of their tokens.

    Args:
        directory: the directory that `encode_missing` wrote.
        texts: the passages.
        fingerprints: those of the passage tower and the vocabulary.

    Raises:
        DataError: a passage was not encoded.
        FingerprintError: the embeddings are of another tower.
    """

    def __init__(
        self, directory: FilePath, texts: TokenArray, *, fingerprints: Mapping[str, str]
    ) -> None:
        _check_parts(directory, fingerprints)
        self._embeddings = EmbeddingsByText(directory, text_hashes(texts))
        self.lengths: Int[np.ndarray, " texts"] = texts.lengths

    def tokens(self, rows: Int[np.ndarray, " rows"]) -> Embedded:
        """Embeddings of some passages."""
        return Embedded(self._embeddings.take(rows))


def encode_missing(
    encode_fn: EncodeFn,
    texts: TokenArray,
    directory: FilePath,
    *,
    fingerprints: Mapping[str, str],
    config: EncodeConfig,
) -> int:
    """Encodes the texts of a memory that have no embedding yet; if interrupted, call it again.

    Args:
        encode_fn: tokens -> embeddings of passages.
        texts: the memory's documents.
        directory: directory of one tower's embeddings; gets a folder for the new ones.
        fingerprints: those of the passage tower and the vocabulary.
        config: sizes of batches.

    Returns:
        The number of texts encoded.

    Raises:
        FingerprintError: the directory has embeddings of another tower.
    """
    hashes, first = np.unique(text_hashes(texts), return_index=True)
    known = _check_parts(directory, fingerprints)
    is_new = ~np.isin(hashes, known)
    if not is_new.any():
        return 0
    rows = np.sort(first[is_new])
    new = TokenArray(texts.ids[rows], texts.lengths[rows])
    own = text_hashes(new)
    part_dir = pathlib.Path(directory) / fingerprint([own])
    part_dir.mkdir(parents=True, exist_ok=True)
    with replacing(part_dir / _HASHES, recorded=True) as scratch, open(scratch, "wb") as file:
        np.save(file, own)
    encode_texts(encode_fn, new, part_dir, fingerprints=fingerprints, config=config)
    return len(new)


def _check_parts(
    directory: FilePath, fingerprints: Mapping[str, str]
) -> UInt64[np.ndarray, " texts"]:
    """Hashes of the embedded texts, after checking that all embeddings are of this tower."""
    parts, known = _parts(directory)
    for part in parts:
        fix = "keep each passage tower's embeddings in a directory of their own"
        require_equal(f"embeddings by text {directory}", part.fingerprints, fingerprints, fix)
    return known


def _parts(directory: FilePath) -> tuple[list[Embeddings], UInt64[np.ndarray, " texts"]]:
    """All finished embeddings, and the hash of each of their rows."""
    found = sorted(pathlib.Path(directory).glob(f"*/{METADATA}"))
    parts = [Embeddings.open(path.parent) for path in found]
    hashes = [np.load(path.parent / _HASHES) for path in found]
    return parts, np.concatenate([np.zeros(0, np.uint64), *hashes])
