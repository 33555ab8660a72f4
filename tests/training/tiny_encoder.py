"""A small dual encoder with dropout and a noisy router, and batches for it."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.models.batch import Batch, Role, Tokens
from taser_jax.models.encoded import RoutingStatistics

VOCAB = 50


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Encoded:
    embeddings: Any
    routing: Any


class TinyEncoder(nn.Module):
    dim: int = 8
    hidden: int = 16
    dropout: float = 0.2
    routed: bool = True
    query_tasks: tuple[str, ...] = ()

    @nn.compact
    def encode(self, tokens: Tokens, *, role: Role, task: str | None = None, train: bool = False):
        x = nn.Embed(VOCAB, self.dim, name="embeddings")(tokens.ids)
        x = x + (0.1 if role is Role.QUERY else -0.1)
        x = nn.gelu(nn.Dense(self.hidden, name="wi")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        weight = tokens.mask[..., None].astype(jnp.float32)
        x = (x * weight).sum(1) / weight.sum(1)
        if not self.routed:
            return Encoded(nn.Dense(self.dim, name="wo")(x), None)
        logits = nn.Dense(2, name="router")(x)
        p = nn.softmax(logits)
        if train:
            logits = logits + jax.random.gumbel(self.make_rng("routing"), logits.shape)
        choice = jax.nn.one_hot(jnp.argmax(logits, -1), 2)
        gate = choice + p - jax.lax.stop_gradient(p)
        outputs = jnp.stack([nn.Dense(self.dim, name=f"wo_{e}")(x) for e in range(2)], 1)
        sums = RoutingStatistics(
            probability_sum=p.sum(0)[None],
            entropy_sum=-(p * jnp.log(p)).sum()[None],
            choice_count=choice.sum(0)[None],
            count=jnp.full((1,), float(len(p))),
            logit_sum=jnp.zeros((1, 2)),
            logit_square_sum=jnp.zeros((1, 2)),
        )
        return Encoded((outputs * gate[..., None]).sum(1), sums)


def init(model: TinyEncoder, key: jax.Array, *, length: int = 5):
    tokens = Tokens(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))
    return model.init(key, tokens, role=Role.QUERY, method="encode")["params"]


def make_batch(queries: int = 16, negatives: int = 1, length: int = 5, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    passages = queries * (1 + negatives)

    def tokens(n: int) -> Tokens:
        lengths = rng.integers(1, length + 1, size=(n, 1))
        mask = np.arange(length)[None] < lengths
        ids = np.where(mask, rng.integers(1, VOCAB, size=(n, length)), 0)
        return Tokens(ids.astype(np.int32), mask)

    return Batch(
        queries=tokens(queries),
        passages=tokens(passages),
        positive_index=np.arange(queries, dtype=np.int32) * (1 + negatives),
        ignore=np.zeros((queries, passages), bool),
        query_rows=np.arange(queries, dtype=np.int32),
        passage_rows=np.arange(passages, dtype=np.int32),
    )
