"""MoMA's end retrievers: a decoder over the states of a query and of its documents, on T5 and BERT.

The paper is "Augmenting Zero-Shot Dense Retrievers with Plug-in Mixture-of-Memories" (Ge et al.,
arXiv 2302.03754).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.batch import Augmented, DocumentsShape, Encoded, Role, States, Tokens
from taser_jax.models.bert_dual_encoder import BertTower, DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import Params, Towers, normalize
from taser_jax.models.layers import Kernel
from taser_jax.models.t5 import Decoder, T5Config, decoder_flops
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding, T5Tower
from taser_jax.models.t5_layers import ATTENTION, RmsNorm
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Positive

# Parameters that exist only in query towers.
FUSION_PARTS = ("fusion", "fusion_norm", "fusion_projection")


def join_segments(
    query: States, documents: States, present: Bool[Array, "batch documents"]
) -> States:
    """Enc(q), Enc(d₁) … Enc(d_K), one after another, masked at padding and absent documents.

    Args:
        query: states of the queries.
        documents: states of batch·K texts.
        present: which documents exist.
    """
    batch, embed = len(present), query.hidden.shape[-1]
    mask = documents.mask.reshape(*present.shape, -1) & present[..., None]
    return States(
        jnp.concatenate([query.hidden, documents.hidden.reshape(batch, -1, embed)], axis=1),
        jnp.concatenate([query.mask, mask.reshape(batch, -1)], axis=1),
    )


def segment_attention(
    scores: Float[Array, "layers batch heads joined"], *, query_length: int, documents: int
) -> Float[Array, "batch segments"]:
    """Attention of a decoder's first position to each segment: the query, then its documents.

    Probabilities are summed over layers, heads and a segment's tokens: this favours long documents.

    Example:
        One layer and head, exp(scores) 2 at a query's token, 2, 2, 2 at a document's and 4 at
        another's: 1/6, 1/2, 1/3.

    Args:
        scores: scores of the cross-attention, masked, before softmax and dropout.
        query_length: positions of the query.
        documents: K.

    Returns:
        One number per segment, which add up to layers·heads; 0 for absent documents.

    Source: equation 9 of the paper.
    """
    real = scores[0, :, 0] > jnp.finfo(scores.dtype).min
    total = jnp.where(real[None, :, None], jax.nn.softmax(scores), 0.0).sum((0, 2))
    query, rest = total[:, :query_length], total[:, query_length:]
    rest = rest.reshape(len(total), documents, -1).sum(-1) if documents else rest[:, :0]
    return jnp.concatenate([query.sum(-1, keepdims=True), rest], axis=1)


def encode_with_attention(
    model: nn.Module, params: Params, texts: Augmented, *, task: str | None = None
) -> tuple[Float[Array, "batch dim"], Float[Array, "batch segments"]]:
    """Embeddings of augmented queries, and the attention to the query's own tokens and documents.

    Args:
        model: a dual encoder whose queries are fused.
        params: its parameters.
        texts: queries with documents.
        task: the queries' task, where tasks have query encoders.
    """
    variables = {"params": params}
    encoded: Any
    encoded, sown = model.apply(
        variables, texts, role=Role.QUERY, task=task, method="encode", mutable=[ATTENTION]
    )
    attention = segment_attention(
        jnp.stack(jax.tree.leaves(sown[ATTENTION])),
        query_length=texts.mask.shape[1],
        documents=texts.present.shape[1],
    )
    return encoded.embeddings, attention


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
        return self.decode_first(jnp.asarray(joined.hidden), jnp.asarray(joined.mask), train=train)

    def _states(self, texts: Tokens | States, *, train: bool) -> States:
        return States(self.encode(texts, train=train), jnp.asarray(texts.mask))


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
    tower_class = T5FusionTower

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding is not T5Embedding.FIRST_DECODER_OUTPUT:
            problem = f"embedding is {self.embedding.value}; the decoder attends to the documents"
            fix = "set embedding=FIRST_DECODER_OUTPUT"
            raise ConfigError(problem, where="T5FusionConfig", fix=fix)

    def documents_shape(self, per_query: int, length: int) -> DocumentsShape:
        """The shape of documents as tokens."""
        return DocumentsShape(per_query, length)

    def query_flops(self, length: int, memory: DocumentsShape | None) -> list[int]:
        """A document adds what depends on its tokens: decoder and projection run once a query."""
        memory = memory or DocumentsShape(0, 0)
        by_block = zip(*map(self.block_flops, (length, memory.length, 0)), strict=True)
        return [own + memory.per_query * (each - once) for own, each, once in by_block]


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

    decoder_layers: Positive = 2
    documents: FusedStates = FusedStates.TOKENS

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

    def query_flops(self, length: int, memory: DocumentsShape | None) -> list[int]:
        """All tokens' states are computed, and decoded with those of the documents."""
        memory = memory or DocumentsShape(0, 1)
        blocks_of = dataclasses.replace(self, pooling=Pooling.MEAN).block_flops
        encoded = 0 if memory.dim else memory.per_query
        joined = length + memory.per_query * memory.length
        pairs = zip(blocks_of(length), blocks_of(memory.length), strict=True)
        blocks = [own + encoded * each for own, each in pairs]
        decoder = [decoder_flops(self.decoder, joined)] * self.decoder_layers
        return blocks + decoder + [2 * self.embedding_dim**2]

    def make_tower(self, frozen_blocks: int = 0) -> BertFusionTower:
        """BERT with the decoder over its states."""
        common = self.bert, self.experts, frozen_blocks, self.pooling, self.normalization
        return BertFusionTower(*common, decoder=self.decoder, documents=self.documents)

    def initial_params(self, params: Params) -> Params:
        """Copies of one draw; the passage tower has no decoder."""
        if self.towers is Towers.TIED:
            return params
        towers = dict(super().initial_params(params))
        passages = towers["passage_encoder"]
        towers["passage_encoder"] = {n: v for n, v in passages.items() if n not in FUSION_PARTS}
        return towers


