"""Small encoders, one of them with dropout and a noisy router; batches and states for them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import one_block, tiny_bert

from taser_jax.models.batch import Encoded, Role, Tokens
from taser_jax.models.routing import ExpertConfig, routing_statistics, straight_through_gates

BERT = tiny_bert(num_layers=1)
T5 = one_block(dropout_rate=0.0)


def contrastive_oracle(scores, positive, ignore=None):
    """Each query's loss and the rank of its positive, one after another, in float64."""
    losses, ranks = [], []
    for i, line in enumerate(np.asarray(scores, np.float64)):
        ignored = np.zeros(len(line), bool) if ignore is None else ignore[i]
        counted = [j for j in range(len(line)) if j == positive[i] or not ignored[j]]
        losses.append(np.log(np.exp(line[counted]).sum()) - line[positive[i]])
        ranks.append(1 + sorted(counted, key=lambda j: (-line[j], j)).index(positive[i]))
    return np.array(losses), np.array(ranks)


class TinyEncoder(nn.Module):
    dim: int = 8
    hidden: int = 16
    dropout: float = 0.2
    routed: bool = True
    query_tasks: tuple[str, ...] = ()
    dtype: str = "float32"

    @nn.compact
    def encode(self, tokens: Tokens, *, role: Role, task: str | None = None, train: bool = False):
        x = nn.Embed(50, self.dim, name="embeddings")(tokens.ids)
        x = x + (0.1 if role is Role.QUERY else -0.1)
        x = nn.gelu(nn.Dense(self.hidden, name="wi")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        weight = tokens.mask[..., None].astype(jnp.float32)
        x = (x * weight).sum(1) / weight.sum(1)
        if not self.routed:
            return Encoded(nn.Dense(self.dim, name="wo")(x), None)
        logits = nn.Dense(2, name="router")(x)[:, None]
        key = self.make_rng("routing") if train else None
        gates = straight_through_gates(logits, ExpertConfig(), noise_key=key)
        outputs = jnp.stack([nn.Dense(self.dim, name=f"wo_{e}")(x) for e in range(2)], 2)
        sums = routing_statistics(logits, jnp.ones(logits.shape[:2], bool))
        return Encoded((outputs * gates).sum(2), jax.tree.map(lambda leaf: leaf[None], sums))


def init(model: TinyEncoder, key: jax.Array, *, length: int = 5):
    tokens = Tokens(jnp.zeros((1, length), jnp.int32), jnp.ones((1, length), bool))
    return model.init(key, tokens, role=Role.QUERY, method="encode")["params"]
