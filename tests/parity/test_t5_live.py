"""T5 against Hugging Face's PyTorch models, where PyTorch is installed: from their files."""

import pathlib
import sys

import numpy as np
import pytest
from t5_in_hugging_face import t5_to_json, t5_to_tensors
from t5_parity import assert_parity, outputs

from taser_jax.interop.t5 import t5_from_tensors
from taser_jax.interop.t5_configs import t5_config
from taser_jax.interop.tensors import read_tensors
from taser_jax.models.t5_layers import relative_position_bucket

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "golden"))
import make_t5_golden as hf


@pytest.mark.parametrize("kind", ["t5", "t5_1_1", "umt5"])
def test_saved_models_of_real_bucket_sizes(kind, tmp_path):
    sizes = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    model = hf.random_model(kind, seed=1, **sizes)
    model.save_pretrained(tmp_path)
    config = t5_config(tmp_path)
    assert (config.num_buckets, config.max_distance) == (32, 128)
    params = t5_from_tensors(read_tensors(tmp_path), config, where="live")
    # Long enough for every bucket, the one beyond 128 tokens too.
    ids, mask = hf.random_inputs(length=140, seed=1)
    found = outputs(config, params, ids, mask)
    assert_parity(found, hf.outputs(model, ids, mask), mask)


def test_hugging_face_reads_what_we_write(tmp_path):
    import torch
    import transformers

    model = hf.random_model("t5_1_1", seed=2)
    model.save_pretrained(tmp_path)
    config = t5_config(tmp_path)
    tensors = t5_to_tensors(t5_from_tensors(read_tensors(tmp_path), config, where="live"), config)
    again = transformers.T5Model(transformers.T5Config(**t5_to_json(config)))
    state = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
    missing, unexpected = again.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    ids, mask = hf.random_inputs(length=9)
    for found, expected in zip(
        hf.outputs(again.eval(), ids, mask), hf.outputs(model, ids, mask), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 12), (4, 128)])
def test_every_distance_has_hugging_faces_bucket(num_buckets, max_distance):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-1100, 1101)
    expected = T5Attention._relative_position_bucket(
        torch.tensor(distance), num_buckets=num_buckets, max_distance=max_distance
    )
    found = relative_position_bucket(distance, num_buckets=num_buckets, max_distance=max_distance)
    np.testing.assert_array_equal(found, expected.numpy())
