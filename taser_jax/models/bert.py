"""The BERT-family encoder, with shared and specialised blocks (TASER, section 3)."""

from __future__ import annotations

import dataclasses
import enum

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models import routing
from taser_jax.models.batch import Role, States, Tokens
from taser_jax.models.bert_layers import AttentionKernel, FeedForward, SelfAttention
from taser_jax.models.dropout import Dropout
from taser_jax.models.encoded import RoutingStatistics
from taser_jax.models.layers import (
    DTYPES,
    SIZES,
    Activation,
    Affine,
    Initializer,
    LayerNormParameters,
    Remat,
    TransformerConfig,
    layer_norm,
    mean_over_tokens,
    parameter,
    split_over_batch,
)
from taser_jax.models.routing import (
    ExpertConfig,
    GateSharing,
    RouterInput,
    Routing,
    SequenceSummary,
)
from taser_jax.storage.errors import ConfigError, check_fields

_ROUTER_INIT = nn.initializers.normal(0.02)


class EncoderOutput(enum.Enum):
    """Positions that the encoder returns.

    FIRST_TOKEN gives [CLS] only, and the last block then computes no other query or feed-forward:
    the same values for less work (about a quarter less in a stack of three blocks). FROZEN gives
    the output of the frozen blocks and runs no others.
    """

    ALL_TOKENS = "all_tokens"
    FIRST_TOKEN = "first_token"
    FROZEN = "frozen"


@dataclasses.dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """Sizes and numerics of a BERT encoder; the defaults are bert-base-uncased.

    Attributes:
        vocab_size: rows of the token table.
        embed_dim: width of the hidden states.
        num_layers: number of blocks.
        num_heads: number of attention heads.
        head_dim: width of a head.
        mlp_dim: inner width of the feed-forward.
        max_length: rows of the position table.
        type_vocab_size: rows of the segment table; every token is of segment 0.
        dropout_rate: dropout after embeddings, attention and feed-forward.
        attention_dropout_rate: dropout of attention probabilities.
        layer_norm_epsilon: epsilon of all layer normalisations.
        initializer_stddev: standard deviation of the normal for initial kernels and tables.
        activation: activation of the feed-forward.
        dtype: dtype of activations, "float32" or "bfloat16"; parameters, softmax and normalisation
            statistics, router logits and returned embeddings are always float32.
        remat: rematerialisation.
        attention: attention kernel.
    """

    vocab_size: int = 30522
    embed_dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    head_dim: int = 64
    mlp_dim: int = 3072
    max_length: int = 512
    type_vocab_size: int = 2
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_stddev: float = 0.02
    activation: Activation = Activation.GELU
    dtype: str = "float32"
    remat: Remat = Remat.NONE
    attention: AttentionKernel = AttentionKernel.EINSUM

    def __post_init__(self) -> None:
        tables = ("max_length", "type_vocab_size")
        check_fields(self, *SIZES, *tables, is_valid=lambda n: n >= 1, expected="1 or more")
        rates = ("dropout_rate", "attention_dropout_rate")
        check_fields(self, *rates, is_valid=lambda x: 0 <= x < 1, expected="0 <= rate < 1")
        check_fields(self, "dtype", is_valid=DTYPES.__contains__, expected=" or ".join(DTYPES))

    @property
    def kernel_init(self) -> Initializer:
        """Initialiser of kernels and tables."""
        return nn.initializers.normal(self.initializer_stddev)


class Embeddings(nn.Module):
    """LayerNorm(token + position + segment 0), then dropout."""

    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, ids: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        """Embeds token ids; positions count from 0 at [CLS]."""
        config = self.config
        token = self._table("token", config.vocab_size, "vocab")
        position = self._table("position", config.max_length, "length")
        segment = self._table("type", config.type_vocab_size, None)
        hidden = jnp.take(token, ids, axis=0) + position[: ids.shape[1]] + segment[0]
        scale, bias = LayerNormParameters((config.embed_dim,), ("embed",), name="layer_norm")()
        hidden = layer_norm(hidden, scale, bias, epsilon=config.layer_norm_epsilon)
        dropout = Dropout(config.dropout_rate, deterministic=self.deterministic)
        return dropout(hidden.astype(config.dtype))

    def _table(self, name: str, rows: int, axis: str | None) -> Float[Array, "rows embed"]:
        return Table(rows, self.config.embed_dim, axis, self.config.kernel_init, name=name)()


