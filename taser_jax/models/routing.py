"""The expert of each input: Det-R, Seq-R and Tok-R, and the statistics of learned routing.

Statistics are sums over inputs, from which shares, entropies and information follow.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.devices.mesh import rows_of_shard
from taser_jax.models.batch import Role, RoutingStatistics
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked, Natural, Positive, PositiveNumber


class Routing(enum.Enum):
    """How the router chooses.

    DETERMINISTIC (Det-R): by role. With I experts, queries own the first I/2, passages the others.
    SEQUENCE (Seq-R): one learned choice per sequence, from its `SequenceSummary`.
    TOKEN (Tok-R): one learned choice per token.
    """

    DETERMINISTIC = "deterministic"
    SEQUENCE = "sequence"
    TOKEN = "token"


class RouterInput(enum.Enum):
    """A learned router's input: that of the feed-forward (paper) or of the block (its code)."""

    FFN_INPUT = "ffn_input"
    BLOCK_INPUT = "block_input"


class SequenceSummary(enum.Enum):
    """Seq-R's input from a sequence: the state of [CLS] (paper), or the mean over tokens.

    Early in training the state of [CLS] hardly differs between inputs, so the constant part of
    the logits sends all of them to one expert; means over tokens differ as much as the texts.
    With the mean, a specialised last block computes every token even if only [CLS] is returned.
    """

    CLS = "cls"
    MEAN = "mean"


class GateSharing(enum.Enum):
    """Whether each specialised block has a router of its own, or all share one."""

    PER_BLOCK = "per_block"
    SHARED = "shared"


class GateGradient(enum.Enum):
    """The estimator of the router's gradient: through which gate entries the loss reaches it.

    In both, gates are one-hot, y = softmax((A·u + c + noise)/τ), and a_e = ⟨∂L/∂output, FFN_e(u)⟩
    is the gain in L from a larger gate e. ALL_EXPERTS is Equation 3's: the straight-through
    Gumbel-softmax of Jang et al. (2016), ∂L/∂logit_k = y_k·(a_k − Σ_e y_e·a_e)/τ. It compares the
    experts' outputs and is zero while they are equal, as at the start, where the loss does not
    depend on the choice.
    CHOSEN_EXPERT leaves out the experts that were not chosen (a_e = 0 for them): a router learns to
    prefer an expert whose output should grow, even if all experts are the same.
    """

    ALL_EXPERTS = "all_experts"
    CHOSEN_EXPERT = "chosen_expert"


@dataclasses.dataclass(frozen=True)
class ExpertConfig(Checked):
    """Which blocks are specialised, into how many experts, and how inputs find theirs.

    Example:
        >>> ExpertConfig(num_experts=2).specialized_blocks(12)
        (3, 6, 9, 12)

    Attributes:
        num_experts: I; 1 means no specialised block at all (Shared).
        shared_per_specialized: T; one specialised block follows every T shared ones.
        blocks: the specialised blocks, 1-based, which replace T.
        routing: Det-R, Seq-R or Tok-R.
        router_input: the states that a learned router reads.
        sequence_summary: which of a sequence's states Seq-R's router reads.
        gate_sharing: one router per block, or one for all.
        gate_gradient: see `GateGradient`.
        temperature: temperature of the Gumbel-softmax.
    """

    num_experts: Positive = 1
    shared_per_specialized: Natural = 2
    blocks: tuple[int, ...] | None = None
    routing: Routing = Routing.DETERMINISTIC
    router_input: RouterInput = RouterInput.FFN_INPUT
    sequence_summary: SequenceSummary = SequenceSummary.CLS
    gate_sharing: GateSharing = GateSharing.PER_BLOCK
    gate_gradient: GateGradient = GateGradient.ALL_EXPERTS
    temperature: PositiveNumber = 1.0

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", tuple(self.blocks))
        super().__post_init__()
        if self.num_experts > 1 and self.routing is Routing.DETERMINISTIC and self.num_experts % 2:
            problem = f"num_experts is {self.num_experts} with deterministic routing"
            fix = "give an even number: half the experts are for queries, half for passages"
            raise ConfigError(problem, where="ExpertConfig", fix=fix)

    def specialized_blocks(self, num_layers: int) -> tuple[int, ...]:
        """The specialised blocks of a stack of `num_layers`, 1-based, ascending.

        Raises:
            ConfigError: if there are experts and no block for them, or a block that does not exist.
        """
        if self.num_experts == 1:
            return ()
        all_blocks = range(1, num_layers + 1)
        if self.blocks is not None:
            blocks = tuple(sorted(set(self.blocks)))
        else:
            blocks = tuple(b for b in all_blocks if b % (self.shared_per_specialized + 1) == 0)
        if not blocks or not set(blocks) <= set(all_blocks):
            problem = f"specialised blocks {blocks} of a stack of {num_layers}"
            fix = f"set blocks (1 to {num_layers}) or shared_per_specialized, or num_experts=1"
            raise ConfigError(problem, where="ExpertConfig", fix=fix)
        return blocks

    def group(self, role: Role) -> tuple[int, int]:
        """Det-R's experts of a role as (first, size): queries [0, I/2), passages [I/2, I)."""
        half = self.num_experts // 2
        return (0 if role is Role.QUERY else half), half

    @property
    def learned(self) -> bool:
        """Whether routing is learned."""
        return self.num_experts > 1 and self.routing is not Routing.DETERMINISTIC

    @property
    def reads_every_token(self) -> bool:
        """Whether a router reads the states of all tokens."""
        by_mean = self.sequence_summary is SequenceSummary.MEAN
        return self.learned and (self.routing is Routing.TOKEN or by_mean)


