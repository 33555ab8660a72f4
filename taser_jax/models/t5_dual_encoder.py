"""T5 as a dual encoder: ST5-EncDec, mean pooling, and a query encoder for each task."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from taser_jax.models.batch import Augmented, Encoded, Normalization, Role, States, Tokens
from taser_jax.models.bert import EncoderOutput
from taser_jax.models.dual_encoder import Description, ModelConfig, Params, Towers, normalize
from taser_jax.models.layers import Kernel, mean_over_tokens
from taser_jax.models.stack import layer_names
from taser_jax.models.t5 import T5, T5Config, decoder_flops, rescale
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Positive


class T5Embedding(enum.Enum):
    """Which output of T5 is the embedding.

    FIRST_DECODER_OUTPUT is ST5-EncDec (Ni et al., 2022), TACO-DR's encoder: the decoder's output
    for its start token. ENCODER_MEAN is the mean of the encoder's states over real tokens, as
    in T5X's dual encoders; there is then no decoder.
    """

    FIRST_DECODER_OUTPUT = "first_decoder_output"
    ENCODER_MEAN = "encoder_mean"


class T5Tower(T5):
    """T5, its pooling, and the projection (`projection_layer/kernel`)."""

    embedding: T5Embedding = T5Embedding.FIRST_DECODER_OUTPUT
    projection_dim: int | None = None
    normalization: Normalization = Normalization.NONE

    def setup(self) -> None:
        """Creates T5 and the projection."""
        super().setup()
        if self.projection_dim is not None:
            shape = (self.config.embed_dim, self.projection_dim)
            self.projection_layer = Kernel(
                shape, ("embed", None), nn.initializers.variance_scaling(1.0, "fan_in", "normal")
            )

    def frozen_states(self, tokens: Tokens, *, role: Role) -> jax.Array:
        """The output of the frozen blocks; the role makes no difference."""
        del role
        return self.encode(tokens, output=EncoderOutput.FROZEN)

    def embed(self, tokens: Tokens | States | Augmented, *, role: Role, train: bool) -> Encoded:
        """Float32 embeddings; the role makes no difference."""
        del role
        if self.embedding is T5Embedding.FIRST_DECODER_OUTPUT:
            pooled = self.first_decoder_output(tokens, train=train).astype(jnp.float32)
        else:
            assert not isinstance(tokens, Augmented)
            pooled = mean_over_tokens(self.encode(tokens, train=train), jnp.asarray(tokens.mask))
        if self.projection_dim is not None:
            pooled = pooled @ self.projection_layer()
        return Encoded(normalize(pooled, self.normalization), None)


@dataclasses.dataclass(frozen=True)
class T5DualEncoderConfig(ModelConfig):
    """Configuration of a T5 dual encoder.

    Example:
        >>> taco_dr = T5DualEncoderConfig()
        >>> q_spec = T5DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))

    Attributes:
        t5: the encoder and decoder.
        towers: one for both roles, or one for each.
        query_tasks: tasks with their own query tower (TACO-DR's QSpec); empty for one tower for
            all queries. Needs separate towers; passages have one tower for all tasks.
        embedding: which output is the embedding.
        projection_dim: output width of a linear map without bias; None for no map.
        normalization: normalisation of embeddings.
        tower_class: the module of a tower.
    """

    kind: ClassVar[str] = "t5"
    stack: ClassVar[str] = "t5"
    # Unannotated, since Gin would take an annotated class as one to configure.
    tower_class = T5Tower

    t5: T5Config = dataclasses.field(default_factory=T5Config)
    towers: Towers = Towers.TIED
    query_tasks: tuple[str, ...] = ()
    embedding: T5Embedding = T5Embedding.FIRST_DECODER_OUTPUT
    projection_dim: Positive | None = None
    normalization: Normalization = Normalization.NONE

    def __post_init__(self) -> None:
        super().__post_init__()
        decoding = self.embedding is T5Embedding.FIRST_DECODER_OUTPUT
        if decoding and self.t5.num_decoder_layers == 0:
            problem = "num_decoder_layers is 0 with the first decoder output as embedding"
            fix = "set 1 or more, or embedding=ENCODER_MEAN to use an encoder alone"
            raise ConfigError(problem, where="T5DualEncoderConfig", fix=fix)

    @property
    def embedding_dim(self) -> int:
        """Width of the projection, or of the hidden states without one."""
        return self.projection_dim or self.t5.embed_dim

    def block_flops(self, length: int) -> list[int]:
        """Model FLOPs of each block for one text; the projection counts as a block.

        An encoder block on L tokens, width d, joined head width a = heads·kv, inner width
        f, m kernels in the feed-forward (2, or 3 if gated):
            2·L·d·a·4 (query, key, value, out) + 2·L·L·a·2 (scores, values) + 2·L·d·f·m
        """
        t5 = self.t5
        embed, attention = t5.embed_dim, t5.num_heads * t5.head_dim
        feed_forward = 2 * embed * t5.mlp_dim * (len(t5.mlp_activations) + 1)
        encoder = length * (2 * 4 * embed * attention + 2 * 2 * length * attention + feed_forward)
        blocks = [encoder] * t5.num_layers
        if self.embedding is T5Embedding.FIRST_DECODER_OUTPUT:
            blocks += [decoder_flops(t5, length)] * t5.num_decoder_layers
        if self.projection_dim is not None:
            blocks.append(2 * embed * self.projection_dim)
        return blocks

    def describe(self) -> Description:
        """The model in words."""
        words = self.embedding.value.replace("_", " ")
        projected = "" if self.projection_dim is None else ", projected"
        return Description(
            title="T5 dual encoder",
            embedding=f"An embedding is the {words}{projected}.",
            first_token="",
            last_token=" </s>",
        )

    def make_tower(self, frozen_blocks: int = 0) -> T5Tower:
        """T5, the choice of output, and the projection."""
        return self.tower_class(
            self.t5,
            frozen_blocks,
            embedding=self.embedding,
            projection_dim=self.projection_dim,
            normalization=self.normalization,
        )

    def frozen_parameters(self, blocks: int) -> str:
        """Regular expression of the paths of token embeddings, position biases and first blocks.

        The embeddings include that of the decoder's start token.
        """
        return rf"[^/]+/(token_embedder|encoder/(relpos_bias|{layer_names(blocks)}))/.*"

    def initial_params(self, params: Params) -> Params:
        """Every tower is a copy of one draw, at the scale of `T5Config.initialization`."""
        copies = dict.fromkeys(self.tower_names, params[self.tower_names[-1]])
        return rescale(copies, self.t5.initialization)
