"""MoMA's fusion for BERT: a small decoder over the states of a query and of its documents."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.models.batch import Augmented, DocumentsShape, Role, States, Tokens
from taser_jax.models.bert import BertEncoder, EncoderOutput
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Params, Towers
from taser_jax.models.encoded import Encoded, normalize
from taser_jax.models.fusion import join_segments
from taser_jax.models.t5 import Decoder, T5Config
from taser_jax.models.t5_layers import Kernel, RmsNorm
from taser_jax.models.transformer import BlockCost
from taser_jax.storage.errors import ConfigError

# Parameters that exist only in query towers.
FUSION_PARTS = ("fusion", "fusion_norm", "fusion_projection")


class FusedStates(enum.Enum):
    """What represents a document to the decoder.

    TOKENS: the states of its tokens, computed by the query's tower.
    EMBEDDINGS: one vector, its embedding in the memory; no document is encoded again (late fusion).
    """

    TOKENS = "tokens"
    EMBEDDINGS = "embeddings"


@dataclasses.dataclass(frozen=True)
class BertFusionConfig(DualEncoderConfig):
    """A BERT dual encoder (TASER included) whose queries may come with documents from a memory.

        q^a = pool(BERT(q)) + W·Dec(BERT(q), BERT(d₁), …, BERT(d_K)),   W = 0 before training

    `Dec` is T5's decoder at its first position, and its input is the pooled query. Before training
    the model equals the plain encoder. Det-R encodes documents with the passages' experts.

    Attributes:
        decoder_layers: blocks of the decoder.
        documents: what represents a document to the decoder.

    Source: MoMA's equations 2 and 5, adapted to a model without a decoder; the paper has only T5.
    """

    kind: ClassVar[str] = "bert_fusion"
    fuses: ClassVar[bool] = True

    decoder_layers: int = 2
    documents: FusedStates = FusedStates.TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_layers < 1:
            raise ConfigError(
                f"decoder_layers is {self.decoder_layers}",
                where="BertFusionConfig",
                expected="1 or more",
            )

    @property
    def decoder(self) -> T5Config:
        """Sizes and numerics of the decoder, taken from BERT."""
        bert = self.bert
        return T5Config(
            vocab_size=1,
            embed_dim=bert.embed_dim,
            num_layers=1,
            num_decoder_layers=self.decoder_layers,
            num_heads=bert.num_heads,
            head_dim=bert.head_dim,
            mlp_dim=bert.mlp_dim,
            dropout_rate=bert.dropout_rate,
            dtype=bert.dtype,
        )

    def documents_shape(self, per_query: int, length: int) -> DocumentsShape:
        """The shape of documents as tokens, or as embeddings."""
        if self.documents is FusedStates.TOKENS:
            return DocumentsShape(per_query, length)
        return DocumentsShape(per_query, 1, self.embedding_dim)

    def memory_costs(self, memory: DocumentsShape, *, query_length: int) -> list[BlockCost]:
        """Costs that documents add to a query: encoding them, and a decoder over all segments."""
        bert, count = self.bert, memory.per_query
        embed, attention = bert.embed_dim, bert.num_heads * bert.head_dim
        encoded = memory.dim == 0
        documents = self.block_costs(memory.length) * count if encoded else []
        joined = query_length + count * memory.length
        flops = 2 * 6 * embed * attention + 2 * 2 * bert.num_heads * joined * embed
        flops += 2 * 2 * embed * bert.mlp_dim
        kept = (bert.num_heads * joined + 7 * embed + 2 * bert.mlp_dim) * bert.dtype_bytes
        return documents + [BlockCost(flops, kept, 0)] * self.decoder_layers

    def make_tower(self, frozen_blocks: int = 0) -> BertFusionTower:
        """BERT with the decoder over its states."""
        return BertFusionTower(self.bert, self.experts, frozen_blocks, decoder=self.decoder)

    def initial_params(self, params: Params) -> Params:
        """Copied or independent towers; the passage tower has no decoder."""
        if self.towers is Towers.TIED:
            return params
        towers = dict(super().initial_params(params))
        passages = towers["passage_encoder"]
        towers["passage_encoder"] = {n: v for n, v in passages.items() if n not in FUSION_PARTS}
        return towers

    def embed(
        self, tower: Any, tokens: Tokens | States | Augmented, *, role: Role, train: bool
    ) -> Encoded:
        """Pools BERT's states, and adds the decoder's output to the embeddings of queries."""
        if role is Role.PASSAGE:
            return super().embed(tower, tokens, role=role, train=train)
        encode = functools.partial(tower, train=train, output=EncoderOutput.ALL_TOKENS)
        query = tokens.query if isinstance(tokens, Augmented) else tokens
        hidden, statistics = encode(query, role=role)
        pooled = self.pool(hidden, jnp.asarray(query.mask))
        joined = States(hidden, query.mask)
        if isinstance(tokens, Augmented) and tokens.present.shape[1]:
            if self.documents is FusedStates.EMBEDDINGS:
                documents = _one_state_each(tokens)
            else:
                texts = tokens.flat_documents
                # Documents are passages, so Det-R runs the passages' experts.
                hidden, _ = encode(texts, role=Role.PASSAGE)
                documents = States(hidden, texts.mask)
            joined = join_segments(joined, documents, jnp.asarray(tokens.present))
        added = tower.fuse(pooled, joined, train=train)
        return Encoded(normalize(pooled + added, self.normalization), statistics)


def _one_state_each(texts: Augmented) -> States:
    """The documents' embeddings, as texts of one token each."""
    vectors = jnp.asarray(texts.documents)
    flat = vectors.reshape(-1, 1, vectors.shape[-1])
    return States(flat, jnp.ones(flat.shape[:2], bool))


class BertFusionTower(BertEncoder):
    """BERT with a decoder `fusion` over its states, whose parameters `init` with a query draws."""

    decoder: T5Config = T5Config()

    def setup(self) -> None:
        """Creates the decoder and a norm of its inputs: T5 normalises its states, BERT does not."""
        self.fusion = Decoder(self.decoder)
        self.fusion_norm = RmsNorm(self.decoder.rms_norm_epsilon)
        shape = (self.decoder.embed_dim, self.decoder.embed_dim)
        self.fusion_projection = Kernel(shape, ("embed", None), nn.initializers.zeros)

    def fuse(
        self, pooled: Float[Array, "batch embed"], states: States, *, train: bool
    ) -> Float[Array, "batch embed"]:
        """The vector that is added to a pooled query, float32."""
        dtype = self.decoder.dtype
        normalised = self.fusion_norm(jnp.asarray(states.hidden).astype(dtype))
        mask = jnp.asarray(states.mask)
        decoded = self.fusion(pooled.astype(dtype), normalised, mask, train=train)
        return decoded.astype(jnp.float32) @ self.fusion_projection()
