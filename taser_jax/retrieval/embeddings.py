"""Encodes token arrays into row-aligned embedding shards: resumable, with little padding."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Int

from taser_jax.models.batch import EncoderInput
from taser_jax.models.encoded import Normalization
from taser_jax.retrieval.encode_config import EmbeddingDtype, EncodeConfig
from taser_jax.storage import artifacts
from taser_jax.storage.errors import DataError
from taser_jax.storage.json_fields import JsonField, JsonType
from taser_jax.storage.progress import bar, logger

_VERSION = 1
# Batches queued on the device before the first result is awaited.
_IN_FLIGHT = 2
_COUNT = JsonField(JsonType.INTEGER, required=True, minimum=1)
_FIELDS = {
    "fingerprints": artifacts.FINGERPRINTS,
    "num_rows": dataclasses.replace(_COUNT, minimum=0),
    "dim": _COUNT,
    "shard_rows": _COUNT,
    "dtype": JsonField(
        JsonType.STRING, required=True, choices=tuple(kind.value for kind in EmbeddingDtype)
    ),
}
EncodeFn = Callable[[EncoderInput], jax.typing.ArrayLike]


@runtime_checkable
class TokenRows(Protocol):
    """Token access: a `TokenStore`'s `passages`, or one split of its queries."""

    @property
    def lengths(self) -> Int[np.ndarray, " texts"]:
        """Real tokens of each text."""

    def tokens(self, rows: np.ndarray) -> EncoderInput:
        """Tokens of the given rows, or their states, padded at the end to one length."""


