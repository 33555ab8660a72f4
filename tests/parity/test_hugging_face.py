"""BERT, its relatives and a T5 that fuses documents, beside Hugging Face's PyTorch models, live."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_parity import assert_close, last_states, relative_error
from safetensors.numpy import save_file

from taser_jax.interop.bert import bert_leaves, encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config, config_to_json
from taser_jax.interop.t5 import t5_config, t5_from_tensors
from taser_jax.interop.tensors import params_to_tensors, read_tensors
from taser_jax.models.batch import Augmented, Tokens
from taser_jax.models.bert_config import Family
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.fusion import T5FusionConfig, encode_with_attention
from taser_jax.storage.errors import DataError

torch = pytest.importorskip("torch", reason="PyTorch is an optional extra")
transformers = pytest.importorskip("transformers", reason="an optional extra")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "golden"))
import make_bert_golden as hf  # noqa: E402
import make_t5_golden as t5  # noqa: E402

pytestmark = pytest.mark.slow

BERT = {
    "vocab_size": 90,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 210,
}
# Model in transformers -> its configuration.
MODELS = {"BertModel": BERT, **hf.families(BERT)}
MODELS["XLMRobertaModel"] = MODELS["RobertaModel"]
# Texts shorter and longer than a local window and than the largest bucket of distances.
LENGTHS = (30, 200, 1, 9, 150)


# XLM-RoBERTa is RoBERTa with another vocabulary.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.release) if kind == "XLMRobertaModel" else kind
        for kind in MODELS
    ],
)
def saved(request, tmp_path_factory):
    """A model and its directory."""
    model = hf.random_model(request.param, 0.2, **MODELS[request.param])
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model, directory


def inputs(model):
    padding = model.config.pad_token_id or 0
    return hf.batch(np.random.default_rng(0), LENGTHS, 90, padding=padding)


def torch_states(model, ids, mask):
    return hf.hidden_states(getattr(model, "bert", model), ids, mask)[-1]


def read(directory):
    config = bert_config(directory)
    return config, encoder_from_tensors(read_tensors(directory), config, where="x")


def test_hidden_states(saved):
    model, directory = saved
    config, params = read(directory)
    ids, mask = inputs(model)
    expected = torch_states(model, ids, mask)
    for padding in (0, 5):
        padded = (np.pad(array, ((0, 0), (0, padding))) for array in (ids, mask))
        states = last_states(params, config, *padded)[:, : mask.shape[1]]
        assert relative_error(states, expected, mask) < 1e-5


def test_weights_come_back_bit_for_bit(saved, tmp_path):
    model, directory = saved
    config, params = read(directory)
    tensors = params_to_tensors(params, bert_leaves(config))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(config)), encoding="utf-8")
    again, again_params = read(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, again_params, params)
    own = {name for name in read_tensors(directory) if not name.startswith("pooler")}
    assert own == set(tensors)

    theirs, loading = transformers.AutoModel.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["unexpected_keys"]
    assert all(name.startswith("pooler") for name in loading["missing_keys"])
    ids, mask = inputs(model)
    np.testing.assert_array_equal(
        torch_states(theirs.eval(), ids, mask), torch_states(model, ids, mask)
    )


def test_every_family_is_here():
    types = {getattr(transformers, kind).config_class.model_type for kind in MODELS}
    assert types == {family.value for family in Family} | {"xlm-roberta"}


def test_what_the_hub_has_for_nomic_bert(tmp_path):
    """Its config.json has GPT-2's names, for the code in the model's repository."""
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_inner": 40, "n_positions": 210}
    hub = {"model_type": "nomic_bert", "vocab_size": 90, "rotary_emb_base": 500, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(hub), encoding="utf-8")
    config = bert_config(tmp_path)
    expected = transformers.NomicBertConfig(
        **BERT, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}
    )
    expected.save_pretrained(tmp_path)
    assert config == bert_config(tmp_path)


def test_pytorch_files_of_a_bert_with_heads_and_another_activation(tmp_path):
    changes = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
    model = hf.random_model("BertForMaskedLM", 0.2, **BERT, **changes)
    model.config.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    weight_map = {name: files[i % 2] for i, name in enumerate(state)}
    for file in files:
        part = {name: state[name] for name in state if weight_map[name] == file}
        torch.save(part, tmp_path / file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index, encoding="utf-8")
    config, params = read(tmp_path)
    ids, mask = inputs(model)
    states = last_states(params, config, ids, mask)
    assert relative_error(states, torch_states(model, ids, mask), mask) < 1e-5


class Unwelcome:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("created-by-a-pickle"),)


def test_a_pytorch_file_in_bfloat16_and_damaged_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.tensor([1.5, -2.0] * 500, dtype=torch.bfloat16)}, path)
    np.testing.assert_array_equal(read_tensors(tmp_path)["a"], np.float32([1.5, -2.0] * 500))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"pytorch_model\.bin: cannot be read"):
        read_tensors(tmp_path)
    torch.save({"state": {"a": torch.ones(1)}}, path)
    with pytest.raises(DataError, match="not a flat dictionary"):
        read_tensors(tmp_path)
    torch.save({"a": Unwelcome()}, path)
    with pytest.raises(DataError, match="cannot be read"):
        read_tensors(tmp_path)
    assert not (tmp_path / "created-by-a-pickle").exists()


def test_fused_queries_are_a_decoder_over_joined_encoder_outputs(tmp_path):
    """Fusion-in-Decoder's way: segments encoded apart, their states given as one text's."""
    model = t5.random_model("t5", seed=3)
    model.save_pretrained(tmp_path)
    config = t5_config(tmp_path)
    params = t5_from_tensors(read_tensors(tmp_path), config, where="live")
    query_ids, query_mask = (array[:2] for array in t5.random_inputs(length=6, seed=4))
    ids, mask = t5.random_inputs(length=9, seed=5)
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
            encoder_outputs=transformers.modeling_outputs.BaseModelOutput(joined),
            attention_mask=torch.tensor(real, dtype=torch.long),
            decoder_input_ids=torch.zeros((2, 1), dtype=torch.long),
            output_attentions=True,
        )
    assert_close(np.asarray(embeddings), output.last_hidden_state[:, 0].numpy())
    probabilities = torch.stack(output.cross_attentions)[:, :, :, 0].sum((0, 2)).numpy()
    expected = np.stack([part.sum(1) for part in np.split(probabilities, [6, 15], axis=1)], axis=1)
    np.testing.assert_allclose(attention, expected, atol=1e-4)
