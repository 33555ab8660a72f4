"""Small encoders, one of them with dropout and a noisy router; batches and states for them."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Batch, Role, RoutingStatistics, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.parameters import abstract_params, init_params, logical_axes
from taser_jax.models.t5 import T5Config
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.training.state import init_state

VOCAB = 50
# Without dropout: its random bits are most of the compilation time of these models.
BERT = BertConfig(
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    max_length=9,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
)
T5 = T5Config(
    vocab_size=VOCAB,
    embed_dim=16,
    num_layers=1,
    num_decoder_layers=1,
    num_heads=2,
    head_dim=6,
    mlp_dim=24,
    dropout_rate=0.0,
)


def adamw(model, **changes):
    config = OptimizerConfig(**{"learning_rate": 3e-3} | changes)
    return build_optimizer(config, abstract_params(model), total_steps=10)


def on_mesh(model, optimizer, config=None, num_devices=8):
    """A partitioner over some devices, the model's first state there, and its shardings."""
    mesh = make_mesh(config or MeshConfig(), devices=jax.devices()[:num_devices])
    partitioner = Partitioner(mesh)
    state = init_state(
        functools.partial(init_params, model),
        optimizer,
        jax.random.key(0),
        param_shardings=partitioner.param_shardings(logical_axes(model), abstract_params(model)),
    )
    return partitioner, state, jax.tree.map(lambda leaf: leaf.sharding, state)


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
    dtype: str = "float32"

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
