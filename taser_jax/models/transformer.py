"""The common part of BERT's and T5's configurations, and the cost of a block."""

from __future__ import annotations

import dataclasses
import enum

_BYTES = {"float32": 4, "bfloat16": 2}
DTYPES = tuple(_BYTES)


class Remat(enum.Enum):
    """What the backward pass recomputes: nothing, or each block from its input."""

    NONE = "none"
    BLOCK = "block"


class TransformerConfig:
    """Fields of all Transformer configurations; see `BertConfig` and `T5Config`."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    dtype: str
    remat: Remat

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one activation."""
        return _BYTES[self.dtype]


def layer_names(count: int) -> str:
    """Regular expression of the names of the first blocks.

    Example:
        >>> layer_names(2)
        '(layers_0|layers_1)'
    """
    return f"({'|'.join(f'layers_{i}' for i in range(count))})"


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """Cost of one block for one text, padding included.

    FLOPs are those of matrix products; a product of [m, k] and [k, n] counts 2·m·k·n. Table
    look-ups, normalisation, softmax and activations do not count.

    Attributes:
        flops: model FLOPs, which count one expert per token.
        activation_bytes: bytes kept for the backward pass.
        input_bytes: bytes of the block's input, the only activations that `Remat.BLOCK` keeps.
    """

    flops: int
    activation_bytes: int
    input_bytes: int
