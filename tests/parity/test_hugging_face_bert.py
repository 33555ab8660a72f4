"""Weights in and out beside Hugging Face's PyTorch BERT, live."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face_parity import hidden_states, relative_error
from safetensors.numpy import save_file

from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.interop.bert import bert_leaves, encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config, config_to_json
from taser_jax.interop.pretrained import load_pretrained, pretrained_bert
from taser_jax.interop.tensors import params_to_tensors, read_tensors
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

torch = pytest.importorskip("torch", reason="PyTorch is an optional extra")
transformers = pytest.importorskip("transformers", reason="an optional extra")

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 90,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
}


def random_model(kind, seed=0, **changes):
    """Large random weights, LayerNorms and biases too, so that no wrong term can hide."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(transformers.BertConfig(**SIZES, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    return model


def inputs(vocab_size, *, lengths, seed=0):
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(seed).integers(1, vocab_size, mask.shape)
    return np.where(mask, ids, 0), mask


def torch_hidden_states(model, ids, mask):
    with torch.no_grad():
        output = getattr(model, "bert", model)(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask.astype(int)),
            output_hidden_states=True,
        )
    return np.stack([state.numpy() for state in output.hidden_states])


def read(directory):
    config = bert_config(directory)
    return config, encoder_from_tensors(read_tensors(directory), config, where="x")


def assert_parity(directory, model, *, lengths):
    config, params = read(directory)
    ids, mask = inputs(config.vocab_size, lengths=lengths)
    found = hidden_states(params, config, ids, mask)
    assert relative_error(found, torch_hidden_states(model, ids, mask), mask) < 1e-4


@pytest.mark.parametrize(
    ("kind", "changes", "lengths"),
    [
        ("BertModel", {}, (30, 512, 1, 9)),
        ("BertModel", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}, (12, 1, 9)),
        ("BertForMaskedLM", {"hidden_act": "relu"}, (12, 1, 9)),
        pytest.param("BertForPreTraining", {}, (12, 1, 9), marks=pytest.mark.release),
    ],
)
def test_random_weights(tmp_path, kind, changes, lengths):
    model = random_model(kind, **changes)
    model.save_pretrained(tmp_path)
    assert_parity(tmp_path, model, lengths=lengths)


def test_minilm_and_what_starts_from_it(minilm):
    model = transformers.BertModel.from_pretrained(minilm).eval()
    assert_parity(minilm, model, lengths=(12, 512))

    ids, mask = inputs(model.config.vocab_size, lengths=(12, 40, 1), seed=1)
    states = torch_hidden_states(model, ids, mask)[-1]
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    tokens = Tokens(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
    bert = pretrained_bert(minilm)

    def embeddings(role, **changes):
        config = DualEncoderConfig(bert=bert, **changes)
        encoder = DualEncoder(config)
        params = load_pretrained(minilm, config=config, params=abstract_params(encoder))

        @jax.jit
        def encode(params):
            return encoder.apply({"params": params}, tokens, role=role, method="encode").embeddings

        return encode(jax.tree.map(jnp.asarray, params))

    shared = embeddings(Role.QUERY)
    assert relative_error(shared, states[:, 0]) < 1e-4
    assert relative_error(embeddings(Role.PASSAGE, pooling=Pooling.MEAN), mean) < 1e-4
    for role in Role:
        taser = embeddings(role, experts=ExpertConfig(num_experts=2))
        np.testing.assert_array_equal(taser, shared)


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_files(tmp_path, shards):
    model = random_model("BertForMaskedLM")
    model.config.save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if shards == 1:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-0000{i + 1}-of-0000{shards}.bin" for i in range(shards)]
        weight_map = {name: files[i % shards] for i, name in enumerate(state)}
        for file in files:
            part = {name: state[name] for name in state if weight_map[name] == file}
            torch.save(part, tmp_path / file)
        index = json.dumps({"metadata": {}, "weight_map": weight_map})
        (tmp_path / "pytorch_model.bin.index.json").write_text(index, encoding="utf-8")
    assert_parity(tmp_path, model, lengths=(8, 3))


class Unwelcome:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("created-by-a-pickle"),)


