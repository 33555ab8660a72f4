"""What every index does, and exact maximum inner product search, in bounded memory."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import track


@runtime_checkable
class EmbeddingRows(Protocol):
    """Row-aligned passage embeddings, on disk or an array."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of passages, dimensions)."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Embeddings of consecutive rows. [rows, dim], float32 or bfloat16."""


@runtime_checkable
class Searcher(Protocol):
    """Top k passages by inner product.

    Attributes:
        fingerprints: those of the passages' embeddings; empty if unknown.
    """

    fingerprints: Mapping[str, str]

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query; row -1, score -inf where there are fewer."""


def check_search(query_embeddings: np.ndarray, k: int, *, dim: int) -> None:
    """Checks that k is positive and that queries are finite and have the passages' dimensions.

    Raises:
        ConfigError: naming k, or both dimensions.
        DataError: naming queries that are not finite.
    """
    if k < 1:
        raise ConfigError(f"k is {k}", where="search", expected="at least 1")
    if query_embeddings.ndim != 2 or query_embeddings.shape[1] != dim:
        problem = f"query embeddings of shape {query_embeddings.shape}, not [queries, {dim}]"
        fix = "encode queries and passages with the same model"
        raise ConfigError(problem, where="search", fix=fix)
    check_finite(query_embeddings, 0, what="query")


def check_finite(embeddings: np.ndarray, first: int, *, what: str) -> None:
    """Refuses embeddings that are NaN or infinite: a score with them would leave the row out.

    Args:
        embeddings: shape [rows, dim].
        first: number of the first row.
        what: what a row is: "query" or "passage".

    Raises:
        DataError: naming the first rows and how many there are.
    """
    embeddings = np.asarray(embeddings)
    # A sum is finite unless a term is not, or it overflows; rows are looked at only then.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(embeddings.sum(dtype=np.float32)):
            return
    bad = first + np.flatnonzero(~np.isfinite(embeddings.astype(np.float32)).all(axis=1))
    if len(bad):
        more = f" and {len(bad) - 10:,} more" if len(bad) > 10 else ""
        raise DataError(
            f"NaN or infinite numbers in {len(bad):,} rows: {', '.join(map(str, bad[:10]))}{more}",
            where=f"{what} embeddings",
            fix="`taser verify` shows whether files were damaged; encode again into a new "
            "directory, with a checkpoint from before training diverged",
        )


def measure_recall(approximate: SearchResult, exact: SearchResult) -> float:
    """Share of the exact results that an approximate search has, over all queries.

    A found passage with the score of the last exact one counts, since ties are interchangeable.

    Args:
        approximate: an approximate search's results.
        exact: the exact top k of the same queries.
    """
    is_row = exact.rows >= 0
    last = np.where(is_row, exact.scores, np.inf).min(axis=1, keepdims=True)
    tolerance = 1e-5 * np.abs(np.where(is_row, exact.scores, 0)).max(axis=1, keepdims=True)
    hits = (approximate.rows >= 0) & (approximate.scores >= last - tolerance)
    return float(np.minimum(hits.sum(axis=1), is_row.sum(axis=1)).sum() / max(int(is_row.sum()), 1))


_AXIS = "passages"
# Passages whose scores with a block of queries fit in a CPU's cache, and queries that are so many.
_SLICE, _MANY = 1024, 128
# Columns per group: only groups whose maxima are high enough are searched.
_GROUP = 32


