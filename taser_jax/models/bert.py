"""The BERT-family encoder, with shared and specialised blocks (TASER, section 3)."""

from __future__ import annotations

import enum

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from taser_jax.models import layers, routing
from taser_jax.models.batch import Role, RoutingStatistics, States, Tokens
from taser_jax.models.bert_config import BertConfig
from taser_jax.models.bert_layers import FeedForward, SelfAttention
from taser_jax.models.stack import BlockCall, Scan, by_remat, run_blocks, split_over_batch
from taser_jax.models.t5_layers import RelativePositionBias
from taser_jax.storage.errors import ConfigError

# From this distance on MPNet's relative positions share a bucket.
_MAX_DISTANCE = 128
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


class Embeddings(nn.Module):
    """LayerNorm(token + position + segment 0), of those that the family has, then dropout."""

    config: BertConfig
    deterministic: bool

    @nn.compact
    def __call__(self, ids: Int[Array, "batch length"]) -> Float[Array, "batch length embed"]:
        """Embeds token ids; positions count from 0 at [CLS]."""
        config, first = self.config, self.config.traits.first_position
        hidden = jnp.take(self._table("token", config.vocab_size, "vocab"), ids, axis=0)
        if first is not None:
            position = self._table("position", config.max_length + first, "length")
            hidden += position[first : first + ids.shape[1]]
        if config.traits.segments:
            hidden += self._table("type", config.type_vocab_size, None)[0]
        hidden = _normalized(hidden, config, "layer_norm")
        dropout = layers.Dropout(config.dropout_rate, deterministic=self.deterministic)
        return dropout(hidden.astype(config.dtype))

    def _table(self, name: str, rows: int, axis: str | None) -> Float[Array, "rows embed"]:
        shape, axes = (rows, self.config.embed_dim), (axis, "embed")
        init = self.config.kernel_init
        return layers.Kernel(shape, axes, init, called="embedding", name=name)()


def _normalized(
    hidden: Float[Array, "*batch embed"], config: BertConfig, name: str
) -> Float[Array, "*batch embed"]:
    """The layer normalisation of this name, inside a compact method."""
    shape, axes, has_bias = (config.embed_dim,), ("embed",), config.traits.norm_biases
    affine = layers.Affine(shape, axes, (), nn.initializers.ones, has_bias, "scale", name=name)
    scale, bias = affine()
    return layers.layer_norm(hidden, scale, bias, epsilon=config.layer_norm_epsilon)


class Block(nn.Module):
    """One Transformer block; its feed-forward is plain, or experts with a router.

    Attributes:
        config: the encoder's configuration.
        theta: base of the rotary positions; None without them.
        normalizes_input: False if the block below, or the embeddings, have normalised it.
        experts: the experts; None in a shared block.
        first_expert: Det-R's expert, or the first of its group, for the input's role.
        deterministic: True at inference.
        output: positions to compute.
    """

    config: BertConfig
    theta: float | None
    normalizes_input: bool
    experts: routing.ExpertConfig | None
    first_expert: int
    deterministic: bool
    output: EncoderOutput

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "batch length embed"],
        mask: Bool[Array, "batch length"],
        group_gates: Float[Array, "batch 1 group"] | None = None,
        shared_router: tuple[Array, Array] | None = None,
        bias: Float[Array, "#heads length length"] | None = None,
    ) -> tuple[Float[Array, "batch queries embed"], RoutingStatistics | None]:
        """Applies the block.

        Args:
            hidden: output of the block below.
            mask: True at real tokens.
            group_gates: Det-R with I > 2 in training: each sequence's expert in its group.
            shared_router: kernel and bias of the router, if one serves all blocks.
            bias: added to attention scores.

        Returns:
            Hidden states, and the statistics of a learned router.
        """
        if not self.deterministic:
            hidden = layers.row_by_row(hidden)
        config, block_input = self.config, hidden
        if self.output is EncoderOutput.FIRST_TOKEN:
            block_input, mask_out = hidden[:, :1], mask[:, :1]
        else:
            mask_out = mask
        attended = self._attention(block_input, hidden, mask, bias)

        count, name = None, "mlp"
        if self.experts is not None:
            count, name = self.experts.num_experts, "experts"
        feed_forward = FeedForward(config, self.deterministic, num_experts=count, name=name)
        if self.experts is None:
            return feed_forward(attended), None
        if not self.experts.learned:
            first = self.first_expert
            if group_gates is None:
                return feed_forward(attended, expert=first), None
            return feed_forward(attended, first_expert=first, gates=group_gates), None

        if self.experts.router_input is routing.RouterInput.BLOCK_INPUT:
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
        bias: Float[Array, "#heads length length"] | None,
    ) -> Float[Array, "batch queries embed"]:
        config, traits, count = self.config, self.config.traits, queries.shape[1]
        attention = SelfAttention(config, self.deterministic, self.theta, name="attention")
        dropout = layers.Dropout(config.dropout_rate, deterministic=self.deterministic)
        name = "attention_layer_norm"
        if self.normalizes_input:
            keys = _normalized(keys, config, name)
        bias = None if bias is None else bias[:, :count]
        attended = queries + dropout(attention(keys[:, :count], keys, mask=mask, bias=bias))
        return attended if traits.pre_norm else _normalized(attended, config, name)

    def _route(
        self,
        inputs: Float[Array, "batch queries embed"],
        mask: Bool[Array, "batch queries"],
        shared_router: tuple[Array, Array] | None,
    ) -> tuple[Float[Array, "batch positions experts"], RoutingStatistics]:
        experts = self.experts
        assert experts is not None
        if experts.routing is routing.Routing.SEQUENCE:
            if experts.sequence_summary is routing.SequenceSummary.MEAN:
                inputs = layers.mean_over_tokens(inputs, mask)[:, None]
            inputs, mask = inputs[:, :1], mask[:, :1]
        kernel, bias = shared_router or router_parameters(self.config, experts)
        # A·u + c in float32 (Equation 3).
        logits = inputs.astype(jnp.float32) @ kernel + bias
        key = None if self.deterministic else self.make_rng("routing")
        gates = routing.straight_through_gates(logits, experts, noise_key=key)
        # Padding must not activate an expert that no real token chose.
        return gates * mask[..., None], routing.routing_statistics(logits, mask)


