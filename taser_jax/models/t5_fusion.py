"""MoMA's end retriever: ST5-EncDec whose decoder also attends to retrieved documents."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.models.batch import Augmented, DocumentsShape, States, Tokens
from taser_jax.models.fusion import join_segments
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding, T5Tower
from taser_jax.models.transformer import BlockCost
from taser_jax.storage.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class T5FusionConfig(T5DualEncoderConfig):
    """A T5 dual encoder whose queries may come with documents from a memory.

        q^a = Dec(Enc(q), Enc(d₁), …, Enc(d_K)),   d = Dec(Enc(d))

    Segments are encoded separately, and cross-attention sees no order among them. Passages, and
    queries without documents, are encoded as by ST5-EncDec. The paper prepends a [CLS] to the
    encoder's input and reads it at the decoder; T5 has no such token, so the embedding is the
    output for the decoder's start token.

    Source: equations 2, 5 and 6 of the paper, which does not say whether both roles share a tower;
        here they do by default.
    """

    kind: ClassVar[str] = "t5_fusion"
    fuses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding is not T5Embedding.FIRST_DECODER_OUTPUT:
            raise ConfigError(
                f"embedding {self.embedding.value}",
                where="T5FusionConfig",
                expected="the first decoder output: the decoder attends to the documents",
            )

    def documents_shape(self, per_query: int, length: int) -> DocumentsShape:
        """The shape of documents as tokens."""
        return DocumentsShape(per_query, length)

    def memory_costs(self, memory: DocumentsShape, *, query_length: int) -> list[BlockCost]:
        """Costs that documents add to a query: encoding them, and longer cross-attention."""
        t5 = self.t5
        length = memory.length
        encoder = self.block_costs(length)[: t5.num_layers] * memory.per_query
        cross = 2 * 2 * t5.num_heads * t5.embed_dim * length * memory.per_query
        kept = t5.num_heads * length * memory.per_query * t5.dtype_bytes
        return encoder + [BlockCost(cross, kept, 0)] * t5.num_decoder_layers

    def make_tower(self, frozen_blocks: int = 0) -> T5FusionTower:
        """T5, which encodes documents too, and the projection."""
        return T5FusionTower(
            self.t5,
            frozen_blocks,
            embedding=self.embedding,
            projection_dim=self.projection_dim,
            normalization=self.normalization,
        )


class T5FusionTower(T5Tower):
    """T5 whose decoder attends to a query and its documents; it has the parameters of `T5Tower`."""

    def first_decoder_output(
        self, tokens: Tokens | States | Augmented, *, train: bool = False
    ) -> Float[Array, "batch embed"]:
        """The decoder's output for its start token."""
        if not isinstance(tokens, Augmented):
            return super().first_decoder_output(tokens, train=train)
        if not tokens.present.shape[1]:
            return super().first_decoder_output(tokens.query, train=train)
        joined = join_segments(
            self._states(tokens.query, train=train),
            self._states(tokens.flat_documents, train=train),
            jnp.asarray(tokens.present),
        )
        hidden, mask = jnp.asarray(joined.hidden), jnp.asarray(joined.mask)
        return self.decode_first(hidden, mask, train=train)

    def _states(self, texts: Tokens | States, *, train: bool) -> States:
        return States(self.encode(texts, train=train), jnp.asarray(texts.mask))