class ExactSearcher:
    """Scores every passage: score(q, p) = Σ_d q_d·p_d in float32, ties by row, lowest first.

    Passages are taken in blocks, of which no more than one's scores exist at a time; NumPy takes
    from these the ones above the k-th best so far, which are few. Accelerators give it the top k
    of their parts of a block, a CPU all scores: XLA's top-k takes as long there as the product.

    Args:
        embeddings: passage embeddings, float32 or bfloat16.
        devices: devices that share each block of passages; default: all of this host's
            accelerators. A CPU's devices share the same cores: NumPy and one of them search there.
        fingerprints: those of the embeddings.
        query_block: queries scored at once; scores take query_block·passage_block·4 bytes.
        passage_block: passages scored at once on each device.
        resident_bytes: passage blocks stay on the devices between searches while all of them
            together take no more than this; larger collections are streamed at each search.
    """

    def __init__(
        self,
        embeddings: EmbeddingRows,
        *,
        devices: Sequence[jax.Device] | None = None,
        fingerprints: Mapping[str, str] = types.MappingProxyType({}),
        query_block: int = 512,
        passage_block: int = 65536,
        resident_bytes: int = 4 << 30,
    ) -> None:
        self.fingerprints = fingerprints
        self.embeddings, self._query_block = embeddings, query_block
        self._on_host = devices is None and jax.default_backend() == "cpu"
        if devices is None:
            devices = jax.local_devices()[:1] if self._on_host else jax.local_devices()
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        num_passages, dim = embeddings.shape
        num_devices = self._mesh.size
        # Of equal size: padding is scored, too, and a last block of its own size would have most.
        num_blocks = -(-num_passages // (passage_block * num_devices))
        share = -(-num_passages // (num_blocks * num_devices))
        unit = _SLICE if self._on_host and share > _SLICE else _GROUP
        self._block = -(-share // unit) * unit * num_devices
        self._num_blocks = -(-num_passages // self._block)
        itemsize = embeddings[:1].dtype.itemsize
        total_bytes = self._num_blocks * self._block * dim * itemsize
        self._keep = total_bytes <= resident_bytes
        self._resident: dict[int, Array] = {}

    def search(self, query_embeddings: Float[np.ndarray, "queries dim"], k: int) -> SearchResult:
        """Top k passages of each query by inner product.

        Args:
            query_embeddings: one per row, same dimensions as the passages.
            k: results per query; with fewer passages the rest is row -1, score -inf.

        Raises:
            ConfigError: k below 1, or dimensions that differ from the passages'.
        """
        num_queries = len(query_embeddings)
        check_search(query_embeddings, k, dim=self.embeddings.shape[1])
        if not num_queries:
            return SearchResult(np.zeros((0, k), np.int32), np.zeros((0, k), np.float32))
        # Few sizes, as each is a program to compile, and little padding.
        share = -(-num_queries // -(-num_queries // self._query_block))
        size = min(-(-share // 8) * 8, 1 << (num_queries - 1).bit_length())
        starts = range(0, num_queries, size)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        queries = [
            jax.device_put(_padded(query_embeddings[start : start + size], size), replicated)
            for start in starts
        ]
        best = [_Best(size, k) for _ in starts]
        for block in track(range(self._num_blocks), "exact search", unit="block"):
            passages, first = self._passages(block), block * self._block
            for some, of_block in zip(queries, best, strict=True):
                for scores, places in self._scored(
                    some, passages, self.embeddings.shape[0] - first, k
                ):
                    of_block.add(scores, first + places)
        results = zip(*(of_block.result() for of_block in best), strict=True)
        return SearchResult(*(np.concatenate(parts)[:num_queries] for parts in results))

    def _scored(
        self, queries: Array, passages: Array, limit: int, k: int
    ) -> Iterator[tuple[Float[np.ndarray, "queries some"], Int[np.ndarray, "#queries some"]]]:
        """Scores and places of a block's passages, those below `limit`, or the best of them."""
        if not self._on_host:
            scores, places = _best_of_block(
                queries, passages, np.int32(limit), k=k, mesh=self._mesh
            )
            yield np.asarray(scores), np.asarray(places)
            return
        # For few queries, calls would cost more than memory.
        is_sliced = len(queries) > _MANY and not len(passages) % _SLICE
        size = _SLICE if is_sliced else len(passages)
        for start in range(0, min(len(passages), limit), size):
            scores = np.asarray(_scores(queries, passages, np.int32(start), size=size))
            scores = scores[:, : limit - start]
            yield scores, start + np.arange(scores.shape[1])[None]

    def _passages(self, block: int) -> Array:
        if block in self._resident:
            return self._resident[block]
        start = block * self._block
        stop = min(start + self._block, self.embeddings.shape[0])
        embeddings = self.embeddings[start:stop]
        check_finite(embeddings, start, what="passage")
        rows = _padded(embeddings, self._block)
        passages = jax.device_put(rows, NamedSharding(self._mesh, PartitionSpec(_AXIS)))
        if self._keep:
            self._resident[block] = passages
        return passages


# Of a key: the bits of a row, and a score without its sign.
_ROW_BITS, _MAGNITUDE = np.int64(2**32 - 1), np.int32(2**31 - 1)


class _Best:
    """The k best passages of each query so far.

    A score and its row are one integer, so that keys are ordered as results are: by score, of equal
    ones the lower row first. Keys above the k-th best are collected until there is no room.

    Args:
        num_queries: how many queries.
        k: passages kept of each.
    """

    def __init__(self, num_queries: int, k: int) -> None:
        self._k = k
        self._width = _SLICE if num_queries > _MANY else min(2**19 // num_queries, 2**14)
        self._keys = np.full((num_queries, k + self._width), _NOTHING)
        self._count = np.full(num_queries, k)
        self._last = np.full((num_queries, 1), -np.inf, np.float32)

    def add(
        self, scores: Float[np.ndarray, "queries some"], rows: Int[np.ndarray, "#queries some"]
    ) -> None:
        """Takes scores of passages that follow all earlier ones; equal scores have rising rows."""
        rows = np.broadcast_to(rows, scores.shape)
        for column in range(0, scores.shape[1], self._width):
            here = slice(column, column + self._width)
            self._add(scores[:, here], rows[:, here])

    def _add(
        self, scores: Float[np.ndarray, "queries width"], rows: Int[np.ndarray, "queries width"]
    ) -> None:
        # An equal score of a later row loses.
        better = np.flatnonzero(scores > self._last)
        if not len(better):
            return
        query, column = np.divmod(better, scores.shape[1])
        added = np.bincount(query, minlength=len(scores))
        if np.max(self._count + added) > self._keys.shape[1]:
            self._select()
        place = np.arange(len(query)) - np.repeat(np.cumsum(added) - added, added)
        keys = _to_keys(scores[query, column], rows[query, column])
        self._keys[query, self._count[query] + place] = keys
        self._count += added

    def _select(self) -> None:
        """Keeps the k best of what was collected."""
        end = self._count.max(initial=self._k)
        self._keys[:, :end].partition(end - self._k, axis=1)
        self._keys[:, : self._k] = self._keys[:, end - self._k : end].copy()
        self._keys[:, self._k : end] = _NOTHING
        self._count[:] = self._k
        self._last = _from_keys(self._keys[:, :1])[1]

    def result(self) -> tuple[Int[np.ndarray, "queries k"], Float[np.ndarray, "queries k"]]:
        """Rows and scores, best first."""
        self._select()
        return _from_keys(np.sort(self._keys[:, : self._k], axis=1)[:, ::-1])


def _to_keys(
    scores: Float[np.ndarray, "*shape"], rows: Int[np.ndarray, "*shape"]
) -> Int[np.ndarray, "*shape"]:
    # Adding 0 makes -0.0 tie with 0.0. The bits of negative floats, as integers, are in reverse.
    bits = (scores + np.float32(0)).view(np.int32)
    return (bits ^ (bits >> 31 & _MAGNITUDE)).astype(np.int64) << 32 | _ROW_BITS - rows


def _from_keys(
    keys: Int[np.ndarray, "*shape"],
) -> tuple[Int[np.ndarray, "*shape"], Float[np.ndarray, "*shape"]]:
    bits = (keys >> 32).astype(np.int32)
    scores = (bits ^ (bits >> 31 & _MAGNITUDE)).view(np.float32)
    return (_ROW_BITS - (keys & _ROW_BITS)).astype(np.int32), scores


# Row 2^32 - 1 is NO_ROW as an int32.
_NOTHING = _to_keys(np.array([-np.inf], np.float32), np.array([_ROW_BITS]))[0]


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    rows = np.asarray(rows)
    if len(rows) == size:
        return rows
    return np.concatenate([rows, np.zeros((size - len(rows), rows.shape[1]), rows.dtype)])


@functools.partial(jax.jit, static_argnames="size")
def _scores(
    queries: Float[Array, "queries dim"],
    passages: Float[Array, "passages dim"],
    start: Int[Array, ""],
    *,
    size: int,
) -> Float[Array, "queries size"]:
    """Scores of passages start .. start + size - 1 of a block."""
    return jnp.einsum(
        "qd,pd->qp",
        queries.astype(jnp.float32),
        jax.lax.dynamic_slice_in_dim(passages, start, size).astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


@functools.partial(jax.jit, static_argnames=("k", "mesh"))
def _best_of_block(
    queries: Float[Array, "queries dim"],
    passages: Float[Array, "passages dim"],
    limit: Int[Array, ""],
    *,
    k: int,
    mesh: Mesh,
) -> tuple[Float[Array, "queries best"], Int[Array, "queries best"]]:
    """Each device's k best of a block's first `limit` passages, and their places in the block."""

    def local(queries: Array, passages: Array, limit: Array) -> tuple[Array, Array]:
        first = jax.lax.axis_index(_AXIS) * passages.shape[0]
        scores = _scores(queries, passages, jnp.int32(0), size=passages.shape[0])
        # Top-k orders -0.0 below 0.0; as scores they tie.
        scores = jnp.where(scores == 0, 0.0, scores)
        places = first + jnp.arange(passages.shape[0], dtype=jnp.int32)
        scores = jnp.where(places < limit, scores, -jnp.inf)
        scores, columns = grouped_top_k(scores, min(k, passages.shape[0]))
        return scores, first + columns

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(None, _AXIS),
    )(queries, passages, limit)


def grouped_top_k(
    scores: Float[Array, "queries columns"], k: int
) -> tuple[Float[Array, "queries k"], Int[Array, "queries k"]]:
    """Exact top-k of wide rows, ties by column; the number of columns must be a multiple of 32.

    Finds the k groups of 32 columns with the highest maxima, then searches these. An element of
    any other group has k elements before it: one in each chosen group that is higher, or as high
    and further left.
    """
    num_groups = scores.shape[1] // _GROUP
    if num_groups <= k:
        values, columns = jax.lax.top_k(scores, k)
        return values, columns
    groups = scores.reshape(scores.shape[0], num_groups, _GROUP)
    _, chosen = jax.lax.top_k(groups.max(axis=2), k)
    chosen = jnp.sort(chosen, axis=1)
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1)
    values, positions = jax.lax.top_k(candidates.reshape(scores.shape[0], -1), k)
    group = jnp.take_along_axis(chosen, positions // _GROUP, axis=1)
    return values, group * _GROUP + positions % _GROUP
