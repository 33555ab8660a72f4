"""Our parameters and hidden states beside Hugging Face's."""

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.interop.t5 import t5_leaves
from taser_jax.interop.tensors import params_to_tensors
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertEncoder, Block, Embeddings
from taser_jax.models.t5 import T5


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


def relative_error(actual, expected, mask=None):
    """The largest |actual - expected| / |expected| of any vector at a real token."""
    error = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return (error if mask is None else error[..., np.asarray(mask)]).max()


def t5_outputs(config, params, ids, mask):
    """Our encoder's states and first decoder output."""

    def apply(params, tokens, method):
        return T5(config).apply({"params": params}, tokens, method=method)

    run = jax.jit(apply, static_argnums=2)
    tokens = Tokens(np.asarray(ids), np.asarray(mask))
    return run(params, tokens, "encode"), run(params, tokens, "first_decoder_output")


def assert_close(actual, expected):
    """1e-4 relative to the largest number."""
    assert np.abs(expected).max() > 0.1
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()
