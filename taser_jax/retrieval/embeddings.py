"""Stored embeddings of passages and of queries: row i is passage i, or query i of a split.

    <embeddings>/                           shards, metadata.json
    <embeddings>/queries/<task>.<split>/    shards, query_ids.json, metadata.json

`taser encode` writes them with the model. Searching, sampling for an index, fusing models and
retrieving from several memories read them with NumPy alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import urllib.parse
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int, Num

from taser_jax.data.token_store.arrays import load_array
from taser_jax.storage import artifacts
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.typed_files import Natural, Positive, read_typed

FORMAT_VERSION = 1
QUERY_IDS = "query_ids.json"
# Rows of a shard of embeddings that come from memory, and of those read at once.
_SHARD = 65536


class EmbeddingDtype(enum.Enum):
    """How embeddings are stored; bfloat16 halves the size and keeps 8 bits of each number."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type of one number."""
        return np.dtype(np.float32 if self is EmbeddingDtype.FLOAT32 else ml_dtypes.bfloat16)


class EmbeddingsMetadata(artifacts.Metadata, frozen=True):
    """What a directory of embeddings records; `normalization` is absent from older ones."""

    num_rows: Natural
    dim: Positive
    shard_rows: Positive
    dtype: EmbeddingDtype
    normalization: str | None = None


