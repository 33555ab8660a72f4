"""Dual encoders: the interface of their configurations, and one module with `encode` by role."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from typing import Any, ClassVar, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from taser_jax.models.batch import (
    Augmented,
    Batch,
    DocumentsShape,
    Embedded,
    Encoded,
    EncoderInput,
    Normalization,
    Role,
    States,
    Tokens,
    sizes_of,
)
from taser_jax.models.layers import TransformerConfig
from taser_jax.models.stack import Remat
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Checked

# The smallest squared norm divided by: a zero vector stays zero.
_SMALLEST_SQUARE = 1e-24

Params: TypeAlias = PyTree


class Towers(enum.Enum):
    """One encoder for both roles (TASER, Shared), or one for each (DPR)."""

    TIED = "tied"
    SEPARATE = "separate"


def normalize(
    embeddings: Float[Array, "batch dim"], normalization: Normalization
) -> Float[Array, "batch dim"]:
    """Divides embeddings by their L2 norms, if configured; zeros stay zeros."""
    if normalization is Normalization.NONE:
        return embeddings
    square = jnp.square(embeddings).sum(-1, keepdims=True)
    return embeddings * jax.lax.rsqrt(jnp.maximum(square, _SMALLEST_SQUARE))


@dataclasses.dataclass(frozen=True)
class Description:
    """A model described in words, for its model card.

    Attributes:
        title: its common name, such as "DPR".
        embedding: a sentence about the embedding.
        first_token: the token before a text's tokens, with a space.
        last_token: the token after them, with a space.
        facts: (name, value) pairs that are not in model.json.
    """

    title: str
    embedding: str
    first_token: str
    last_token: str
    facts: tuple[tuple[str, str], ...] = ()


class ModelConfig(Checked, abc.ABC):
    """The interface of all dual encoders' configurations, so that callers need not know the system.

    Subclasses are frozen dataclasses; `DualEncoder` builds their models.

    Attributes:
        kind: name of the class in model.json.
        stack: field with the sizes and numerics of a tower.
        fuses: whether queries may come with documents.
        towers: one encoder for both roles, or one each.
        query_tasks: tasks with their own query tower (TACO-DR's QSpec); empty for one tower for
            all queries. Needs separate towers; passages have one tower for all tasks.
        normalization: normalisation of embeddings.
    """

    kind: ClassVar[str]
    stack: ClassVar[str]
    fuses: ClassVar[bool] = False
    towers: Towers
    query_tasks: tuple[str, ...]
    normalization: Normalization

    def __post_init__(self) -> None:
        """Checks the towers.

        Raises:
            ConfigError: `query_tasks` that repeat a name, or that are given with tied towers.
        """
        super().__post_init__()
        where = type(self).__name__
        if self.query_tasks and self.towers is Towers.TIED:
            problem = f"{len(self.query_tasks)} query_tasks with tied towers"
            fix = "set towers='separate' for a query tower per task, or no query_tasks"
            raise ConfigError(problem, where=where, fix=fix)
        names = set(self.query_tasks)
        is_text = isinstance(self.query_tasks, str)
        if is_text or len(names) < len(self.query_tasks) or any(not n or "/" in n for n in names):
            problem = f"query_tasks are {self.query_tasks!r}"
            raise ConfigError(problem, where=where, fix="give distinct task names without a slash")

    @property
    def transformer(self) -> TransformerConfig:
        """Sizes and numerics of a tower."""
        return cast(TransformerConfig, getattr(self, self.stack))

    def with_transformer(self, **changes: Any) -> ModelConfig:
        """The same model with changed fields of `transformer`."""
        config: Any = self
        changed = dataclasses.replace(config.transformer, **changes)
        return cast(ModelConfig, dataclasses.replace(config, **{self.stack: changed}))

    def portable(self) -> ModelConfig:
        """The same model at inference, without options for training or for some platforms only."""
        return self.with_transformer(remat=Remat.NONE)

    @property
    @abc.abstractmethod
    def embedding_dim(self) -> int:
        """Width of the embeddings."""

    @property
    def max_length(self) -> int | None:
        """Rows of the position table; None if positions are relative."""
        return None

    @abc.abstractmethod
    def block_flops(self, length: int) -> list[int]:
        """Model FLOPs of each block for one text of `length` tokens, padding included.

        They are those of matrix products, of one expert per token; a product of [m, k] and [k, n]
        counts 2·m·k·n.
        """

    def query_flops(self, length: int, memory: DocumentsShape | None) -> list[int]:
        """The same of a query with its documents; blocks that only fusion has come last."""
        del memory
        return self.block_flops(length)

    def documents_shape(self, per_query: int, length: int) -> DocumentsShape:
        """The shape of the documents of queries that have `per_query` of them.

        Raises:
            ConfigError: the model cannot take documents.
        """
        del per_query, length
        raise self.no_fusion()

    def no_fusion(self) -> ConfigError:
        """The error to raise if a model that does not fuse is given documents."""
        problem = "queries come with documents of a memory, and this model fuses none"
        fix = "train one of models/t5_fusion.gin or models/bert_fusion.gin"
        return ConfigError(problem, where=type(self).__name__, fix=fix)

    @abc.abstractmethod
    def describe(self) -> Description:
        """The model in words."""

    @abc.abstractmethod
    def make_tower(self, frozen_blocks: int = 0) -> nn.Module:
        """One tower, whose first `frozen_blocks` blocks are frozen.

        Its method `embed(texts, *, role, train)` gives what `DualEncoder.encode` gives, and
        `frozen_states(tokens, *, role)` the output of the frozen blocks, [batch, length, embed].
        """

    @abc.abstractmethod
    def frozen_parameters(self, blocks: int) -> str:
        """Regular expression of the parameters that are frozen with the first `blocks` blocks."""

    def frozen_settings(self, blocks: int) -> tuple[object, ...]:
        """The settings, besides parameters, that the output of the frozen blocks depends on."""
        del blocks
        return (self.transformer,)

    def initial_params(self, params: Params) -> Params:
        """The initial parameters: every tower is a copy of the first one's draw.

        DPR's towers both start from the same BERT. From scratch this is the counterpart: a word has
        the same meaning on both sides from the first step.
        """
        return dict.fromkeys(self.tower_names, params[self.tower_names[0]])

    @property
    def tower_names(self) -> tuple[str, ...]:
        """Names of the towers in the parameter tree, queries' first.

        Example:
            >>> DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever")).tower_names
            ('query_encoder_nq', 'query_encoder_fever', 'passage_encoder')
        """
        if self.towers is Towers.TIED:
            return ("encoder",)
        queries = [f"query_encoder_{task}" for task in self.query_tasks] or ["query_encoder"]
        return (*queries, "passage_encoder")

    def tower_name(self, role: Role, task: str | None) -> str:
        """Name of the tower that encodes a text.

        Args:
            role: the text's role.
            task: the text's task; matters only for queries, and only if tasks have towers.

        Raises:
            ConfigError: a query of a task without a tower.
        """
        if self.towers is Towers.TIED:
            return "encoder"
        if role is Role.PASSAGE:
            return "passage_encoder"
        if not self.query_tasks:
            return "query_encoder"
        if task not in self.query_tasks:
            problem = "a query without a task" if task is None else f"a query of task {task!r}"
            fix = f"give --gin.ask.task or export_model.task, one of {', '.join(self.query_tasks)}"
            raise ConfigError(problem, where="encode", fix=fix)
        return f"query_encoder_{task}"

    def training_flops(
        self, batch: Batch, *, frozen_blocks: int = 0, has_states: bool = False
    ) -> int:
        """Model FLOPs of a training step: three forward passes (the backward pass costs two).

        This is the numerator of MFU: rematerialisation and experts whose output is masked do not
        count. The score matrix of queries x passages is included.

        Args:
            batch: its arrays, or their shapes.
            frozen_blocks: number of first blocks, which have no backward pass.
            has_states: whether their output is read from disk, so that they have no forward pass
                either.
        """
        flops = 3 * 2 * len(batch.query_rows) * len(batch.passage_rows) * self.embedding_dim
        of_query = functools.partial(self.query_flops, memory=batch.memory)
        for texts, blocks_of in ((batch.queries, of_query), (batch.passages, self.block_flops)):
            for size, length in sizes_of(texts):
                # Embeddings in place of passages have no length.
                blocks = blocks_of(length) if length else []
                below, above = sum(blocks[:frozen_blocks]), sum(blocks[frozen_blocks:])
                flops += size * (3 * above + (0 if has_states else below))
        return flops


class DualEncoder(nn.Module):
    """Maps queries and passages to embeddings, whose dot products are the scores.

    Parameters are under `encoder` (tied), or under `query_encoder` or `query_encoder_<task>`, and
    `passage_encoder`. The embeddings and the first `frozen_blocks` blocks of each tower run as at
    inference, without gradients; texts may then be given as `States`.

    Example:
        >>> encoded = model.apply(
        ...     {"params": params}, tokens, role=Role.QUERY, train=True,
        ...     rngs={"dropout": key1, "routing": key2}, method="encode")
    """

    config: ModelConfig
    frozen_blocks: int = 0

    def setup(self) -> None:
        """Creates the towers."""
        for name in self.config.tower_names:
            setattr(self, name, self.config.make_tower(self.frozen_blocks))

    @property
    def dtype(self) -> str:
        """In which its blocks multiply."""
        return self.config.transformer.dtype

    @property
    def query_tasks(self) -> tuple[str, ...]:
        """Tasks that `encode` distinguishes; empty if one program serves all tasks."""
        return self.config.query_tasks

    def __call__(self, queries: Tokens, passages: Tokens) -> tuple[Encoded, Encoded]:
        """Encodes both roles; `init` calls this. Queries count as those of the first task."""
        task = next(iter(self.config.query_tasks), None)
        of_queries = self.encode(queries, role=Role.QUERY, task=task)
        return of_queries, self.encode(passages, role=Role.PASSAGE)

    def states(self, tokens: Tokens, *, role: Role, task: str | None = None) -> States:
        """The frozen blocks' output for texts of one role, an input that `encode` accepts too."""
        tower = getattr(self, self.config.tower_name(role, task))
        return States(tower.frozen_states(tokens, role=role), tokens.mask)

    def encode(
        self, tokens: EncoderInput, *, role: Role, task: str | None = None, train: bool = False
    ) -> Encoded:
        """Encodes texts of one role.

        Args:
            tokens: ids and mask [batch, length]; or states of the frozen blocks; or the embeddings
                of a frozen tower, which are returned as they are; or, if the model fuses documents,
                queries with the documents of a memory.
            role: selects the tower, and Det-R's expert, during tracing.
            task: the task's name; selects the query tower if tasks have their own.
            train: True enables dropout and routing draws, from the rngs "dropout" and "routing".

        Returns:
            Float32 embeddings and routing statistics.

        Raises:
            ConfigError: a query of a task without a tower, or documents for a model without fusion.
        """
        if isinstance(tokens, Embedded):
            return Encoded(jnp.asarray(tokens.embeddings, jnp.float32), None)
        if isinstance(tokens, Augmented) and not self.config.fuses:
            raise self.config.no_fusion()
        tower = getattr(self, self.config.tower_name(role, task))
        return tower.embed(tokens, role=role, train=train)
