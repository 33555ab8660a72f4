"""Relatives of BERT beside Hugging Face's PyTorch models, with random weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_parity import last_states, relative_error
from safetensors.numpy import save_file

from taser_jax.interop.bert import bert_leaves, encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config, config_to_json
from taser_jax.interop.pretrained import load_pretrained
from taser_jax.interop.tensors import params_to_tensors, read_tensors
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert_config import Family
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig, Routing

torch = pytest.importorskip("torch", reason="PyTorch is an optional extra")
transformers = pytest.importorskip("transformers", reason="an optional extra")

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
MODELS = {
    "DistilBertModel": {
        "vocab_size": 90,
        "dim": 24,
        "n_layers": 3,
        "n_heads": 3,
        "hidden_dim": 40,
        "max_position_embeddings": 210,
    },
    "RobertaModel": BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "XLMRobertaModel": BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "MPNetModel": BERT,
    "ModernBertModel": BERT | {"local_attention": 16, "pad_token_id": 0},
    "NomicBertModel": BERT,
}
MODELS["ModernBertModel"] |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2}
MODELS["ModernBertModel"] |= {"sep_token_id": 3}
# Texts shorter and longer than a local window and than the largest bucket of distances.
LENGTHS = (30, 200, 1, 9, 150)
PADDING_IDS = {"RobertaModel": 1, "XLMRobertaModel": 1, "MPNetModel": 1}


# XLM-RoBERTa is RoBERTa with another vocabulary.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.release) if kind == "XLMRobertaModel" else kind
        for kind in MODELS
    ],
)
def saved(request, tmp_path_factory):
    """A model with large random weights, norms and biases too, and its directory."""
    kind = request.param
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**MODELS[kind], attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp(kind)
    model.save_pretrained(directory)
    return model, directory


def inputs(model, lengths=LENGTHS):
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(0).integers(2, 90, mask.shape)
    return np.where(mask, ids, PADDING_IDS.get(type(model).__name__, 0)), mask


def torch_states(model, ids, mask):
    with torch.no_grad():
        output = model(torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int)))
    return output.last_hidden_state.numpy()


def read(directory):
    config = bert_config(directory)
    return config, encoder_from_tensors(read_tensors(directory), config, where="x")


def test_hidden_states(saved):
    model, directory = saved
    config, params = read(directory)
    ids, mask = inputs(model)
    expected = torch_states(model, ids, mask)
    found = last_states(params, config, ids, mask)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    error = relative_error(found, expected, mask)
    print(f"{type(model).__name__}: {error:.1e}, {count:,} parameters")
    assert error < 1e-5

    wider, wider_mask = (np.pad(array, ((0, 0), (0, 5))) for array in (ids, mask))
    found = last_states(params, config, wider, wider_mask)[:, : mask.shape[1]]
    assert relative_error(found, expected, mask) < 1e-5

    # The measure itself notices one number of one kernel.
    params["layers_1"]["mlp"]["wo"]["kernel"][3, 3] += 1e-2
    changed = last_states(params, config, ids, mask)
    assert relative_error(changed, expected, mask) > 1e-4


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


def test_experts_start_as_the_pretrained_encoder(saved):
    model, directory = saved
    config, _ = read(directory)
    ids, mask = inputs(model, (12, 40, 1))
    tokens = Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
    states = torch_states(model, ids, mask)
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    for routing, pooling, expected in (
        (Routing.DETERMINISTIC, Pooling.CLS, states[:, 0]),
        (Routing.TOKEN, Pooling.MEAN, mean),
    ):
        experts = ExpertConfig(num_experts=2, routing=routing, blocks=(1, 3))
        dual = DualEncoder(DualEncoderConfig(bert=config, experts=experts, pooling=pooling))
        params = load_pretrained(directory, config=dual.config, params=zeros(dual))
        found = quick_encode(dual)(jax.tree.map(jnp.asarray, params), tokens)
        assert relative_error(found, expected) < 1e-5


def quick_encode(dual):
    @jax.jit
    def encode(params, tokens):
        encoded = dual.apply({"params": params}, tokens, role=Role.QUERY, method="encode")
        return encoded.embeddings

    return encode


def zeros(encoder):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(encoder))


def test_every_family_is_here():
    types = {getattr(transformers, kind).config_class.model_type for kind in MODELS}
    assert types == {family.value for family in Family if family is not Family.BERT} | {
        "xlm-roberta"
    }


def test_what_the_hub_has_for_nomic_bert(tmp_path):
    """Its config.json has GPT-2's names, for the code in the model's repository."""
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_inner": 40, "n_positions": 210}
    hub = {"model_type": "nomic_bert", "vocab_size": 90, "rotary_emb_base": 500, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(hub), encoding="utf-8")
    found = bert_config(tmp_path)
    expected = transformers.NomicBertConfig(
        **BERT, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}
    )
    expected.save_pretrained(tmp_path)
    assert found == bert_config(tmp_path)