_BLOCKS = by_remat(Block)


def router_parameters(config: BertConfig, experts: routing.ExpertConfig) -> tuple[Array, Array]:
    """Kernel A (normal, 0.02) and bias c (zero) of a router, inside a compact method."""
    shape, kernel_init = (config.embed_dim, experts.num_experts), _ROUTER_INIT
    return layers.Affine(shape, ("embed", "expert"), (0,), kernel_init, name="router")()


class BertEncoder(nn.Module):
    """Embeddings and `num_layers` blocks, some of them specialised.

    Parameters: `embeddings/...`, `layers_i/...` for i from 0 (block i+1 of the paper), `router/...`
    if one router serves all specialised blocks, and, in families that have them,
    `relative_bias/...` and `final_layer_norm/...`.

    Attributes:
        config: sizes and numerics.
        experts: experts of the specialised blocks.
        frozen_blocks: number of first blocks that, like the embeddings, run as at inference and get
            no gradient; statistics of their routers are omitted. 0 freezes nothing.
    """

    config: BertConfig
    experts: routing.ExpertConfig = routing.ExpertConfig()
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
            ConfigError: the sequences are longer than `max_length`.
        """
        config, experts = self.config, self.experts
        mask = jnp.asarray(texts.mask)
        if mask.shape[1] > config.max_length:
            problem = f"sequences of {mask.shape[1]} tokens, with max_length = {config.max_length}"
            fix = "shorten query_length or passage_length, or raise BertConfig.max_length"
            raise ConfigError(problem, where="BertEncoder", fix=fix)
        specialized = experts.specialized_blocks(config.num_layers)
        shared_router = None
        if experts.learned and experts.gate_sharing is routing.GateSharing.SHARED:
            shared_router = router_parameters(config, experts)
        group_gates = self._group_gates(role, mask, train=train)
        frozen, last = self.frozen_blocks, config.num_layers
        if output is EncoderOutput.FROZEN:
            last = frozen
        if isinstance(texts, States):
            first, hidden = frozen, jnp.asarray(texts.hidden).astype(config.dtype)
        else:
            embeddings = Embeddings(config, not train or frozen > 0, name="embeddings")
            first, hidden = 0, embeddings(jnp.asarray(texts.ids))
        hidden = split_over_batch(hidden)
        biases = self._attention_biases(mask)
        block_class, traits = _BLOCKS[config.remat], config.traits

        def call(i: int) -> BlockCall:
            is_specialized = i + 1 in specialized
            block = block_class(
                config=config,
                theta=config.rotary.theta_of(i + 1) if traits.rotary else None,
                normalizes_input=traits.pre_norm and i > 0,
                experts=experts if is_specialized else None,
                first_expert=experts.group(role)[0] if is_specialized else 0,
                deterministic=not train or i < frozen,
                output=block_output(config, experts, i + 1, output),
                parent=None,
            )
            gates = group_gates if i >= frozen else None
            return BlockCall(block, (mask, gates, shared_router, biases[i]))

        hidden, statistics = run_blocks(
            self,
            first,
            [call(i) for i in range(first, last)],
            hidden,
            frozen=frozen,
            scanned=train and config.scan is Scan.BLOCKS,
        )
        if output is EncoderOutput.FIRST_TOKEN:
            hidden = hidden[:, :1]
        if config.traits.pre_norm and output is not EncoderOutput.FROZEN:
            hidden = _normalized(hidden, config, "final_layer_norm")
        routed = [of_a_block for of_a_block in statistics if of_a_block is not None]
        if not routed:
            return hidden, None
        return hidden, jax.tree.map(lambda *blocks: jnp.stack(blocks), *routed)

    def _attention_biases(
        self, mask: Bool[Array, "batch length"]
    ) -> list[Float[Array, "#heads length length"] | None]:
        """What each block adds to its attention scores: distances, a local window, or nothing."""
        # Not an integer in an export, whose lengths are symbols.
        length = mask.shape[1]
        config, traits = self.config, self.config.traits
        if traits.relative_buckets:
            relative = RelativePositionBias(
                config.num_heads, traits.relative_buckets, _MAX_DISTANCE, name="relative_bias"
            )
            return [relative(length)] * config.num_layers
        if not traits.rotary:
            return [None] * config.num_layers
        blocks = range(1, config.num_layers + 1)
        is_local = [config.rotary.is_local(block) for block in blocks]
        # As large as the square of the length.
        bias = config.rotary.local_bias(length) if any(is_local) else None
        return [bias if local else None for local in is_local]

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
    config: BertConfig, experts: routing.ExpertConfig, block: int, output: EncoderOutput
) -> EncoderOutput:
    """Positions that a block (numbered from 1) must compute if the encoder returns `output`."""
    specialized = block in experts.specialized_blocks(config.num_layers)
    if block < config.num_layers or (specialized and experts.reads_every_token):
        return EncoderOutput.ALL_TOKENS
    return output
