"""Exports as plain BERTs, loaded by sentence-transformers, transformers and onnxruntime.

The embeddings compared with are the model's own.
"""

import contextlib
import dataclasses
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from bert_checkpoints import byte_level_tokenizer
from tiny_source import (
    DETERMINISTIC,
    PASSAGE_LENGTH,
    PIECES,
    QUERY_LENGTH,
    TEXTS,
    TITLES,
    embed,
    embed_passages,
    embed_queries,
    tiny_source,
)

from taser_jax.data.text.preprocessors import encode_queries, passage_ids
from taser_jax.data.text.vocabularies import TokenizerJsonVocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop import onnx, sentence_transformers
from taser_jax.interop.export_source import ExportSource, write_card
from taser_jax.interop.hub import read_encoder_settings
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.interop.stablehlo import lower_encoder
from taser_jax.models.batch import Normalization, Role, Tokens
from taser_jax.models.bert_config import BertConfig, Family, RotaryConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError

pytestmark = pytest.mark.slow

# A model of two paths, and one of one.
KINDS = {
    "taser": {"experts": DETERMINISTIC},
    "shared": {"pooling": Pooling.MEAN, "normalization": Normalization.L2},
}
TOLERANCE = 1e-5
PAIRS = [(title, text) if title else text for title, text in zip(TITLES, TEXTS, strict=True)]
GIVEN = {Role.QUERY: TEXTS, Role.PASSAGE: PAIRS}


@dataclasses.dataclass(frozen=True)
class Exported:
    source: ExportSource
    directory: pathlib.Path
    model: Any = None

    @property
    def paths(self) -> list[tuple[pathlib.Path, Role]]:
        prompt = self.source.query_settings.prompt
        paths = sentence_transformers.plain_paths(self.source.config, prompt=prompt)
        return [(self.directory / name, role) for name, role in paths.items()]

    def expected(self, role: Role) -> np.ndarray:
        if role is Role.QUERY:
            return embed_queries(self.source, TEXTS, self.source.query_settings)
        return embed_passages(self.source, TITLES, TEXTS)


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory, sentence_transformer):
    directory = tmp_path_factory.mktemp("sentence_transformers")
    source = tiny_source(tmp_path_factory.mktemp("source"), **KINDS[request.param])
    sentence_transformers.export_sentence_transformers(source, directory)
    write_card(source, directory, sentence_transformers.card_texts(source))
    return Exported(source, directory, sentence_transformer(directory))


def same(embeddings, expected):
    np.testing.assert_allclose(np.asarray(embeddings), expected, rtol=0, atol=TOLERANCE)


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
    queries, passages = model.encode_query(TEXTS), model.encode_document(PAIRS)
    same(queries, exported.expected(Role.QUERY))
    same(passages, exported.expected(Role.PASSAGE))
    dot = exported.expected(Role.QUERY) @ exported.expected(Role.PASSAGE).T
    np.testing.assert_allclose(model.similarity(queries, passages), dot, rtol=1e-4, atol=1e-5)
    # The roles do differ, or the comparison would show nothing.
    assert np.abs(model.encode_document(TEXTS) - queries).max() > 100 * TOLERANCE


def test_each_path_is_a_model_by_itself(exported, sentence_transformer):
    transformers = pytest.importorskip("transformers")
    for directory, role in exported.paths:
        model = sentence_transformer(directory)
        assert model.max_seq_length == exported.source.length(role)
        assert model.similarity_fn_name == "dot"
        normalised = exported.source.config.normalization is Normalization.L2
        expected = ["Transformer", "Pooling", "Normalize"][: 2 + normalised]
        assert [type(module).__name__ for module in model] == expected
        same(model.encode(GIVEN[role]), exported.expected(role))

        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        encoder = transformers.AutoModel.from_pretrained(directory, add_pooling_layer=False)
        tokens = tokenizer(GIVEN[role], padding=True, truncation=True, return_tensors="pt")
        assert "token_type_ids" not in tokens
        hidden = encoder(**tokens).last_hidden_state.detach()
        pooled = hidden[:, 0]
        if exported.source.config.pooling is Pooling.MEAN:
            weight = tokens["attention_mask"][..., None]
            pooled = (hidden * weight).sum(1) / weight.sum(1)
        same(
            pooled / pooled.norm(dim=1, keepdim=True) if normalised else pooled,
            exported.expected(role),
        )


def test_import_of_the_export_gives_back_the_same_parameters(exported):
    params = exported.source.params
    query, *passage = (str(directory) for directory, _ in exported.paths)
    imported = read_pretrained(
        Pretrained(query, passage_source=passage[0] if passage else None),
        config=exported.source.config,
        params=jax.tree.map(np.zeros_like, params),
    )
    jax.tree.map(np.testing.assert_array_equal, imported, params)
    # Weights are written once.
    written = sorted(exported.directory.rglob("*.safetensors"))
    assert written == sorted(directory / "model.safetensors" for directory, _ in exported.paths)


def test_code_of_the_card_runs_and_says_the_same(exported):
    names = run_card(exported.directory)
    assert names["scores"].shape == (1, 2)
    same(names["query_embeddings"], exported.model.encode_query(names["queries"]))


def test_passages_of_any_length_are_cut_as_in_training(exported):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported.paths[-1][0])
    counts = range(PASSAGE_LENGTH)
    pairs = [("paris " * title or " ", "city " * text) for title in counts for text in counts]
    ids = tokenizer(pairs, truncation=True)["input_ids"]
    expected = passage_ids(*zip(*pairs, strict=True), exported.source.vocabulary, PASSAGE_LENGTH)
    assert ids == expected


