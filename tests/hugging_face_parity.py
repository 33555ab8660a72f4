"""Our hidden states beside Hugging Face's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.batch import Role, Tokens
from taser_jax.models.bert import BertEncoder, Embeddings


def hidden_states(params, config, ids, mask):
    """Embeddings, then the output of every block: a stack cut there is that block's output.

    [states, batch, length, embed]
    """
    params = jax.tree.map(jnp.asarray, params)
    tokens = Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
    embeddings = Embeddings(config, deterministic=True)
    states = [embeddings.apply({"params": params["embeddings"]}, tokens.ids)]
    for count in range(1, config.num_layers + 1):
        encoder = BertEncoder(dataclasses.replace(config, num_layers=count))
        states.append(encoder.apply({"params": params}, tokens, role=Role.QUERY)[0])
    return np.stack(states)


def relative_error(found, expected, mask=None):
    """The largest |found - expected| / |expected| of any vector at a real token."""
    error = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return (error if mask is None else error[..., np.asarray(mask)]).max()