class Embeddings:
    """A finished directory of embeddings, memory-mapped; row i is row i of the passage store.

    Attributes:
        KIND: its kind in metadata.json.
        directory: its directory.
        metadata: content of metadata.json.
        fingerprints: fingerprints of the model, collection and vocabulary it was made from.
        shape: (texts, dimensions).
    """

    KIND = "embeddings"

    def __init__(self, directory: artifacts.FilePath) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = artifacts.read_metadata(directory, self.KIND, _VERSION, fields=_FIELDS)
        self.fingerprints: dict[str, str] = self.metadata["fingerprints"]
        self.shape: tuple[int, int] = (self.metadata["num_rows"], self.metadata["dim"])
        self._dtype = EmbeddingDtype(self.metadata["dtype"])
        count = -(-self.shape[0] // self.metadata["shard_rows"])
        if count > sum(1 for _ in self.directory.iterdir()):
            # There may be far too many to name.
            raise DataError(
                f"{self.shape[0]:,} rows in {count:,} shards, which are not all here",
                where=f"{self.directory / artifacts.METADATA}, fields 'num_rows' and 'shard_rows'",
                expected="as many rows as were encoded",
                fix="encode again, into another directory",
            )
        bounds = _shard_bounds(self.shape[0], self.metadata["shard_rows"])
        self._starts = np.array([start for start, _ in bounds])
        self._shards = [
            _open_shard(self.directory / name, (stop - start, self.shape[1]), self._dtype)
            for name, (start, stop) in zip(shard_names(len(bounds)), bounds, strict=True)
        ]

    @classmethod
    def open(
        cls,
        directory: artifacts.FilePath,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> Embeddings:
        """Opens embeddings that `encode_texts` has finished.

        Args:
            directory: their directory.
            fingerprints: required fingerprints, such as {"model": ..., "collection": ...}.

        Raises:
            DataError: nothing finished there, or a shard is missing or damaged.
            FingerprintError: their fingerprints differ.
        """
        embeddings = cls(directory)
        artifacts.require_equal(
            f"embeddings {os.fspath(directory)}",
            embeddings.fingerprints,
            fingerprints or {},
            "encode the collection again with this model, into another directory",
        )
        return embeddings

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Embeddings of rows start..stop, read from disk as they are used.

        Returns:
            [stop-start, dim], float32 or bfloat16.
        """
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        parts = [
            shard[max(start - first, 0) : stop - first]
            for first, shard in zip(self._starts, self._shards, strict=True)
            if first < stop and first + len(shard) > start
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.zeros((0, self.shape[1]), self._dtype.numpy), *parts])

    def take(self, rows: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Embeddings of the given rows, in their order."""
        found = np.empty((len(rows), self.shape[1]), self._dtype.numpy)
        of_shard = np.searchsorted(self._starts, rows, side="right") - 1
        for shard in np.unique(of_shard):
            here = of_shard == shard
            found[here] = self._shards[shard][rows[here] - self._starts[shard]]
        return found


def encode_texts(
    encode_fn: EncodeFn,
    tokens: TokenRows,
    directory: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str],
    kind: str = Embeddings.KIND,
    config: EncodeConfig | None = None,
    process_index: int = 0,
    process_count: int = 1,
    attached: Mapping[str, object] = types.MappingProxyType({}),
    normalization: Normalization | None = None,
) -> bool:
    """Encodes every text into shard files; a rerun skips finished shards.

    Process i of n takes shards i, i+n, i+2n, ... without communicating with the others.

    Args:
        encode_fn: tokens -> embeddings [batch, dim]; called with few different shapes.
        tokens: the texts.
        directory: gets embeddings-00000-of-000NN.npy and metadata.json.
        fingerprints: {"model": ..., "collection": ..., "vocabulary": ...}, recorded and checked.
        kind: kind of the result in metadata.json.
        config: sizes of batches and shards.
        process_index: which process this is.
        process_count: how many share the work.
        attached: file name -> JSON value, to write beside the shards.
        normalization: the model's normalisation, recorded so that the embeddings can be truncated
            later; None if unknown.

    Returns:
        Whether all shards are finished; False while other processes have some left. The last
        one to finish writes metadata.json.

    Raises:
        FingerprintError: the directory holds embeddings from another model, collection or config.
        DataError: no texts, or the model returned a non-finite number.
        StorageError: the directory cannot be written.
    """
    config, directory = config or EncodeConfig(), pathlib.Path(directory)
    lengths = np.asarray(tokens.lengths)
    if not len(lengths):
        raise DataError("no texts to encode", where=str(directory))
    plan = {
        "format_version": _VERSION,
        "kind": kind,
        "fingerprints": dict(fingerprints),
        "num_rows": len(lengths),
        "shard_rows": config.shard_rows,
        "dtype": config.dtype.value,
    }
    artifacts.follow_plan(directory, plan)
    bounds = _shard_bounds(len(lengths), config.shard_rows)
    paths = [directory / name for name in shard_names(len(bounds))]
    mine = range(process_index, len(bounds), process_count)
    todo = [shard for shard in mine if not paths[shard].exists()]
    done_tokens, total_tokens = (
        sum(int(lengths[slice(*bounds[shard])].sum()) for shard in shards)
        for shards in (set(mine) - set(todo), mine)
    )
    if len(todo) < len(mine):
        logger.info("%s: %d of %d shards done before", directory, len(mine) - len(todo), len(mine))

    began, computed = time.monotonic(), 0
    with bar("encode", total=total_tokens, initial=done_tokens, unit="token") as progress:
        for shard in todo:
            array, positions = encode_rows(
                encode_fn,
                tokens,
                np.arange(*bounds[shard]),
                config=config,
                update=progress.update,
            )
            computed += positions
            with (
                artifacts.replacing(paths[shard], recorded=True) as scratch,
                open(scratch, "wb") as file,
            ):
                np.save(file, _as_stored(array, config.dtype))
    seconds = time.monotonic() - began

    if not all(path.exists() for path in paths):
        return False
    if todo or not (directory / artifacts.METADATA).exists():
        dim = int(np.load(paths[0], mmap_mode="r").shape[1])
        speed = _speed(total_tokens - done_tokens, computed, seconds)
        logger.info(
            "%s: %s tokens per second, %.1f%% of what was computed is padding",
            *(directory, f"{speed['tokens_per_second']:,}", 100 * speed["padding"]),
        )
        for name, value in attached.items():
            artifacts.write_json(directory / name, value)
        known = {} if normalization is None else {"normalization": normalization.value}
        artifacts.write_json(
            directory / artifacts.METADATA, {**plan, "dim": dim, **known, "last_run": speed}
        )
    return True


def _speed(tokens: int, computed: int, seconds: float) -> dict[str, int | float]:
    return {
        "tokens": tokens,
        "computed_positions": computed,
        # For texts that are embeddings already, nothing is computed.
        "padding": round(1 - tokens / computed, 4) if computed else 0.0,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }


def shard_names(count: int) -> list[str]:
    """File names of the shards, in row order."""
    return [f"embeddings-{shard:05d}-of-{count:05d}.npy" for shard in range(count)]


def _shard_bounds(num_rows: int, shard_rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + shard_rows, num_rows)) for start in range(0, num_rows, shard_rows)]


