"""Encodes token arrays into row-aligned embedding shards: resumable, with little padding."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float32

from taser_jax.data.batches.stream import Texts
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.models.batch import EncoderInput, Normalization
from taser_jax.retrieval.embeddings import (
    FORMAT_VERSION,
    QUERY_IDS,
    EmbeddingDtype,
    Embeddings,
    QueryEmbeddings,
    queries_directory,
    shard_bounds,
    shard_names,
)
from taser_jax.storage import artifacts
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import bar, logger
from taser_jax.storage.typed_files import Checked, Positive

# Batches queued on the device before the first result is awaited.
_IN_FLIGHT = 2
# On a CPU the activations of a batch should fit its caches, and be small enough that the C library
# keeps their memory between batches instead of unmapping it and faulting in new pages.
_CPU_BATCH_TOKENS = 2048
_BATCH_TOKENS = 16384
EncodeFn = Callable[[EncoderInput], jax.typing.ArrayLike]


@dataclasses.dataclass(frozen=True)
class EncodeConfig(Checked):
    """Sizes of batches and shards.

    Attributes:
        batch_tokens: tokens of one batch, padding included: a bucket of length l has batches of
            batch_tokens // l texts, so every bucket fills the device equally. None means 2,048 on
            a CPU, whose caches should hold a batch, and 16,384 elsewhere.
        batch_multiple: batch sizes are at least this, and multiples of the number of this host's
            devices.
        length_multiple: batches are padded to multiples of this many tokens. At most
            max length / length_multiple shapes are compiled.
        shard_rows: texts per shard; a killed run loses at most one shard's work. Lower it where
            encoding a shard takes hours.
        dtype: dtype of the stored embeddings.
    """

    batch_tokens: Positive | None = None
    batch_multiple: Positive = 8
    length_multiple: Positive = 32
    shard_rows: Positive = 65536
    dtype: EmbeddingDtype = EmbeddingDtype.FLOAT32

    def batch_size(self, length: int, *, platform: str | None = None) -> int:
        """Number of texts in a batch of the bucket of `length` tokens.

        Example:
            >>> EncodeConfig(batch_tokens=1000, batch_multiple=8).batch_size(64)
            8

        Args:
            length: tokens a text is padded to.
            platform: where batches are computed: "cpu", "gpu" or "tpu"; None means here.
        """
        tokens = self.batch_tokens
        if tokens is None:
            on_cpu = (platform or jax.default_backend()) == "cpu"
            tokens = _CPU_BATCH_TOKENS if on_cpu else _BATCH_TOKENS
        devices = jax.local_device_count()
        multiple = devices * -(-self.batch_multiple // devices)
        return max(tokens // length // multiple, 1) * multiple


def encode_texts(
    encode_fn: EncodeFn,
    tokens: Texts,
    directory: artifacts.FilePath,
    *,
    fingerprints: Mapping[str, str],
    queries: TokenizedQueries | None = None,
    config: EncodeConfig = EncodeConfig(),
    among_hosts: bool = False,
    normalization: Normalization | None = None,
) -> bool:
    """Encodes every text into shard files; a rerun skips finished shards.

    Each of n hosts takes every n-th shard, without communicating with the others. Queries go into
    their split's folder beside the passages, and are always stored as float32: they are few, and
    every score depends on one.

    Args:
        encode_fn: tokens -> embeddings [batch, dim]; called with few different shapes.
        tokens: the texts.
        directory: gets embeddings-00000-of-000NN.npy and metadata.json.
        fingerprints: {"model": ..., "collection": ..., "vocabulary": ...}, recorded and checked.
        queries: the split whose queries the texts are; its fingerprint is added.
        config: sizes of batches and shards.
        among_hosts: whether all hosts share the work; otherwise this process does it alone.
        normalization: the model's normalisation, recorded so that the embeddings can be truncated
            later; None if unknown.

    Returns:
        Whether all shards are finished; False while other hosts have some left. The last
        one to finish writes metadata.json.

    Raises:
        FingerprintError: the directory holds embeddings from another model, collection or config.
        DataError: no texts, or the model returned a non-finite number.
        StorageError: the directory cannot be written.
    """
    directory, lengths, kind = pathlib.Path(directory), np.asarray(tokens.lengths), Embeddings.KIND
    if queries is not None:
        directory = queries_directory(directory, queries.task, queries.split)
        fingerprints = {**fingerprints, "queries": queries.fingerprint}
        config = dataclasses.replace(config, dtype=EmbeddingDtype.FLOAT32)
        kind = QueryEmbeddings.KIND
    if not len(lengths):
        raise DataError("no texts to encode", where=str(directory))
    plan = {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "fingerprints": dict(fingerprints),
        "num_rows": len(lengths),
        "shard_rows": config.shard_rows,
        "dtype": config.dtype.value,
    }
    artifacts.follow_plan(directory, plan)
    bounds = shard_bounds(len(lengths), config.shard_rows)
    paths = [directory / name for name in shard_names(len(bounds))]
    hosts = jax.process_count() if among_hosts else 1
    # Most splits of queries are a single shard: their sizes spread them over the hosts.
    mine = range((jax.process_index() - len(lengths)) % hosts, len(bounds), hosts)
    todo = [shard for shard in mine if not paths[shard].exists()]
    done_tokens, total_tokens = (
        sum(int(lengths[slice(*bounds[shard])].sum()) for shard in shards)
        for shards in (set(mine) - set(todo), mine)
    )
    if len(todo) < len(mine):
        logger.info("%s: %d of %d shards done before", directory, len(mine) - len(todo), len(mine))

    began = time.monotonic()
    with bar("encode", total=total_tokens, initial=done_tokens, unit="token") as progress:
        for shard in todo:
            rows, update = np.arange(*bounds[shard]), progress.update
            array = encode_rows(encode_fn, tokens, rows, config=config, update=update)
            if config.dtype is EmbeddingDtype.BFLOAT16:
                # np.save does not support it: the bits are stored, and the type in the metadata.
                array = array.astype(ml_dtypes.bfloat16).view(np.uint16)
            with artifacts.replacing(paths[shard]) as scratch, open(scratch, "wb") as file:
                np.save(file, array)
    seconds = time.monotonic() - began

    if not all(path.exists() for path in paths):
        return False
    if todo or not (directory / artifacts.METADATA).exists():
        dim = int(np.load(paths[0], mmap_mode="r").shape[1])
        speed = (total_tokens - done_tokens) / max(seconds, 1e-9)
        logger.info("%s: %s tokens per second", directory, f"{speed:,.0f}")
        if queries is not None:
            artifacts.write_json(directory / QUERY_IDS, queries.query_ids)
        recorded = {} if normalization is None else {"normalization": normalization.value}
        artifacts.write_json(directory / artifacts.METADATA, {**plan, "dim": dim, **recorded})
    return True


def encode_rows(
    encode_fn: EncodeFn,
    tokens: Texts,
    rows: np.ndarray,
    *,
    config: EncodeConfig,
    update: Callable[[int], object] = lambda _: None,
) -> Float32[np.ndarray, "rows dim"]:
    """Encodes some texts in memory.

    Fewer texts than a batch take the next power of two, so that one query costs one row.

    Args:
        encode_fn: tokens -> embeddings [batch, dim]; called with few different shapes, of any
            number of texts.
        tokens: the texts.
        rows: which of them.
        config: sizes of batches.
        update: called with the tokens of every batch.

    Returns:
        Embeddings of `rows` in their order.

    Raises:
        DataError: the model returned a non-finite number.
    """
    lengths = np.asarray(tokens.lengths)[rows]
    results: np.ndarray | None = None
    waiting: collections.deque[tuple[np.ndarray, jax.typing.ArrayLike]] = collections.deque()

    def collect() -> None:
        nonlocal results
        members, embeddings = waiting.popleft()
        array = np.asarray(embeddings).astype(np.float32)[: len(members)]
        if results is None:
            results = np.empty((len(rows), array.shape[1]), np.float32)
        finite = np.isfinite(array).all(axis=1)
        if not finite.all():
            problem = "the model's embedding has NaN or infinite numbers"
            fix = "use a checkpoint from before training diverged"
            raise DataError(problem, where=f"row {rows[members[np.argmin(finite)]]}", fix=fix)
        results[members] = array
        update(int(lengths[members].sum()))

    few = 1 << (len(rows) - 1).bit_length()
    for members, full, length in batches_by_length(lengths, config):
        size = min(full, few)
        batch = tokens.tokens(rows[np.resize(members, size)])
        length = min(length, batch.mask.shape[1])
        waiting.append((members, encode_fn(batch.resized(length))))
        if len(waiting) > _IN_FLIGHT:
            collect()
    while waiting:
        collect()
    assert results is not None
    return results


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
