"""A real T5X dual encoder, written by T5X itself."""

import numpy as np
import pytest

from taser_jax.interop.t5x import is_t5x_checkpoint, read_t5x_checkpoint


@pytest.fixture(scope="module")
def directory(shared_data):
    return shared_data / "t5x_checkpoint" / "test_de_t5_tiny.checkpoint_1000"


def test_arrays_and_step(directory):
    assert is_t5x_checkpoint(directory)
    found = read_t5x_checkpoint(directory)
    assert found.step == 1000
    assert found.target.keys() == {"encoder", "projection_layer", "token_embedder"}
    assert found.target["token_embedder"]["embedding"].shape == (32128, 4)
    scale = found.target["encoder"]["encoder_norm"]["scale"]
    np.testing.assert_allclose(scale, [1.110984, 0.9813192, 0.8854417, 0.9886455], atol=1e-6)
