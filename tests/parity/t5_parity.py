"""What golden and live parity tests of T5 share."""

import jax
import numpy as np

from taser_jax.models.batch import Tokens
from taser_jax.models.t5 import T5


def outputs(config, params, ids, mask):
    """Our encoder's states and first decoder output."""

    def apply(params, tokens, method):
        return T5(config).apply({"params": params}, tokens, method=method)

    run = jax.jit(apply, static_argnums=2)
    tokens = Tokens(np.asarray(ids), np.asarray(mask))
    return run(params, tokens, "encode"), run(params, tokens, "first_decoder_output")


def assert_parity(found, expected, mask):
    """1e-4 relative to the largest number; states under the padding mean nothing."""
    (states, decoded), (expected_states, expected_decoded) = found, expected
    assert_close(np.asarray(states)[mask], expected_states[mask])
    assert_close(np.asarray(decoded), expected_decoded)


def assert_close(found, expected):
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
