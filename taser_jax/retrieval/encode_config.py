"""Sizes of the batches and shards in which texts are encoded, and the dtype of embeddings."""

from __future__ import annotations

import dataclasses
import enum

import jax
import ml_dtypes
import numpy as np

from taser_jax.storage.errors import check_fields

# On a CPU the activations of a batch should fit its caches, and be small enough that the C library
# keeps their memory between batches instead of unmapping it and faulting in new pages.
_CPU_BATCH_TOKENS = 2048
_BATCH_TOKENS = 16384


class EmbeddingDtype(enum.Enum):
    """How embeddings are stored; bfloat16 halves the size and keeps 8 bits of each number."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type of one number."""
        return np.dtype(np.float32 if self is EmbeddingDtype.FLOAT32 else ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class EncodeConfig:
    """Sizes of batches and shards.

    Attributes:
        batch_tokens: tokens of one batch, padding included: a bucket of length l has batches of
            batch_tokens // l texts, so every bucket fills the device equally. None means 2,048 on
            a CPU, whose caches should hold a batch, and 16,384 elsewhere.
        batch_multiple: batch sizes are multiples of this, and at least this: the number of devices.
        length_multiple: batches are padded to multiples of this many tokens. At most
            max length / length_multiple shapes are compiled.
        shard_rows: texts per shard; a killed run loses at most one shard's work.
        dtype: dtype of the stored embeddings.
    """

    batch_tokens: int | None = None
    batch_multiple: int = 8
    length_multiple: int = 32
    shard_rows: int = 65536
    dtype: EmbeddingDtype = EmbeddingDtype.FLOAT32

    def __post_init__(self) -> None:
        sizes = ("batch_multiple", "length_multiple", "shard_rows")
        check_fields(self, *sizes, is_valid=lambda n: n >= 1, expected="1 or more")
        expected = "1 or more, or None"
        check_fields(
            self, "batch_tokens", is_valid=lambda n: n is None or n >= 1, expected=expected
        )

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
        return max(tokens // length // self.batch_multiple, 1) * self.batch_multiple
