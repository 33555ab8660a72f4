"""T5 against Hugging Face's PyTorch models, where PyTorch is installed: from their files."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_parity import assert_close, assert_t5_parity, t5_outputs

from taser_jax.interop.t5 import t5_config, t5_from_tensors
from taser_jax.interop.tensors import read_tensors
from taser_jax.models.batch import Augmented, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import T5FusionConfig, encode_with_attention

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "golden"))
import make_t5_golden as hf

pytestmark = pytest.mark.slow


def read_back(model, directory):
    """Our configuration and parameters, from what transformers saves."""
    model.save_pretrained(directory)
    config = t5_config(directory)
    return config, t5_from_tensors(read_tensors(directory), config, where="live")


@pytest.mark.parametrize(
    "kind", ["umt5", *(pytest.param(kind, marks=pytest.mark.release) for kind in ("t5", "t5_1_1"))]
)
def test_saved_models_of_real_bucket_sizes(kind, tmp_path):
    sizes = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    model = hf.random_model(kind, seed=1, **sizes)
    config, params = read_back(model, tmp_path)
    assert (config.num_buckets, config.max_distance) == (32, 128)
    # Long enough for every bucket, the one beyond 128 tokens too.
    ids, mask = hf.random_inputs(length=140, seed=1)
    outputs = t5_outputs(config, params, ids, mask)
    assert_t5_parity(outputs, hf.outputs(model, ids, mask), mask)


def test_fused_queries_are_a_decoder_over_joined_encoder_outputs(tmp_path):
    """Fusion-in-Decoder's way: segments encoded apart, their states given as one text's."""
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    model = hf.random_model("t5", seed=3)
    config, params = read_back(model, tmp_path)
    query_ids, query_mask = (array[:2] for array in hf.random_inputs(length=6, seed=4))
    ids, mask = hf.random_inputs(length=9, seed=5)
    present = np.array([[True, True], [True, False]])
    texts = Augmented(
        Tokens(query_ids, query_mask), Tokens(ids.reshape(2, 2, 9), mask.reshape(2, 2, 9)), present
    )
    fusion = DualEncoder(T5FusionConfig(t5=config))
    params = jax.tree.map(jnp.asarray, {"encoder": params})
    embeddings, attention = encode_with_attention(fusion, params, texts)

    def states(ids, mask):
        return model.encoder(
            input_ids=torch.tensor(ids, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
        ).last_hidden_state

    with torch.no_grad():
        documents = states(ids, mask).reshape(2, 18, -1)
        joined = torch.cat([states(query_ids, query_mask), documents], dim=1)
        of_documents = (mask.reshape(2, 2, 9) & present[..., None]).reshape(2, 18)
        real = np.concatenate([query_mask, of_documents], axis=1)
        model.set_attn_implementation("eager")
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=joined),
            attention_mask=torch.tensor(real, dtype=torch.long),
            decoder_input_ids=torch.zeros((2, 1), dtype=torch.long),
            output_attentions=True,
        )
    assert_close(np.asarray(embeddings), output.last_hidden_state[:, 0].numpy())
    probabilities = torch.stack(output.cross_attentions)[:, :, :, 0].sum((0, 2)).numpy()
    expected = np.stack([part.sum(1) for part in np.split(probabilities, [6, 15], axis=1)], axis=1)
    np.testing.assert_allclose(attention, expected, atol=1e-4)
