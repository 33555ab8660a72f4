"""T5 against outputs of Hugging Face's PyTorch models, stored: needs no PyTorch."""

import pathlib

import numpy as np
import pytest
from hugging_face_parity import assert_t5_parity, t5_outputs, t5_to_tensors

from taser_jax.interop.t5 import t5_config, t5_from_tensors

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("kind", ["t5", "1_1", "umt5"])
def test_hugging_face_outputs_and_weights_back(kind, tmp_path):
    golden = np.load(GOLDEN / f"t5_{kind}.npz")
    (tmp_path / "config.json").write_text(str(golden["config"]))
    tensors = {n.removeprefix("tensor/"): golden[n] for n in golden if n.startswith("tensor/")}
    config = t5_config(tmp_path)
    params = t5_from_tensors(tensors, config, where="golden")
    mask = golden["mask"]
    assert not mask.all()
    outputs = t5_outputs(config, params, golden["ids"], mask)
    assert_t5_parity(outputs, (golden["encoded"], golden["decoded"]), mask)

    back = t5_to_tensors(params, config)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