def _one_state_each(texts: Augmented) -> States:
    """The documents' embeddings, as texts of one token each."""
    vectors = jnp.asarray(texts.documents)
    flat = vectors.reshape(-1, 1, vectors.shape[-1])
    return States(flat, jnp.ones(flat.shape[:2], bool))


class BertFusionTower(BertTower):
    """BERT with a decoder `fusion` over its states, whose parameters `init` with a query draws."""

    decoder: T5Config = T5Config()
    documents: FusedStates = FusedStates.TOKENS

    def setup(self) -> None:
        """Creates the decoder and a norm of its inputs: T5 normalises its states, BERT does not."""
        self.fusion = Decoder(self.decoder)
        self.fusion_norm = RmsNorm(self.decoder.rms_norm_epsilon)
        shape = (self.decoder.embed_dim, self.decoder.embed_dim)
        self.fusion_projection = Kernel(shape, ("embed", None), nn.initializers.zeros)

    def embed(self, tokens: Tokens | States | Augmented, *, role: Role, train: bool) -> Encoded:
        """Pools BERT's states, and adds the decoder's output to the embeddings of queries."""
        if role is Role.PASSAGE:
            return super().embed(tokens, role=role, train=train)
        encode = functools.partial(self, train=train)
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
        added = self.fuse(pooled, joined, train=train)
        return Encoded(normalize(pooled + added, self.normalization), statistics)

    def fuse(
        self, pooled: Float[Array, "batch embed"], states: States, *, train: bool
    ) -> Float[Array, "batch embed"]:
        """The vector that is added to a pooled query, float32."""
        dtype = self.decoder.dtype
        normalised = self.fusion_norm(jnp.asarray(states.hidden).astype(dtype))
        mask = jnp.asarray(states.mask)
        decoded = self.fusion(pooled.astype(dtype), normalised, mask, train=train)
        return decoded.astype(jnp.float32) @ self.fusion_projection()