class Embeddings:
    """A finished directory of embeddings, memory-mapped; row i is row i of the passage store.

    Attributes:
        KIND: its kind in metadata.json.
        FIX: what messages about other fingerprints advise.
        directory: its directory.
        metadata: content of metadata.json.
        fingerprints: fingerprints of the model, collection and vocabulary it was made from.
        shape: (texts, dimensions).

    Args:
        directory: where `encode_texts` has finished them.
        fingerprints: required fingerprints, such as {"model": ..., "collection": ...}.

    Raises:
        DataError: nothing finished there, or a shard is missing or damaged.
        FingerprintError: their fingerprints differ.
    """

    KIND = "embeddings"
    FIX = "encode the collection again with this model, into another directory"

    def __init__(
        self, directory: artifacts.FilePath, *, fingerprints: Mapping[str, str] | None = None
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.metadata = artifacts.read_metadata(
            directory,
            self.KIND,
            FORMAT_VERSION,
            EmbeddingsMetadata,
            fingerprints=fingerprints,
            fix=self.FIX,
        )
        self.fingerprints = self.metadata.fingerprints
        self.shape = (self.metadata.num_rows, self.metadata.dim)
        self._dtype = self.metadata.dtype
        count = -(-self.shape[0] // self.metadata.shard_rows)
        if count > sum(1 for _ in self.directory.iterdir()):
            # There may be far too many to name.
            problem = f"{self.shape[0]:,} rows in {count:,} shards, which are not all here"
            where = f"{self.directory / artifacts.METADATA}, fields 'num_rows' and 'shard_rows'"
            fix = "encode again, into another directory"
            raise DataError(problem, where=where, fix=fix)
        bounds = shard_bounds(self.shape[0], self.metadata.shard_rows)
        self._starts = np.array([start for start, _ in bounds])
        self._shards = [
            _open_shard(self.directory / name, (stop - start, self.shape[1]), self._dtype)
            for name, (start, stop) in zip(shard_names(len(bounds)), bounds, strict=True)
        ]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Embeddings of consecutive rows, read from disk as they are used.

        Returns:
            [rows, dim], float32 or bfloat16.
        """
        start, stop, _ = rows.indices(self.shape[0])
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
        embeddings = np.empty((len(rows), self.shape[1]), self._dtype.numpy)
        of_shard = np.searchsorted(self._starts, rows, side="right") - 1
        for shard in np.unique(of_shard):
            here = of_shard == shard
            embeddings[here] = self._shards[shard][rows[here] - self._starts[shard]]
        return embeddings


def shard_names(count: int) -> list[str]:
    """File names of the shards, in row order."""
    return [f"embeddings-{shard:05d}-of-{count:05d}.npy" for shard in range(count)]


def shard_bounds(num_rows: int, shard_rows: int) -> list[tuple[int, int]]:
    """First row of each shard, and the row after its last."""
    return [(start, min(start + shard_rows, num_rows)) for start in range(0, num_rows, shard_rows)]


def _open_shard(path: pathlib.Path, shape: tuple[int, int], dtype: EmbeddingDtype) -> np.ndarray:
    fix = "delete the file if it is there, and metadata.json, then encode again"
    stored = load_array(path, fix=fix, mmap_mode="r")
    if stored.shape != shape:
        problem = f"a shard of shape {stored.shape}, not {shape}"
        raise DataError(problem, where=str(path), fix="encode again, into another directory")
    return stored.view(dtype.numpy)


class QueryEmbeddings(Embeddings):
    """Embeddings of one task's split, memory-mapped; row i is query i."""

    KIND = "query embeddings"
    FIX = (
        "encode queries and passages with one model, from one token store (`taser encode`), and "
        "index those passages; or correct EMBEDDINGS_DIR or INDEX_DIR"
    )

    @classmethod
    def of_split(
        cls,
        embeddings_dir: artifacts.FilePath,
        task: str,
        split: str,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> QueryEmbeddings:
        """Opens the queries of a task's split.

        Args:
            embeddings_dir: directory that `taser encode` wrote.
            task: the task's name.
            split: the split's name.
            fingerprints: those of the passages to search, or of their index: model, collection,
                vocabulary and token store must be the same.

        Raises:
            DataError: the split is not encoded, or not completely; names those that are.
            FingerprintError: queries and passages come from different models or token stores.
        """
        directory = queries_directory(embeddings_dir, task, split)
        if not (directory / artifacts.METADATA).is_file():
            there = ", ".join(f"{task} {split}" for task, split in encoded_splits(embeddings_dir))
            problem = f"no embeddings of task {task!r}, split {split!r}; encoded: {there or 'none'}"
            fix = "run `taser encode` for this task and split; it keeps what is finished"
            raise DataError(problem, where=str(directory), fix=fix)
        return cls(directory, fingerprints=fingerprints)

    @functools.cached_property
    def query_ids(self) -> list[str]:
        """The source's own ids, one per row."""
        again = f"delete {self.directory}, then run `taser encode` again"
        ids = read_typed(self.directory / QUERY_IDS, list[str], fix=again)
        if len(ids) != len(self):
            problem = f"{len(ids)} query ids for {len(self)} embeddings"
            raise DataError(problem, where=str(self.directory / QUERY_IDS), fix=again)
        return ids


def write_embeddings(
    directory: artifacts.FilePath,
    embeddings: Float32[np.ndarray, "rows dim"],
    fingerprints: Mapping[str, str],
    normalization: str,
    *,
    of: type[Embeddings] = Embeddings,
) -> None:
    """Writes embeddings from memory.

    Args:
        directory: their directory.
        embeddings: of the passage store's rows, or of a split's queries.
        fingerprints: {"model": ..., "collection": ...}.
        normalization: the model's, "l2" or "none".
        of: whose they are, `Embeddings` or `QueryEmbeddings`.
    """
    directory = pathlib.Path(directory)
    bounds = shard_bounds(len(embeddings), _SHARD)
    for name, (start, stop) in zip(shard_names(len(bounds)), bounds, strict=True):
        with artifacts.replacing(directory / name) as scratch, open(scratch, "wb") as file:
            np.save(file, embeddings[start:stop])
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": of.KIND,
        "fingerprints": dict(fingerprints),
        "num_rows": len(embeddings),
        "dim": embeddings.shape[1],
        "shard_rows": _SHARD,
        "dtype": EmbeddingDtype.FLOAT32.value,
        "normalization": normalization,
    }
    artifacts.write_json(directory / artifacts.METADATA, metadata)


def queries_directory(embeddings_dir: artifacts.FilePath, task: str, split: str) -> pathlib.Path:
    """The directory of one task's split."""
    return artifacts.split_path(pathlib.Path(embeddings_dir) / "queries", task, split)


def encoded_splits(embeddings_dir: artifacts.FilePath) -> list[tuple[str, str]]:
    """Every finished (task, split), by name."""
    paths = (pathlib.Path(embeddings_dir) / "queries").glob(f"*/{artifacts.METADATA}")
    return [split_of(path.parent.name) for path in sorted(paths)]


def split_of(name: str) -> tuple[str, str]:
    """The task and the split that `split_path` named.

    Example:
        >>> split_of("nq%2Fdev.test")
        ('nq/dev', 'test')
    """
    task, _, split = name.rpartition(".")
    return urllib.parse.unquote(task), urllib.parse.unquote(split)


class Codes(enum.Enum):
    """How an exported number is written; int8 takes a quarter of float32, binary a 32nd.

    INT8: c_d = round(x_d / s) with one scale s = max |x| / 127 for all numbers, so that dot
        products of codes have the order of s times theirs.
    BINARY: the sign of each number as one bit, compared by the Hamming distance.
    """

    FLOAT32 = "float32"
    INT8 = "int8"
    BINARY = "binary"


@dataclasses.dataclass(frozen=True)
class Coding:
    """Codes of embeddings.

    Example:
        >>> coding = Coding(Codes.INT8, scale=0.5)
        >>> coding.encode(np.array([[1.0, -0.3]])).tolist()
        [[2, -1]]
        >>> Coding(Codes.BINARY).decode(np.array([[0b10100000]], np.uint8)).tolist()
        [[1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0]]

    Attributes:
        codes: how numbers are written.
        scale: what int8 codes are multiplied by.
    """

    codes: Codes = Codes.FLOAT32
    scale: float = 1.0

    @classmethod
    def of(cls, codes: Codes, embeddings: Embeddings) -> Coding:
        """The coding of some embeddings.

        Raises:
            ConfigError: binary codes of dimensions that fill no whole bytes.
        """
        count, dim = embeddings.shape
        if codes is Codes.BINARY and dim % 8:
            problem, fix = f"binary codes of {dim} dimensions, no multiple of 8", "take int8"
            raise ConfigError(problem, where="EmbeddingsExport.codes", fix=fix)
        if codes is not Codes.INT8:
            return cls(codes)
        blocks = (embeddings[row : row + _SHARD] for row in range(0, count, _SHARD))
        largest = max(float(np.abs(block.astype(np.float32)).max()) for block in blocks)
        return cls(codes, largest / 127 or 1.0)

    def encode(self, embeddings: Float[np.ndarray, "texts dim"]) -> Num[np.ndarray, "texts width"]:
        """float32 or int8 [texts, dim], or bits as uint8 [texts, dim / 8], the first highest."""
        numbers = embeddings.astype(np.float32)
        if self.codes is Codes.FLOAT32:
            return numbers
        if self.codes is Codes.BINARY:
            return np.packbits(numbers > 0, axis=1)
        return np.clip(np.rint(numbers / self.scale), -127, 127).astype(np.int8)

    def decode(self, codes: Num[np.ndarray, "texts width"]) -> Float32[np.ndarray, "texts dim"]:
        """The embeddings that codes stand for; signs for bits."""
        if self.codes is Codes.BINARY:
            return np.unpackbits(codes, axis=1) * np.float32(2) - np.float32(1)
        return codes.astype(np.float32) * np.float32(self.scale)
