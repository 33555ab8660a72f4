"""The dual encoder: one `encode` by role for DPR, TASER and Shared alike."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, no_type_check

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.batch import Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.models.bert import BertConfig, BertEncoder, EncoderOutput
from taser_jax.models.routing import ExpertConfig, Routing, RoutingStatistics

Params = Any

_ANY_LENGTH = 1
# Keeps the gradient of a zero embedding finite.
_SMALLEST_SQUARE = 1e-24


class Towers(enum.Enum):
    """One encoder for both roles (TASER, Shared), or one each (DPR)."""

    TIED = "tied"
    SEPARATE = "separate"


class TowerInit(enum.Enum):
    """How two towers start: as copies of one draw, or each from its own.

    DPR's towers both start from the same BERT, so COPIED is its counterpart from scratch: a word
    means the same on both sides from the first step on.
    """

    COPIED = "copied"
    INDEPENDENT = "independent"


class Pooling(enum.Enum):
    """How hidden states become an embedding: [CLS], or the mean over real tokens."""

    CLS = "cls"
    MEAN = "mean"


class Normalization(enum.Enum):
    """Whether embeddings are divided by their L2 norm: the dot product is then the cosine."""

    NONE = "none"
    L2 = "l2"


@dataclasses.dataclass(frozen=True)
class DualEncoderConfig:
    """What a dual encoder is made of.

    Example:
        >>> dpr = DualEncoderConfig(towers=Towers.SEPARATE)
        >>> taser = DualEncoderConfig(experts=ExpertConfig(num_experts=2))
        >>> shared = DualEncoderConfig()

    Attributes:
        bert: the encoder.
        experts: its specialised blocks.
        towers: one encoder or two.
        pooling: [CLS] or mean.
        tower_init: how two towers start; without effect on one.
        normalization: of embeddings; none in the papers, L2 for encoders pretrained with cosines
            (whose temperature is then about 0.05).
    """

    bert: BertConfig = dataclasses.field(default_factory=BertConfig)
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    towers: Towers = Towers.TIED
    pooling: Pooling = Pooling.CLS
    tower_init: TowerInit = TowerInit.COPIED
    normalization: Normalization = Normalization.NONE

    def __post_init__(self) -> None:
        by_role = self.experts.routing is Routing.DETERMINISTIC
        if self.towers is Towers.SEPARATE and self.experts.num_experts > 1 and by_role:
            raise ConfigError(
                "separate towers with experts chosen by role",
                where="DualEncoderConfig",
                expected="one or the other: each tower would use half of its experts only",
                fix="set towers=TIED (TASER) or num_experts=1 (DPR)",
            )
        self.experts.specialized_blocks(self.bert.num_layers)


# JAX rebuilds pytrees with leaves that are no arrays: shapes are told here, not checked.
@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """What `encode` returns.

    Attributes:
        embeddings: the score of two is their dot product. [batch, dim], float32.
        routing: statistics of learned routers; None with Det-R and without experts.
    """

    embeddings: Float[Array, "batch dim"]
    routing: RoutingStatistics | None


class DualEncoder(nn.Module):
    """Queries and passages to embeddings whose dot product is their score.

    Parameters lie under `encoder` (tied) or `query_encoder` and `passage_encoder`.

    Example:
        >>> encoded = model.apply(
        ...     {"params": params}, tokens, role=Role.QUERY, train=True,
        ...     rngs={"dropout": key1, "routing": key2}, method="encode")
    """

    config: DualEncoderConfig

    def setup(self) -> None:
        """Makes the towers."""
        if self.config.towers is Towers.TIED:
            self.encoder = BertEncoder(self.config.bert, self.config.experts)
        else:
            self.query_encoder = BertEncoder(self.config.bert, self.config.experts)
            self.passage_encoder = BertEncoder(self.config.bert, self.config.experts)

    def __call__(
        self, queries: Tokens, passages: Tokens, *, train: bool = False
    ) -> tuple[Encoded, Encoded]:
        """Encodes both roles; what `init` calls."""
        return (
            self.encode(queries, role=Role.QUERY, train=train),
            self.encode(passages, role=Role.PASSAGE, train=train),
        )

    def encode(
        self, tokens: Tokens, *, role: Role, task: str | None = None, train: bool = False
    ) -> Encoded:
        """Encodes texts of one role.

        Args:
            tokens: ids and mask. [batch, length]
            role: picks the tower, and the expert of Det-R, while tracing.
            task: the task's name; these encoders treat all tasks alike.
            train: True drops and draws, from the rngs "dropout" and "routing".

        Returns:
            Float32 embeddings and routing statistics.
        """
        del task
        if self.config.towers is Towers.TIED:
            tower = self.encoder
        else:
            tower = self.query_encoder if role is Role.QUERY else self.passage_encoder
        cls_only = self.config.pooling is Pooling.CLS
        output = EncoderOutput.FIRST_TOKEN if cls_only else EncoderOutput.ALL_TOKENS
        hidden, statistics = tower(tokens, role=role, train=train, output=output)
        if cls_only:
            pooled = hidden[:, 0].astype(jnp.float32)
        else:
            weight = tokens.mask[..., None].astype(jnp.float32)
            total = (hidden.astype(jnp.float32) * weight).sum(1)
            pooled = total / jnp.maximum(weight.sum(1), 1.0)
        return Encoded(normalize(pooled, self.config.normalization), statistics)

    def initial_params(self, params: Params) -> Params:
        """What `init_params` starts from, given what each tower drew: towers as copies or apart."""
        config = self.config
        if config.towers is Towers.SEPARATE and config.tower_init is TowerInit.COPIED:
            return {**params, "passage_encoder": params["query_encoder"]}
        return params


def normalize(
    embeddings: Float[Array, "batch dim"], normalization: Normalization
) -> Float[Array, "batch dim"]:
    """Embeddings divided by their L2 norms, where that is asked for; zeros stay zeros."""
    if normalization is Normalization.NONE:
        return embeddings
    square = jnp.square(embeddings).sum(-1, keepdims=True)
    return embeddings * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST_SQUARE))


def init_params(
    model: nn.Module,
    key: jax.Array,
    *,
    query_length: int = _ANY_LENGTH,
    passage_length: int = _ANY_LENGTH,
) -> Params:
    """Draws parameters: plain nested dicts of float32 arrays, without partitioning metadata.

    Args:
        model: a dual encoder: a module of queries and passages with a method `initial_params`.
        key: of jax.random.
        query_length: tokens a query; checked against the position table, else without effect.
        passage_length: tokens a passage; likewise.
    """
    boxed = _boxed_params(model, key, query_length, passage_length)
    return jax.tree.map(_unbox, boxed, is_leaf=_is_boxed)


def abstract_params(model: nn.Module) -> Params:
    """Shapes and dtypes of the parameters, with nothing allocated."""
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def logical_axes(model: nn.Module) -> Params:
    """For every parameter the logical name of each axis, as a PartitionSpec.

    Example:
        >>> logical_axes(model)["encoder"]["layers_0"]["mlp"]["wi"]["kernel"]
        PartitionSpec('embed', 'mlp')
    """
    boxed = jax.eval_shape(
        lambda: _boxed_params(model, jax.random.key(0), _ANY_LENGTH, _ANY_LENGTH)
    )
    return nn.get_partition_spec(boxed)


def parameter_count(params: Params) -> int:
    """Number of parameters of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _boxed_params(model: Any, key: jax.Array, query_length: int, passage_length: int) -> Params:
    queries, passages = (
        Tokens(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))
        for length in (query_length, passage_length)
    )
    return model.initial_params(model.init(key, queries, passages)["params"])


def _is_boxed(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def _unbox(leaf: Any) -> Any:
    return leaf.unbox(apply_constraint=False) if _is_boxed(leaf) else leaf
