"""One index over the memories of a mixture: their embeddings, made once for each document."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, UInt64

from taser_jax.artifacts import METADATA, FilePath, fingerprint, replacing
from taser_jax.data.memories import Mixture, text_hashes
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.errors import DataError
from taser_jax.retrieval.embeddings import (
    Embeddings,
    EncodeConfig,
    EncodeFn,
    TokenRows,
    encode_texts,
)

_HASHES = "hashes.npy"


class JoinedEmbeddings:
    """Embeddings of a mixture's documents, row by row; an index reads them as one.

    Equation 4 of MoMA: one index of all memories, so that their documents compete by score.

    Args:
        memory_dir: whose parts are read.
        mixture: the documents.

    Raises:
        DataError: a document was not encoded.
    """

    def __init__(self, memory_dir: FilePath, mixture: Mixture) -> None:
        self.fingerprints: Mapping[str, str] = {
            **mixture.manifest.fingerprints,
            "mixture": mixture.manifest.fingerprint,
        }
        self._parts, hashes = _parts(memory_dir)
        self._starts = np.cumsum([0, *map(len, self._parts)])
        order = np.argsort(hashes, kind="stable")
        at = np.minimum(np.searchsorted(hashes[order], mixture.hashes), max(len(hashes) - 1, 0))
        self._places = order[at] if len(hashes) else at
        if not len(hashes) or (hashes[self._places] != mixture.hashes).any():
            raise DataError(
                "documents without an embedding",
                where=str(memory_dir),
                expected="every memory encoded to the end",
                fix="run `taser memory add` again; it encodes what is missing",
            )
        self.shape: tuple[int, int] = (len(mixture), self._parts[0].shape[1])

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


def encode_missing(
    encode_fn: EncodeFn,
    texts: TokenArray,
    memory_dir: FilePath,
    *,
    fingerprints: Mapping[str, str],
    config: EncodeConfig,
) -> int:
    """Encodes the texts of a memory that have no embedding yet; if interrupted, call it again.

    Args:
        encode_fn: tokens -> embeddings, of passages.
        texts: the memory's documents.
        memory_dir: gets a directory of embeddings in parts/.
        fingerprints: of the passage tower and the vocabulary.
        config: sizes of batches.

    Returns:
        Texts encoded.
    """
    hashes, first = np.unique(text_hashes(texts), return_index=True)
    _, known = _parts(memory_dir)
    is_new = ~np.isin(hashes, known)
    if not is_new.any():
        return 0
    rows = np.sort(first[is_new])
    new = TokenArray(texts.ids[rows], texts.lengths[rows])
    own = text_hashes(new)
    directory = pathlib.Path(memory_dir) / "parts" / fingerprint([own])
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / _HASHES) as scratch, open(scratch, "wb") as file:
        np.save(file, own)
    tokens: TokenRows = new
    encode_texts(encode_fn, tokens, directory, fingerprints=fingerprints, config=config)
    return len(new)


def _parts(memory_dir: FilePath) -> tuple[list[Embeddings], UInt64[np.ndarray, " texts"]]:
    """Finished embeddings, and the hash of each row of all."""
    found = sorted((pathlib.Path(memory_dir) / "parts").glob(f"*/{METADATA}"))
    parts = [Embeddings.open(path.parent) for path in found]
    hashes = [np.load(path.parent / _HASHES) for path in found]
    return parts, np.concatenate([np.zeros(0, np.uint64), *hashes])