class Table(nn.Module):
    """Holds one embedding table."""

    rows: int
    embed_dim: int
    row_axis: str | None
    table_init: Initializer

    @nn.compact
    def __call__(self) -> Float[Array, "rows embed"]:
        """Returns the table."""
        shape, axes = (self.rows, self.embed_dim), (self.row_axis, "embed")
        return parameter(self, "embedding", self.table_init, shape, axes)


class Block(nn.Module):
    """One post-LN Transformer block; its feed-forward is plain, or experts with a router.

    Attributes:
        config: the encoder's configuration.
        experts: the experts; None in a shared block.
        role: role of the input, for Det-R's choice during tracing.
        deterministic: True at inference.
        output: positions to compute.
    """

    config: BertConfig
    experts: ExpertConfig | None
    role: Role
    deterministic: bool
    output: EncoderOutput

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        group_gates: Float[Array, "batch 1 group"] | None = None,
        shared_router: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "batch queries embed"], RoutingStatistics | None]:
        """Applies the block.

        Args:
            hidden: output of the block below.
            mask: True at real tokens.
            group_gates: Det-R with I > 2 in training: each sequence's expert in its group.
            shared_router: kernel and bias of the router, if one serves all blocks.

        Returns:
            Hidden states, and the statistics of a learned router.
        """
        config, block_input = self.config, hidden
        if self.output is EncoderOutput.FIRST_TOKEN:
            block_input, mask_out = hidden[:, :1], mask[:, :1]
        else:
            mask_out = mask
        attended = self._attention(block_input, hidden, mask)

        feed_forward = FeedForward(
            mlp_dim=config.mlp_dim,
            activation=config.activation,
            dropout_rate=config.dropout_rate,
            epsilon=config.layer_norm_epsilon,
            kernel_init=config.kernel_init,
            deterministic=self.deterministic,
            num_experts=None if self.experts is None else self.experts.num_experts,
            name="mlp" if self.experts is None else "experts",
        )
        if self.experts is None:
            return feed_forward(attended), None
        if not self.experts.learned:
            first, _ = self.experts.group(self.role)
            if group_gates is None:
                return feed_forward(attended, expert=first), None
            return feed_forward(attended, first_expert=first, gates=group_gates), None

        if self.experts.router_input is RouterInput.BLOCK_INPUT:
            router_input = block_input
        else:
            router_input = attended
        gates, statistics = self._route(router_input, mask_out, shared_router)
        return feed_forward(attended, gates=gates), statistics

    def _attention(
        self,
        queries: Float[Array, "batch queries embed"],
        keys: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
    ) -> Float[Array, "batch queries embed"]:
        config = self.config
        attention = SelfAttention(
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            dropout_rate=config.attention_dropout_rate,
            kernel=config.attention,
            kernel_init=config.kernel_init,
            deterministic=self.deterministic,
            name="attention",
        )
        dropout = Dropout(config.dropout_rate, deterministic=self.deterministic)
        attended = queries + dropout(attention(queries, keys, mask=mask))
        norm = LayerNormParameters((config.embed_dim,), ("embed",), name="attention_layer_norm")
        scale, bias = norm()
        return layer_norm(attended, scale, bias, epsilon=config.layer_norm_epsilon)

    def _route(
        self,
        inputs: Float[Array, "batch queries embed"],
        mask: Bool[Array, "batch queries"],
        shared_router: tuple[Array, Array] | None,
    ) -> tuple[Float[Array, "batch positions experts"], RoutingStatistics]:
        experts = self.experts
        assert experts is not None
        if experts.routing is Routing.SEQUENCE:
            if experts.sequence_summary is SequenceSummary.MEAN:
                inputs = mean_over_tokens(inputs, mask)[:, None]
            inputs, mask = inputs[:, :1], mask[:, :1]
        kernel, bias = shared_router or router_parameters(self.config, experts)
        logits = routing.router_logits(inputs, kernel, bias)
        gates = routing.straight_through_gates(
            logits,
            noise_key=None if self.deterministic else self.make_rng("routing"),
            temperature=experts.temperature,
            gradient=experts.gate_gradient,
        )
        # Padding must not activate an expert that no real token chose.
        return gates * mask[..., None], routing.routing_statistics(logits, mask)


def router_parameters(config: BertConfig, experts: ExpertConfig) -> tuple[Array, Array]:
    """Kernel A (normal, 0.02) and bias c (zero) of a router, inside a compact method."""
    shape, kernel_init = (config.embed_dim, experts.num_experts), _ROUTER_INIT
    return Affine(shape, ("embed", "expert"), (0,), kernel_init, name="router")()


