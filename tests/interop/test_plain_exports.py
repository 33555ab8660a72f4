"""Exports as plain BERTs, loaded by sentence-transformers, transformers and onnxruntime.

The embeddings compared with are the model's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import ten_steps

from taser_jax.data.text.preprocessors import encode_passages, encode_queries, passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop import onnx, sentence_transformers
from taser_jax.interop.export_source import write_card
from taser_jax.interop.pretrained import load_pretrained
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import Normalization
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage

pytestmark = pytest.mark.slow

# Two models of two paths and two of one: all but a release take one of each.
KINDS = (
    "taser",
    pytest.param("dpr", marks=pytest.mark.release),
    pytest.param("shared", marks=pytest.mark.release),
    "minilm",
)
TOLERANCE = 1e-5
LENGTHS = {Role.QUERY: ten_steps.QUERY_LENGTH, Role.PASSAGE: ten_steps.PASSAGE_LENGTH}
TEXTS = {Role.QUERY: list(ten_steps.QUERIES), Role.PASSAGE: ten_steps.PAIRS}


@dataclasses.dataclass(frozen=True)
class Exported:
    trained: ten_steps.Trained
    directory: pathlib.Path
    model: Any = None

    @property
    def config(self) -> DualEncoderConfig:
        return self.trained.source.config

    @property
    def paths(self) -> list[tuple[pathlib.Path, Role]]:
        prompt = self.trained.source.query_settings.prompt
        paths = sentence_transformers.plain_paths(self.config, prompt=prompt)
        return [(self.directory / name, role) for name, role in paths.items()]

    def expected(self, role: Role) -> np.ndarray:
        return self.trained.queries if role is Role.QUERY else self.trained.passages


@pytest.fixture(scope="module", params=KINDS)
def exported(request, make_once, tmp_path_factory, sentence_transformer):
    trained = make_once(request.param)
    directory = tmp_path_factory.mktemp("sentence_transformers")
    sentence_transformers.export_sentence_transformers(trained.source, directory)
    write_card(trained.source, directory, sentence_transformers.card_texts(trained.source))
    return Exported(trained, directory, sentence_transformer(directory))


def same(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=TOLERANCE)


def run_card(directory):
    """What the card's code leaves, run where the card lies."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict = {}
    with contextlib.chdir(directory):
        exec(code, names)
    return names


def test_encode_query_and_encode_document_give_the_models_own_embeddings(exported):
    model = exported.model
    queries = model.encode_query(TEXTS[Role.QUERY])
    passages = model.encode_document(TEXTS[Role.PASSAGE])
    same(queries, exported.expected(Role.QUERY))
    same(passages, exported.expected(Role.PASSAGE))
    dot = exported.expected(Role.QUERY) @ exported.expected(Role.PASSAGE).T
    np.testing.assert_allclose(model.similarity(queries, passages), dot, rtol=1e-4)
    # The roles do differ, or the comparison would show nothing.
    assert np.abs(model.encode_document(TEXTS[Role.QUERY]) - queries).max() > 100 * TOLERANCE


def test_each_path_is_a_model_by_itself(exported, sentence_transformer):
    transformers = pytest.importorskip("transformers")
    for directory, role in exported.paths:
        model = sentence_transformer(directory)
        assert model.max_seq_length == LENGTHS[role]
        assert model.similarity_fn_name == "dot"
        normalised = exported.config.normalization is Normalization.L2
        expected = ["Transformer", "Pooling", "Normalize"][: 2 + normalised]
        assert [type(module).__name__ for module in model] == expected
        same(model.encode(TEXTS[role]), exported.expected(role))

        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        encoder = transformers.AutoModel.from_pretrained(directory, add_pooling_layer=False)
        tokens = tokenizer(TEXTS[role], padding=True, truncation=True, return_tensors="pt")
        assert "token_type_ids" not in tokens
        hidden = encoder(**tokens).last_hidden_state.detach()
        pooled = hidden[:, 0]
        if exported.config.pooling is Pooling.MEAN:
            weight = tokens["attention_mask"][..., None]
            pooled = (hidden * weight).sum(1) / weight.sum(1)
        same(
            pooled / pooled.norm(dim=1, keepdim=True) if normalised else pooled,
            exported.expected(role),
        )


def test_import_of_the_export_gives_back_the_same_parameters(exported):
    params = exported.trained.source.params
    found = load_pretrained(
        exported.paths[0][0],
        config=exported.config,
        params=jax.tree.map(np.zeros_like, params),
        passage_source=exported.paths[-1][0] if len(exported.paths) > 1 else None,
    )
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_code_of_the_card_runs_and_says_the_same(exported):
    names = run_card(exported.directory)
    assert names["scores"].shape == (1, 2)
    same(names["query_embeddings"], exported.model.encode_query(names["queries"]))


def test_weights_are_written_once(exported):
    found = sorted(exported.directory.rglob("*.safetensors"))
    assert found == sorted(directory / "model.safetensors" for directory, _ in exported.paths)


