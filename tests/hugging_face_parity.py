"""Our parameters and hidden states beside Hugging Face's."""

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.interop.t5 import t5_leaves
from taser_jax.interop.tensors import params_to_tensors
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertEncoder, Block, Embeddings


def t5_to_tensors(params, config):
    """A T5's tensors by Hugging Face's names."""
    return params_to_tensors(params, t5_leaves(config))


def hidden_states(params, config, ids, mask):
    """Embeddings, then the output of every block. [states, batch, length, embed]"""
    encoder = BertEncoder(config)

    def run(params, tokens):
        _, state = encoder.apply(
            {"params": params},
            tokens,
            role=Role.QUERY,
            capture_intermediates=lambda module, _: isinstance(module, Block | Embeddings),
            mutable=["intermediates"],
        )
        return state["intermediates"]

    tokens = Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
    states = jax.jit(run)(jax.tree.map(jnp.asarray, params), tokens)
    blocks = [states[f"layers_{i}"]["__call__"][0][0] for i in range(config.num_layers)]
    return np.stack([states["embeddings"]["__call__"][0], *blocks])


def last_states(params, config, ids, mask):
    """What the encoder returns. [batch, length, embed]"""

    @jax.jit
    def run(params, tokens):
        return BertEncoder(config).apply({"params": params}, tokens, role=Role.QUERY)[0]

    return np.asarray(run(params, Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))))


def relative_error(found, expected, mask=None):
    """The largest |found - expected| / |expected| of any vector at a real token."""
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return (error if mask is None else error[..., np.asarray(mask)]).max()
