"""The dual encoder: one `encode` by role for DPR, TASER and Shared alike."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, no_type_check

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.batch import Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.expert_use import RoutingStatistics
from taser_jax.models.bert import BertConfig, BertEncoder, EncoderOutput
from taser_jax.models.routing import ExpertConfig, Routing

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
        >>> q_spec = DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))

    Attributes:
        bert: the encoder.
        experts: its specialised blocks.
        towers: one encoder or two.
        pooling: [CLS] or mean.
        tower_init: how two towers start; without effect on one.
        normalization: of embeddings; none in the papers, L2 for encoders pretrained with cosines
            (whose temperature is then about 0.05).
        query_tasks: tasks with a query tower of their own (TACO-DR's QSpec); empty for one tower
            for all queries. Needs separate towers; passages have one tower for all tasks.
    """

    bert: BertConfig = dataclasses.field(default_factory=BertConfig)
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    towers: Towers = Towers.TIED
    pooling: Pooling = Pooling.CLS
    tower_init: TowerInit = TowerInit.COPIED
    normalization: Normalization = Normalization.NONE
    query_tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_query_tasks(self.towers, self.query_tasks, where="DualEncoderConfig")
        by_role = self.experts.routing is Routing.DETERMINISTIC
        if self.towers is Towers.SEPARATE and self.experts.num_experts > 1 and by_role:
            raise ConfigError(
                "separate towers with experts chosen by role",
                where="DualEncoderConfig",
                expected="one or the other: each tower would use half of its experts only",
                fix="set towers=TIED (TASER) or num_experts=1 (DPR)",
            )
        self.experts.specialized_blocks(self.bert.num_layers)

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Names under which the towers' parameters lie."""
        return tower_names(self.towers, self.query_tasks)


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

    Parameters lie under `encoder` (tied), `query_encoder` or `query_encoder_<task>`, and
    `passage_encoder`.

    Example:
        >>> encoded = model.apply(
        ...     {"params": params}, tokens, role=Role.QUERY, train=True,
        ...     rngs={"dropout": key1, "routing": key2}, method="encode")
    """

    config: DualEncoderConfig

    def setup(self) -> None:
        """Makes the towers."""
        for name in self.config.tower_names:
            setattr(self, name, BertEncoder(self.config.bert, self.config.experts))

    def __call__(
        self, queries: Tokens, passages: Tokens, *, train: bool = False
    ) -> tuple[Encoded, Encoded]:
        """Encodes both roles; what `init` calls. Queries are taken as of the first task."""
        tasks = self.config.query_tasks or (None,)
        if self.is_initializing() and self.config.tower_init is TowerInit.INDEPENDENT:
            for task in tasks[1:]:
                self.encode(queries, role=Role.QUERY, task=task, train=train)
        return (
            self.encode(queries, role=Role.QUERY, task=tasks[0], train=train),
            self.encode(passages, role=Role.PASSAGE, train=train),
        )

    def encode(
        self, tokens: Tokens, *, role: Role, task: str | None = None, train: bool = False
    ) -> Encoded:
        """Encodes texts of one role.

        Args:
            tokens: ids and mask. [batch, length]
            role: picks the tower, and the expert of Det-R, while tracing.
            task: the task's name; picks the query tower where tasks have their own.
            train: True drops and draws, from the rngs "dropout" and "routing".

        Returns:
            Float32 embeddings and routing statistics.

        Raises:
            ConfigError: a query of a task without a tower.
        """
        config = self.config
        tower = getattr(self, tower_name(config.towers, config.query_tasks, role, task))
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
        if config.tower_init is TowerInit.COPIED:
            return dict.fromkeys(config.tower_names, params[config.tower_names[0]])
        return params


def check_query_tasks(towers: Towers, query_tasks: Sequence[str], *, where: str) -> None:
    """Refuses query towers of tasks that could not be told apart, or beside one tied tower.

    Args:
        towers: one for both roles, or one each.
        query_tasks: tasks with a query tower of their own.
        where: the configuration, for the message.

    Raises:
        ConfigError: see above.
    """
    if query_tasks and towers is Towers.TIED:
        raise ConfigError(
            f"{len(query_tasks)} query_tasks with tied towers",
            where=where,
            expected="separate towers: a query tower a task, one passage tower",
            fix="set towers=SEPARATE, or no query_tasks",
        )
    names = set(query_tasks)
    is_text = isinstance(query_tasks, str)
    if is_text or len(names) < len(query_tasks) or any(not n or "/" in n for n in names):
        raise ConfigError(
            f"query_tasks are {query_tasks!r}",
            where=where,
            expected="names of tasks, each once, without a slash",
        )


def tower_names(towers: Towers, query_tasks: Sequence[str]) -> tuple[str, ...]:
    """Names under which towers' parameters lie, queries' first.

    Example:
        >>> tower_names(Towers.SEPARATE, ("nq", "fever"))
        ('query_encoder_nq', 'query_encoder_fever', 'passage_encoder')
    """
    if towers is Towers.TIED:
        return ("encoder",)
    queries = [f"query_encoder_{task}" for task in query_tasks] or ["query_encoder"]
    return (*queries, "passage_encoder")


def tower_name(towers: Towers, query_tasks: Sequence[str], role: Role, task: str | None) -> str:
    """Name of the tower that a text goes through.

    Args:
        towers: one for both roles, or one each.
        query_tasks: tasks with a query tower of their own.
        role: the text's.
        task: the text's; told apart only for queries, and only where tasks have towers.

    Raises:
        ConfigError: a query of a task without a tower.
    """
    if towers is Towers.TIED:
        return "encoder"
    if role is Role.PASSAGE:
        return "passage_encoder"
    if not query_tasks:
        return "query_encoder"
    if task not in query_tasks:
        raise ConfigError(
            "a query without a task" if task is None else f"a query of task {task!r}",
            where="encode",
            expected=f"a task with a query encoder: {', '.join(query_tasks)}",
            fix="name the task whose query encoder is meant",
        )
    return f"query_encoder_{task}"


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