def test_passages_of_any_length_are_cut_as_in_training(exported):
    transformers = pytest.importorskip("transformers")
    directory, _ = exported.paths[-1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    vocabulary = load_vocabulary(exported.trained.source.vocabulary_dir)
    counts = range(ten_steps.PASSAGE_LENGTH)
    pairs = [("paris " * title or " ", "rome " * text) for title in counts for text in counts]
    found = tokenizer(pairs, truncation=True)["input_ids"]
    assert found == passage_ids(*zip(*pairs, strict=True), vocabulary, ten_steps.PASSAGE_LENGTH)


# "the river " is a text; [SEP] is not, and a name with it is TACO-DR's prompt.
RIVER, RIVER_AND_SEP = ("the", "river"), ("river", "[SEP]")


def prompted(trained: ten_steps.Trained, prompt: tuple[str, ...]) -> ten_steps.Trained:
    """The same model, its queries after a prompt; passages, too."""
    settings = QuerySettings(prompt=tuple(ten_steps.PIECES.index(piece) for piece in prompt))
    source = dataclasses.replace(
        trained.source,
        query_settings=settings,
        passage_prompt=(ten_steps.PIECES.index("large"),),
    )
    tokens = encode_passages(
        [Passage(id="", title=title, text=text) for title, text in ten_steps.PASSAGES],
        load_vocabulary(source.vocabulary_dir),
        length=ten_steps.PASSAGE_LENGTH,
        prompt=source.passage_prompt,
    )
    passages = ten_steps.embed(source.params, tokens, source.config, Role.PASSAGE)
    assert np.abs(passages - trained.passages).max() > 100 * TOLERANCE
    tokens = encode_queries(
        *(ten_steps.QUERIES, source.vocabulary),
        length=ten_steps.QUERY_LENGTH,
        settings=settings,
    )
    queries = ten_steps.embed(source.params, tokens, source.config, Role.QUERY)
    return dataclasses.replace(trained, source=source, queries=queries, passages=passages)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("taser", RIVER),
        ("taser", RIVER_AND_SEP),
        # One path, which becomes two where the tokenizers differ.
        pytest.param("shared", RIVER, marks=pytest.mark.release),
        pytest.param("shared", RIVER_AND_SEP, marks=pytest.mark.release),
    ],
)
def test_a_tasks_prompt_is_before_its_queries(
    kind, prompt, make_once, tmp_path, sentence_transformer
):
    before = make_once(kind)
    trained = prompted(before, prompt)
    assert np.abs(trained.queries - before.queries).max() > 100 * TOLERANCE
    sentence_transformers.export_sentence_transformers(trained.source, tmp_path)
    write_card(trained.source, tmp_path, sentence_transformers.card_texts(trained.source))
    model = sentence_transformer(tmp_path)
    same(model.encode_query(TEXTS[Role.QUERY]), trained.queries)
    same(model.encode_document(TEXTS[Role.PASSAGE]), trained.passages)
    names = run_card(tmp_path)
    same(names["query_embeddings"], model.encode_query(names["queries"]))
    if (tmp_path / "query").exists():
        same(sentence_transformer(tmp_path / "query").encode(TEXTS[Role.QUERY]), trained.queries)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [("shared", RIVER_AND_SEP), pytest.param("minilm", (), marks=pytest.mark.release)],
)
def test_onnx_gives_the_models_own_embeddings(kind, prompt, make_once, tmp_path):
    trained = prompted(make_once(kind), prompt) if prompt else make_once(kind)
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    onnx.export_onnx(trained.source, tmp_path)
    write_card(trained.source, tmp_path, onnx.card_texts(trained.source))
    exported = Exported(trained, tmp_path)
    names = run_card(tmp_path)
    assert names["scores"].shape == (1, 2)
    encode = {Role.QUERY: names["encode_queries"], Role.PASSAGE: names["encode_passages"]}
    for directory, role in exported.paths:
        same(encode[role](TEXTS[role]), exported.expected(role))
        # Any batch size and any length.
        same(encode[role](TEXTS[role][-1:]), exported.expected(role)[-1:])
        session = onnxruntime.InferenceSession(directory / onnx.MODEL)
        assert [value.name for value in session.get_inputs()] == list(onnx.INPUTS)
        assert [value.name for value in session.get_outputs()] == [onnx.OUTPUT]
        assert session.get_inputs()[0].shape == ["batch", "length"]


def test_onnx_without_its_packages_names_the_extra(monkeypatch):
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\[onnx\]"):
        onnx.check_packages()


def tiny(**changes) -> DualEncoderConfig:
    return dataclasses.replace(ten_steps.tiny_config("shared"), **changes)


@pytest.mark.parametrize("format", ["sentence_transformers", "onnx"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny(experts=ExpertConfig(2, blocks=(1,), routing=Routing.SEQUENCE)), "or stablehlo"),
        (T5DualEncoderConfig(), "saved_model or stablehlo"),
        (tiny(bert=dataclasses.replace(tiny().bert, head_dim=4)), "heads x head_dim"),
    ],
)
def test_what_is_no_plain_bert_is_refused_with_the_formats_that_can(config, message, format):
    with pytest.raises(ConfigError, match=message):
        sentence_transformers.check_plain(config, format=format)


def test_an_export_without_tokenizer_is_refused(make_once, tmp_path):
    source = make_once("shared").source
    missing = dataclasses.replace(source, vocabulary_dir=tmp_path / "nowhere")
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    with pytest.raises(DataError, match="nowhere"):
        sentence_transformers.export_sentence_transformers(missing, output_dir)