def prompted(directory: pathlib.Path, kind: str, *prompt: str) -> ExportSource:
    """Queries come after a prompt, passages after another."""
    return dataclasses.replace(
        tiny_source(directory, **KINDS[kind]),
        query_settings=QuerySettings(prompt=tuple(map(PIECES.index, prompt))),
        passage_prompt=(PIECES.index("france"),),
    )


# [SEP] in a text is no token: a name with it is TACO-DR's prompt.
@pytest.mark.parametrize("prompt", [("the", "city"), ("city", "[SEP]")])
def test_a_tasks_prompt_is_before_its_queries(prompt, tmp_path, sentence_transformer):
    source, directory = prompted(tmp_path, "taser", *prompt), tmp_path / "out"
    directory.mkdir()
    exported = Exported(source, directory)
    plain = embed_queries(source, TEXTS)
    assert np.abs(exported.expected(Role.QUERY) - plain).max() > 100 * TOLERANCE
    sentence_transformers.export_sentence_transformers(source, directory)
    write_card(source, directory, sentence_transformers.card_texts(source))
    model = sentence_transformer(directory)
    same(model.encode_query(TEXTS), exported.expected(Role.QUERY))
    same(model.encode_document(PAIRS), exported.expected(Role.PASSAGE))
    names = run_card(directory)
    same(names["query_embeddings"], model.encode_query(names["queries"]))
    alone = sentence_transformer(directory / "query")
    same(alone.encode(TEXTS), exported.expected(Role.QUERY))


def test_onnx_gives_the_models_own_embeddings(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    source, directory = prompted(tmp_path, "shared", "city", "[SEP]"), tmp_path / "out"
    directory.mkdir()
    onnx.export_onnx(source, directory)
    write_card(source, directory, onnx.card_texts(source))
    exported, names = Exported(source, directory), run_card(directory)
    assert names["scores"].shape == (1, 2)
    encode = {Role.QUERY: names["encode_queries"], Role.PASSAGE: names["encode_passages"]}
    for path, role in exported.paths:
        same(encode[role](GIVEN[role]), exported.expected(role))
        # Any batch size and any length.
        same(encode[role](GIVEN[role][1:2]), exported.expected(role)[1:2])
        session = onnxruntime.InferenceSession(path / onnx.MODEL)
        assert [value.name for value in session.get_inputs()] == list(onnx.INPUTS)
        assert [value.name for value in session.get_outputs()] == [onnx.OUTPUT]
        assert session.get_inputs()[0].shape == ["batch", "length"]


def test_what_is_no_plain_bert_is_refused_with_the_formats_that_can():
    routed = ExpertConfig(num_experts=2, routing=Routing.SEQUENCE)
    for config, message in (
        (DualEncoderConfig(experts=routed), "or stablehlo"),
        (T5DualEncoderConfig(), "'onnx' is a format of BERTs(.|\n)*saved_model or stablehlo"),
        (DualEncoderConfig(bert=BertConfig(head_dim=4)), "heads x head_dim"),
    ):
        with pytest.raises(ConfigError, match=message):
            onnx.check(config)


SENTENCES = ["the cats sat on the mat", "cats", "a </s> in été", "the mat " * 20]
ROTARY = {
    Family.MODERNBERT: RotaryConfig(local_window=4, global_every=2),
    Family.NOMIC_BERT: RotaryConfig(theta=1000.0, global_every=1),
}


# Positions after an offset, and rotary ones; each family beside Hugging Face is in tests/parity.
EXPORTED = (Family.ROBERTA, Family.MODERNBERT)


@pytest.mark.parametrize(
    "family",
    [
        family if family in EXPORTED else pytest.param(family, marks=pytest.mark.release)
        for family in Family
        if family is not Family.BERT
    ],
)
def test_there_and_back(tmp_path, family, sentence_transformer):
    byte_pairs = byte_level_tokenizer(SENTENCES, size=300)
    vocabulary = TokenizerJsonVocabulary(byte_pairs.to_str().encode("utf-8"))
    pooling = Pooling.LAST if family is Family.MODERNBERT else Pooling.MEAN
    source = tiny_source(
        tmp_path,
        experts=DETERMINISTIC,
        vocabulary=vocabulary,
        bert={"family": family, "rotary": ROTARY.get(family, RotaryConfig())},
        pooling=pooling,
    )
    ids = {name: tuple(vocabulary.encode([name])[0]) for name in ("the", "cats")}
    settings = QuerySettings(prompt=ids["the"])
    source = dataclasses.replace(source, query_settings=settings, passage_prompt=ids["cats"])
    output = tmp_path / "out"
    output.mkdir()
    sentence_transformers.export_sentence_transformers(source, output)
    model = sentence_transformer(output)
    same(model.encode_query(SENTENCES), embed_queries(source, SENTENCES, settings))
    embeddings = model.encode_document([("A cat", text) for text in SENTENCES])
    same(embeddings, embed_passages(source, ["A cat"] * len(SENTENCES), SENTENCES))

    queries = encode_queries(SENTENCES, vocabulary, length=QUERY_LENGTH, settings=settings)
    program = lower_encoder(source.config, Role.QUERY, length=QUERY_LENGTH, any_length=True)
    for tokens in (queries, Tokens(queries.ids[1:3, :4], queries.mask[1:3, :4])):
        embeddings = program.call(source.params, tokens.ids, tokens.mask)
        same(embeddings, embed(source, Role.QUERY, tokens))

    config = source.config
    found_settings = read_encoder_settings(output / "query")
    assert found_settings.pooling is pooling
    assert pretrained_bert(output / "query", numerics=config.bert) == config.bert
    weights = Pretrained(str(output / "query"), passage_source=str(output / "passage"))
    again = read_pretrained(weights, config=config, params=source.params)
    jax.tree.map(np.testing.assert_array_equal, again, source.params)
