"""BERT as a dual encoder: DPR, TASER and Shared."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from taser_jax.models.batch import Augmented, Encoded, Normalization, Role, States, Tokens
from taser_jax.models.bert import BertEncoder, EncoderOutput, block_output
from taser_jax.models.bert_config import AttentionKernel, BertConfig
from taser_jax.models.dual_encoder import Description, ModelConfig, Towers, normalize
from taser_jax.models.layers import mean_over_tokens
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.models.stack import layer_names
from taser_jax.storage.errors import ConfigError


class Pooling(enum.Enum):
    """How hidden states become an embedding: [CLS], the mean over real tokens, or the last one."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "lasttoken"

    @property
    def positions(self) -> EncoderOutput:
        """Those that it reads."""
        is_first = self is Pooling.CLS
        return EncoderOutput.FIRST_TOKEN if is_first else EncoderOutput.ALL_TOKENS


_POOLED = {
    Pooling.CLS: "the hidden state of [CLS]",
    Pooling.MEAN: "the mean of hidden states",
    Pooling.LAST: "the hidden state of the last token",
}


class BertTower(BertEncoder):
    """BERT and its pooling."""

    pooling: Pooling = Pooling.CLS
    normalization: Normalization = Normalization.NONE

    def frozen_states(self, tokens: Tokens, *, role: Role) -> jax.Array:
        """The output of the frozen blocks."""
        return self(tokens, role=role, output=EncoderOutput.FROZEN)[0]

    def embed(self, texts: Tokens | States | Augmented, *, role: Role, train: bool) -> Encoded:
        """Pools BERT's hidden states."""
        assert not isinstance(texts, Augmented)
        hidden, statistics = self(texts, role=role, train=train, output=self.pooling.positions)
        pooled = self.pool(hidden, jnp.asarray(texts.mask))
        return Encoded(normalize(pooled, self.normalization), statistics)

    def pool(
        self, hidden: Float[Array, "batch positions embed"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch embed"]:
        """One float32 vector per text; [CLS] pooling reads the first position only."""
        if self.pooling is Pooling.CLS:
            return hidden[:, 0].astype(jnp.float32)
        if self.pooling is Pooling.LAST:
            # A sum, since exported programs have no gather by row.
            is_last = jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1
            return jnp.where(is_last[..., None], hidden.astype(jnp.float32), 0.0).sum(1)
        return mean_over_tokens(hidden, mask)


@dataclasses.dataclass(frozen=True)
class DualEncoderConfig(ModelConfig):
    """Configuration of a BERT dual encoder.

    Example:
        >>> dpr = DualEncoderConfig(towers=Towers.SEPARATE)
        >>> taser = DualEncoderConfig(experts=ExpertConfig(num_experts=2))
        >>> shared = DualEncoderConfig()
        >>> q_spec = DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))

    Attributes:
        bert: the encoder.
        experts: its specialised blocks.
        towers: one encoder or two.
        pooling: [CLS], mean or last token.
        normalization: normalisation of embeddings: none in the papers; L2 for encoders pretrained
            with cosine similarity, with a temperature of about 0.05.
        query_tasks: tasks with their own query tower (TACO-DR's QSpec); empty for one tower
            for all queries. Needs separate towers; passages have one tower for all tasks.
    """

    kind: ClassVar[str] = "bert"
    stack: ClassVar[str] = "bert"

    bert: BertConfig = dataclasses.field(default_factory=BertConfig)
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    towers: Towers = Towers.TIED
    pooling: Pooling = Pooling.CLS
    normalization: Normalization = Normalization.NONE
    query_tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        by_role = self.experts.routing is Routing.DETERMINISTIC
        if self.towers is Towers.SEPARATE and self.experts.num_experts > 1 and by_role:
            problem = "in separate towers, experts chosen by role would leave half of them unused"
            fix = "set towers='tied' (TASER) or num_experts=1 (DPR)"
            raise ConfigError(problem, where="DualEncoderConfig", fix=fix)
        self.experts.specialized_blocks(self.bert.num_layers)

    def portable(self) -> ModelConfig:
        """The model with the attention kernel that runs everywhere, and without rematerialisation.

        Values agree to rounding.
        """
        return super().portable().with_transformer(attention=AttentionKernel.EINSUM)

    @property
    def embedding_dim(self) -> int:
        """Width of the hidden states."""
        return self.bert.embed_dim

    @property
    def max_length(self) -> int:
        """Maximum tokens of a text."""
        return self.bert.max_length

    def block_flops(self, length: int) -> list[int]:
        """Model FLOPs of each block for one text.

        A block on all L tokens, width d, joined head width a = heads·kv, inner width f:
            2·L·d·a·3 (query, key, value) + 2·L·L·a·2 (scores, values) + 2·L·a·d (out) + 2·L·d·f·2
        A gate adds 2·L·d·f. Local attention counts all L·L scores, as it computes them.
        With [CLS] pooling the last block computes 1 query instead of L; only its keys and values
        are over all tokens. A learned router adds 2·d·I per choice.
        """
        bert, experts = self.bert, self.experts
        embed, attention = bert.embed_dim, bert.num_heads * bert.head_dim
        specialized = experts.specialized_blocks(bert.num_layers)
        blocks, output = [], self.pooling.positions
        for block in range(1, bert.num_layers + 1):
            is_first = block_output(bert, experts, block, output) is EncoderOutput.FIRST_TOKEN
            queries = 1 if is_first else length
            flops = 2 * embed * attention * (2 * queries + 2 * length)
            flops += 2 * 2 * queries * length * attention
            if block in specialized and experts.learned:
                choices = queries if experts.routing is Routing.TOKEN else 1
                flops += 2 * embed * experts.num_experts * choices
            kernels = 3 if bert.traits.gated else 2
            blocks.append(flops + 2 * kernels * queries * embed * bert.mlp_dim)
        return blocks

    def describe(self) -> Description:
        """The model in words."""
        bert = self.bert
        title = "DPR" if self.towers is Towers.SEPARATE else "Shared encoder"
        blocks = self.experts.specialized_blocks(bert.num_layers)
        facts = [
            ("encoder", f"{bert.family.name}, {bert.num_layers} blocks of width {bert.embed_dim}"),
            ("specialised blocks", ", ".join(map(str, blocks)) or "none"),
        ]
        if blocks:
            routing = f"{self.experts.routing.value} routing"
            facts.append(("experts", f"{self.experts.num_experts}, by {routing}"))
        return Description(
            title="TASER" if blocks else title,
            embedding=f"An embedding is {_POOLED[self.pooling]}; all tokens are of segment 0.",
            first_token="[CLS] ",
            last_token=" [SEP]",
            facts=tuple(facts),
        )

    def make_tower(self, frozen_blocks: int = 0) -> BertTower:
        """BERT with its specialised blocks."""
        pooled = self.pooling, self.normalization
        return BertTower(self.bert, self.experts, frozen_blocks, *pooled)

    def frozen_parameters(self, blocks: int) -> str:
        """Regular expression of the paths of embeddings, relative positions and the first blocks.

        Raises:
            ConfigError: frozen and trained blocks share a router.
        """
        experts = self.experts
        frozen = [b for b in experts.specialized_blocks(self.bert.num_layers) if b <= blocks]
        if experts.learned and experts.gate_sharing is GateSharing.SHARED and frozen:
            problem = f"blocks {', '.join(map(str, frozen))} are frozen; their router serves all"
            fix = f"train_from_block={frozen[0] - 1} or less, or ExpertConfig.gate_sharing"
            raise ConfigError(problem, where="TrainingConfig.train_from_block", fix=fix)
        return rf"[^/]+/(embeddings|relative_bias|{layer_names(blocks)})/.*"

    def frozen_settings(self, blocks: int) -> tuple[object, ...]:
        """BERT's settings, and those of the experts if a frozen block is specialised.

        Models that differ only above their frozen blocks can share cached states.
        """
        specialized = self.experts.specialized_blocks(self.bert.num_layers)
        has_experts = min(specialized, default=blocks + 1) <= blocks
        return (self.bert, self.experts) if has_experts else (self.bert,)