def test_damaged_pytorch_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
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


def test_bfloat16_in_a_pytorch_file(tmp_path):
    torch.save(
        {"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, tmp_path / "pytorch_model.bin"
    )
    np.testing.assert_array_equal(read_tensors(tmp_path)["a"], np.float32([1.5, -2.0]))


def test_what_is_exported_loads_in_transformers(tmp_path):
    random_model("BertModel", 3, hidden_act="gelu_new").save_pretrained(tmp_path / "source")
    config, params = read(tmp_path / "source")
    output = tmp_path / "output"
    output.mkdir()
    save_file(
        params_to_tensors(params, bert_leaves(config)),
        output / "model.safetensors",
        {"format": "pt"},
    )
    (output / "config.json").write_text(json.dumps(config_to_json(config)), encoding="utf-8")
    model, loading = transformers.AutoModel.from_pretrained(
        output, add_pooling_layer=False, output_loading_info=True
    )
    assert isinstance(model, transformers.BertModel)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert_parity(output, model.eval(), lengths=(8, 3))
    again, again_params = read(output)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, again_params, params)


WORDS = """
Retrieval of the 12,000 passages; isn't it? naïve CAFÉ Ångström straße ΣΊΣΥΦΟΣ İstanbul ﬁ Ⅷ ①
北京 東京タワー 한국어 Привет мир! שלום العربية हिन्दी ไทย 😀👍🏽 x²+y³=z ½ $5.99 50% e-mail é é
foo_bar(baz) http://a.b/c?d=e#f “quoted” ‘single’ — dash … ellipsis c++ C# .NET 1e-5 0xFF ##ing
"""


def texts():
    """Some hundred: words, numbers, punctuation, accents, scripts, odd spaces, long words."""
    rng = np.random.default_rng(0)
    odd = ["\u00a0nbsp\u3000wide\u200bzero", "tab\there", "new\nline", "nul\u0000\ufffd\u0007bell"]
    words = [*WORDS.split(), *odd]
    made = [" ".join(rng.choice(words, rng.integers(1, 25))) for _ in range(300)]
    return [*words, *made, "", " ", "a" * 100, "a" * 101]


def test_ids_are_transformers(minilm, tmp_path):
    vocabulary = load_vocabulary(minilm)
    write_tokenizer(minilm, tmp_path, max_length=24)
    all_texts = texts()
    expected = [[101, *ids, 102] for ids in vocabulary.encode(all_texts)]
    theirs = transformers.AutoTokenizer.from_pretrained(minilm)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tokenizer in (theirs, ours):
        tokenizer.model_max_length = 10**6
        found = tokenizer(all_texts, truncation=False, padding=False)["input_ids"]
        assert len(found) == len(expected) > 300
        different = [t for t, a, b in zip(all_texts, found, expected, strict=True) if a != b]
        assert not different


def test_queries_and_passages_are_cut_as_transformers_cuts(minilm, tmp_path):
    vocabulary = load_vocabulary(minilm)
    write_tokenizer(minilm, tmp_path, max_length=24)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == 24
    all_texts = [text for text in texts() if text.strip()]
    queries = encode_queries(all_texts, vocabulary, length=24)
    found = tokenizer(all_texts, truncation=True, padding="max_length", return_tensors="np")
    assert set(found) == {"input_ids", "attention_mask"}
    np.testing.assert_array_equal(found["input_ids"], queries.ids)
    np.testing.assert_array_equal(found["attention_mask"], queries.mask)

    titles = [title for title in texts()[::-1] if title]
    pairs = list(zip(titles, all_texts, strict=False))
    passages = encode_passages(
        [Passage(str(i), text, title) for i, (title, text) in enumerate(pairs)],
        vocabulary,
        length=24,
    )
    found = tokenizer(
        [title for title, _ in pairs],
        [text for _, text in pairs],
        truncation=True,
        padding="max_length",
        return_tensors="np",
    )
    np.testing.assert_array_equal(found["input_ids"], passages.ids)