def encode_rows(
    encode_fn: EncodeFn,
    tokens: TokenRows,
    rows: np.ndarray,
    *,
    config: EncodeConfig,
    update: Callable[[int], object] = lambda _: None,
) -> tuple[np.ndarray, int]:
    """Encodes some texts in memory.

    Args:
        encode_fn: tokens -> embeddings [batch, dim]; called with few different shapes.
        tokens: the texts.
        rows: which of them.
        config: sizes of batches.
        update: called with the tokens of every batch.

    Returns:
        Embeddings of `rows` in their order, float32, and the token positions computed for them.

    Raises:
        DataError: the model returned a non-finite number.
    """
    lengths = np.asarray(tokens.lengths)[rows]
    results: np.ndarray | None = None
    computed = 0
    waiting: collections.deque[tuple[np.ndarray, jax.typing.ArrayLike]] = collections.deque()

    def collect() -> None:
        nonlocal results
        members, embeddings = waiting.popleft()
        array = np.asarray(embeddings).astype(np.float32)[: len(members)]
        if results is None:
            results = np.empty((len(rows), array.shape[1]), np.float32)
        finite = np.isfinite(array).all(axis=1)
        if not finite.all():
            raise DataError(
                "the model's embedding has NaN or infinite numbers",
                where=f"row {rows[members[np.argmin(finite)]]}",
                expected="finite numbers",
                fix="use a checkpoint from before training diverged",
            )
        results[members] = array
        update(int(lengths[members].sum()))

    for members, size, length in batches_by_length(lengths, config):
        batch = tokens.tokens(rows[np.resize(members, size)])
        length = min(length, batch.mask.shape[1])
        waiting.append((members, encode_fn(batch.resized(length))))
        computed += size * length
        if len(waiting) > _IN_FLIGHT:
            collect()
    while waiting:
        collect()
    assert results is not None
    return results, computed


def batches_by_length(
    lengths: np.ndarray, config: EncodeConfig
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yields (members, batch size, padded length), longest first.

    The longest text left decides the bucket, and the next longest fill the batch: only the last
    batch is partly empty, and if memory is insufficient, the first batch fails.
    """
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        blocks = -(-max(int(lengths[order[first]]), 1) // config.length_multiple)
        length = blocks * config.length_multiple
        size = config.batch_size(length)
        yield order[first : first + size], size, length
        first += size


def _as_stored(array: np.ndarray, dtype: EmbeddingDtype) -> np.ndarray:
    # np.save does not support bfloat16: its bits are stored as uint16, its type in the metadata.
    if dtype is EmbeddingDtype.BFLOAT16:
        return array.astype(ml_dtypes.bfloat16).view(np.uint16)
    return array


def _open_shard(path: pathlib.Path, shape: tuple[int, int], dtype: EmbeddingDtype) -> np.ndarray:
    try:
        stored = np.load(path, mmap_mode="r")
    except artifacts.ARRAY_ERRORS as error:
        raise DataError(
            f"missing or damaged shard: {error}",
            where=str(path),
            fix="delete the file if it is there, and metadata.json, then encode again",
        ) from error
    if stored.shape != shape:
        raise DataError(
            f"a shard of shape {stored.shape}", where=str(path), expected=f"shape {shape}"
        )
    return stored.view(dtype.numpy)