def straight_through_gates(
    logits: Float[Array, "batch positions experts"],
    config: ExpertConfig,
    *,
    noise_key: jax.Array | None,
) -> Float[Array, "batch positions experts"]:
    """One-hot gates whose gradient is that of the (Gumbel-)softmax.

    y = softmax((logits + Gumbel noise) / τ), gate = onehot(argmax y) + (y − stop_gradient(y)).

    Args:
        logits: logits of the router.
        config: τ, and whether entries not chosen keep their gradient.
        noise_key: draws the noise; None at inference, where the choice is argmax of the logits.

    Returns:
        The gates; exactly one-hot in value.
    """
    if noise_key is not None:
        noise = functools.partial(jax.random.gumbel, noise_key, dtype=logits.dtype)
        logits = logits + rows_of_shard(noise, logits.shape)
    soft = jax.nn.softmax(logits / config.temperature, axis=-1)
    hard = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    gates = hard + (soft - jax.lax.stop_gradient(soft))
    return gates * hard if config.gate_gradient is GateGradient.CHOSEN_EXPERT else gates


def routing_statistics(
    logits: Float[Array, "batch positions experts"], mask: Bool[Array, "batch positions"]
) -> RoutingStatistics:
    """The statistics of one block (without the leading axis), over inputs where `mask` holds."""
    weight = mask.astype(jnp.float32)
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    probability = jnp.exp(log_probability)
    entropies = -(probability * log_probability).sum(-1)
    choice = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=jnp.float32)
    centred = logits - logits.mean(-1, keepdims=True)
    return RoutingStatistics(
        probability_sum=jnp.einsum("bpe,bp->e", probability, weight),
        entropy_sum=(entropies * weight).sum(),
        choice_count=jnp.einsum("bpe,bp->e", choice, weight),
        count=weight.sum(),
        logit_sum=jnp.einsum("bpe,bp->e", centred, weight),
        logit_square_sum=jnp.einsum("bpe,bp->e", jnp.square(centred), weight),
    )


def group_gates(
    key: jax.Array, *, batch_size: int, group_size: int
) -> Float[Array, "batch 1 group"]:
    """One-hot gates drawn uniformly for each sequence: Det-R's training with I > 2."""
    draw = functools.partial(jax.random.randint, key, minval=0, maxval=group_size)
    experts = rows_of_shard(draw, (batch_size, 1))
    return jax.nn.one_hot(experts, group_size, dtype=jnp.float32)


def entropy(probabilities: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    """−Σ p·ln p of each block, in nats; its gradient is finite where p = 0."""
    # 0·log 0 = 0, and its gradient must not be NaN: both branches stay finite.
    positive = probabilities > 0
    logs = jnp.log(jnp.where(positive, probabilities, 1.0))
    return -jnp.sum(jnp.where(positive, probabilities * logs, 0.0), axis=-1)


def expert_shares(statistics: RoutingStatistics) -> Float[Array, "blocks experts"]:
    """Share of inputs that argmax P sends to each expert; a block's sum to 1."""
    return statistics.choice_count / jnp.maximum(statistics.count, 1.0)[:, None]


def input_information(
    queries: RoutingStatistics, passages: RoutingStatistics
) -> Float[Array, " blocks"]:
    """I(input; expert) = H(mean_x P) − mean_x H(P(· | x)) in nats, both roles weighing the same.

    0 where every input is routed alike (collapse, or a router that ignores its input); ln(experts)
    where choices are certain and the experts evenly used, by role or within the roles.

    Example:
        A query with P = (1, 0) and two passages with (½, ½): the mean is (¾, ¼), and the
        information is H(¾, ¼) − ½·ln 2 = 0.5623 − 0.3466 = 0.2158 nats.

    Args:
        queries: sums over queries.
        passages: sums over passages.

    Returns:
        One value per specialised block.
    """
    marginal = (mean_probabilities(queries) + mean_probabilities(passages)) / 2
    return entropy(marginal) - (mean_entropy(queries) + mean_entropy(passages)) / 2


def mean_probabilities(statistics: RoutingStatistics) -> Float[Array, "blocks experts"]:
    """mean_x P(· | x)."""
    return statistics.probability_sum / jnp.maximum(statistics.count, 1.0)[:, None]


def mean_entropy(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """mean_x H(P(· | x)), in nats."""
    return statistics.entropy_sum / jnp.maximum(statistics.count, 1.0)


def logit_offset(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """How far the mean logits of two experts are apart; root mean square over pairs of experts.

    The part that all inputs share. With two experts |mean_x (l_0 − l_1)|. Where it is much larger
    than the `logit_spread`, argmax sends all inputs to one expert, whatever P is.

    Example:
        Logits (1, 0) and (3, 0): differences 1 and 3, offset 2, spread 1.
    """
    mean = statistics.logit_sum / jnp.maximum(statistics.count, 1.0)[:, None]
    return _over_pairs(jnp.square(mean))


def logit_spread(statistics: RoutingStatistics) -> Float[Array, " blocks"]:
    """Standard deviation over inputs of the difference of two logits; as `logit_offset`.

    The part that distinguishes inputs.
    """
    count = jnp.maximum(statistics.count, 1.0)[:, None]
    mean = statistics.logit_sum / count
    return _over_pairs(jnp.maximum(statistics.logit_square_sum / count - jnp.square(mean), 0.0))


def _over_pairs(squares: Float[Array, "blocks experts"]) -> Float[Array, " blocks"]:
    """√ of the mean square difference of two experts, whose sum over experts is 0."""
    return jnp.sqrt(2.0 * jnp.sum(squares, axis=-1) / max(squares.shape[-1] - 1, 1))
