"""T5 as a dual encoder: ST5-EncDec, mean pooling, and a query encoder for each task."""

from __future__ import annotations

import dataclasses
import enum

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from taser_jax.batch import Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.models.dual_encoder import (
    Encoded,
    Normalization,
    Params,
    TowerInit,
    Towers,
    check_query_tasks,
    normalize,
    tower_name,
    tower_names,
)
from taser_jax.models.t5 import T5, T5Config, rescale
from taser_jax.models.t5_layers import Kernel


class T5Embedding(enum.Enum):
    """What of T5 is a text's embedding.

    FIRST_DECODER_OUTPUT is ST5-EncDec (Ni et al., 2022), TACO-DR's encoder: the decoder's output
    for its start token. ENCODER_MEAN is the mean of the encoder's states over real tokens, as
    T5X's dual encoders have it; no decoder is made then.
    """

    FIRST_DECODER_OUTPUT = "first_decoder_output"
    ENCODER_MEAN = "encoder_mean"


@dataclasses.dataclass(frozen=True)
class T5DualEncoderConfig:
    """What a T5 dual encoder is made of.

    Example:
        >>> taco_dr = T5DualEncoderConfig()
        >>> q_spec = T5DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))

    Attributes:
        t5: the encoder and decoder.
        towers: one for both roles, or one each.
        query_tasks: tasks with a query tower of their own (TACO-DR's QSpec); empty for one tower
            for all queries. Needs separate towers; passages have one tower for all tasks.
        embedding: which output.
        projection_dim: width after a linear map without bias; None for no map.
        normalization: of embeddings.
        tower_init: how several towers start; without effect on one.
    """

    t5: T5Config = dataclasses.field(default_factory=T5Config)
    towers: Towers = Towers.TIED
    query_tasks: tuple[str, ...] = ()
    embedding: T5Embedding = T5Embedding.FIRST_DECODER_OUTPUT
    projection_dim: int | None = None
    normalization: Normalization = Normalization.NONE
    tower_init: TowerInit = TowerInit.COPIED

    def __post_init__(self) -> None:
        check_query_tasks(self.towers, self.query_tasks, where="T5DualEncoderConfig")
        if self.projection_dim is not None and self.projection_dim < 1:
            raise ConfigError(
                f"projection_dim is {self.projection_dim}",
                where="T5DualEncoderConfig",
                expected="1 or more, or None",
            )
        decoding = self.embedding is T5Embedding.FIRST_DECODER_OUTPUT
        if decoding and self.t5.num_decoder_layers == 0:
            raise ConfigError(
                "num_decoder_layers is 0 with the first decoder output as embedding",
                where="T5DualEncoderConfig",
                expected="1 or more",
                fix="set embedding=ENCODER_MEAN to use an encoder alone",
            )

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Names under which the towers' parameters lie."""
        return tower_names(self.towers, self.query_tasks)


class T5Tower(T5):
    """T5 and what makes one embedding of a text; the projection is `projection_layer/kernel`."""

    embedding: T5Embedding = T5Embedding.FIRST_DECODER_OUTPUT
    projection_dim: int | None = None
    normalization: Normalization = Normalization.NONE

    def setup(self) -> None:
        """Makes T5 and the projection."""
        super().setup()
        if self.projection_dim is not None:
            shape = (self.config.embed_dim, self.projection_dim)
            self.projection_layer = Kernel(
                shape, ("embed", None), nn.initializers.variance_scaling(1.0, "fan_in", "normal")
            )

    def __call__(self, tokens: Tokens, *, train: bool) -> Float[Array, "batch dim"]:
        """Float32 embeddings."""
        if self.embedding is T5Embedding.FIRST_DECODER_OUTPUT:
            pooled = self.first_decoder_output(tokens, train=train).astype(jnp.float32)
        else:
            hidden = self.encode(tokens, train=train).astype(jnp.float32)
            weight = jnp.asarray(tokens.mask)[..., None].astype(jnp.float32)
            pooled = (hidden * weight).sum(1) / jnp.maximum(weight.sum(1), 1.0)
        if self.projection_dim is not None:
            pooled = pooled @ self.projection_layer()
        return normalize(pooled, self.normalization)


class T5DualEncoder(nn.Module):
    """Queries and passages to embeddings whose dot product is their score; none is scaled.

    Parameters lie under `encoder` (tied), `query_encoder` or `query_encoder_<task>`, and
    `passage_encoder`.
    """

    config: T5DualEncoderConfig

    def setup(self) -> None:
        """Makes the towers."""
        config = self.config
        for name in config.tower_names:
            tower = T5Tower(
                config.t5,
                embedding=config.embedding,
                projection_dim=config.projection_dim,
                normalization=config.normalization,
            )
            setattr(self, name, tower)

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
            role: picks the tower, while tracing.
            task: the task's name; picks the query tower where tasks have their own.
            train: True drops, from the rng "dropout".

        Raises:
            ConfigError: a query of a task without a tower.
        """
        config = self.config
        tower = getattr(self, tower_name(config.towers, config.query_tasks, role, task))
        return Encoded(tower(tokens, train=train), None)

    def initial_params(self, params: Params) -> Params:
        """What `init_params` starts from: towers as copies or apart, rescaled if asked."""
        config = self.config
        if config.tower_init is TowerInit.COPIED:
            params = dict.fromkeys(config.tower_names, params[config.tower_names[-1]])
        return rescale(params, config.t5.initialization)