class BertEncoder(nn.Module):
    """Embeddings and `num_layers` blocks, some of them specialised.

    Parameters: `embeddings/...`, `layers_i/...` for i from 0 (block i+1 of the paper), and
    `router/...` if one router serves all specialised blocks.

    Attributes:
        config: sizes and numerics.
        experts: experts of the specialised blocks.
        frozen_blocks: number of first blocks that, like the embeddings, run as at inference and get
            no gradient; statistics of their routers are omitted. 0 freezes nothing.
    """

    config: BertConfig
    experts: ExpertConfig = ExpertConfig()
    frozen_blocks: int = 0

    @nn.compact
    def __call__(
        self,
        texts: Tokens | States,
        *,
        role: Role,
        train: bool = False,
        output: EncoderOutput = EncoderOutput.ALL_TOKENS,
    ) -> tuple[Float[Array, "batch queries embed"], RoutingStatistics | None]:
        """Encodes padded sequences.

        Args:
            texts: ids and mask, or the output of the frozen blocks.
            role: the role whose experts Det-R runs.
            train: True enables dropout and routing draws, from the rngs "dropout" and "routing".
            output: all hidden states, [CLS] only, or those of the frozen blocks. A specialised last
                block computes all tokens if its router reads all of them.

        Returns:
            Hidden states in `config.dtype`, and the statistics of learned routers.

        Raises:
            ConfigError: the sequences are longer than the position table.
        """
        config, experts = self.config, self.experts
        mask = jnp.asarray(texts.mask)
        if mask.shape[1] > config.max_length:
            problem = f"sequences of {mask.shape[1]} tokens, with max_length = {config.max_length}"
            fix = "shorten query_length or passage_length, or raise BertConfig.max_length"
            raise ConfigError(problem, where="BertEncoder", fix=fix)
        specialized = experts.specialized_blocks(config.num_layers)
        shared_router = None
        if experts.learned and experts.gate_sharing is GateSharing.SHARED:
            shared_router = router_parameters(config, experts)
        group_gates = self._group_gates(role, mask, train=train)
        block_class = nn.remat(Block) if config.remat is Remat.BLOCK else Block

        frozen = self.frozen_blocks
        if isinstance(texts, States):
            first, hidden = frozen, jnp.asarray(texts.hidden).astype(config.dtype)
        else:
            embeddings = Embeddings(config, not train or frozen > 0, name="embeddings")
            first, hidden = 0, embeddings(jnp.asarray(texts.ids))
        hidden = split_over_batch(hidden)
        statistics = []
        for i in range(first, frozen if output is EncoderOutput.FROZEN else config.num_layers):
            trains = train and i >= frozen
            if i == frozen > 0:
                hidden = jax.lax.stop_gradient(hidden)
            is_specialized = i + 1 in specialized
            block = block_class(
                config=config,
                experts=experts if is_specialized else None,
                role=role,
                deterministic=not trains,
                output=block_output(config, experts, i + 1, output),
                name=f"layers_{i}",
            )
            gates = group_gates if i >= frozen else None
            hidden, block_statistics = block(hidden, mask, gates, shared_router)
            hidden = split_over_batch(hidden)
            if block_statistics is not None and i >= frozen:
                statistics.append(block_statistics)
        if output is EncoderOutput.FIRST_TOKEN:
            hidden = hidden[:, :1]
        return hidden, routing.stack_statistics(statistics) if statistics else None

    def _group_gates(
        self, role: Role, mask: Bool[Array, "batch length"], *, train: bool
    ) -> Float[Array, "batch 1 group"] | None:
        """Det-R with I > 2: in training, a uniform draw per sequence, the same for all blocks.

        At inference the first expert of the role's group runs. (The released code hard-codes
        experts 0 and 1 there, which for I > 2 are both the queries'.)
        """
        experts = self.experts
        _, size = experts.group(role)
        if not train or experts.num_experts == 1 or experts.learned or size == 1:
            return None
        key = self.make_rng("routing")
        return routing.group_gates(key, batch_size=mask.shape[0], group_size=size)


def block_output(
    config: BertConfig, experts: ExpertConfig, block: int, output: EncoderOutput
) -> EncoderOutput:
    """Positions that a block (numbered from 1) must compute if the encoder returns `output`."""
    specialized = block in experts.specialized_blocks(config.num_layers)
    if block < config.num_layers or (specialized and experts.reads_every_token):
        return EncoderOutput.ALL_TOKENS
    return output
