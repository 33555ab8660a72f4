"""Exports as plain BERTs, loaded by sentence-transformers, transformers and onnxruntime.

The embeddings compared with are the model's own.
"""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import pytest
from bert_checkpoints import byte_level_tokenizer
from tiny_source import (
    GIVEN,
    PAIRS,
    PASSAGE_LENGTH,
    PIECES,
    QUERY_LENGTH,
    TEXTS,
    embed,
    embed_given,
    embed_passages,
    embed_queries,
    exported,
    tiny_source,
)

from taser_jax.data.text.preprocessors import encode_queries, passage_ids
from taser_jax.data.text.vocabularies import TokenizerJsonVocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop import onnx, sentence_transformers
from taser_jax.interop.export_source import write_card
from taser_jax.interop.hub import read_encoder_settings
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.interop.sentence_transformers import export_sentence_transformers, plain_paths
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
    "taser": {},
    "shared": {"experts": {}, "pooling": Pooling.MEAN, "normalization": Normalization.L2},
}
TOLERANCE = 1e-5


def paths(source, directory):
    """Each plain encoder's directory and role."""
    names = plain_paths(source.config, prompt=source.query_settings.prompt)
    return [(directory / name, role) for name, role in names.items()]


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    """A source, and its directory for sentence-transformers with its card."""
    root = tmp_path_factory.mktemp("written")
    source = tiny_source(root, **KINDS[request.param])
    directory = exported(export_sentence_transformers, source, root)
    write_card(source, directory, sentence_transformers.card_texts(source))
    return source, directory


def same(embeddings, expected):
    np.testing.assert_allclose(np.asarray(embeddings), expected, rtol=0, atol=TOLERANCE)


def run_card(directory):
    """What the card's code leaves, run where the card lies."""
    text = (directory / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict = {}
    with contextlib.chdir(directory):
        exec(code, names)
    assert names["scores"].shape == (1, 2)
    return names


def test_a_model_and_its_card_give_the_models_own_embeddings(written, sentence_transformer):
    source, directory = written
    model = sentence_transformer(directory)
    queries, passages = model.encode_query(TEXTS), model.encode_document(PAIRS)
    own_queries, own_passages = (embed_given(source, role) for role in Role)
    same(queries, own_queries)
    same(passages, own_passages)
    similarity = model.similarity(queries, passages)
    np.testing.assert_allclose(similarity, own_queries @ own_passages.T, rtol=1e-4, atol=1e-5)
    # The roles do differ, or the comparison would show nothing.
    assert np.abs(model.encode_document(TEXTS) - queries).max() > 100 * TOLERANCE
    names = run_card(directory)
    same(names["query_embeddings"], model.encode_query(names["queries"]))


def test_each_path_is_a_model_by_itself(written, sentence_transformer):
    """That transformers read, since sentence-transformers does it so."""
    source, output_dir = written
    for directory, role in paths(source, output_dir):
        model = sentence_transformer(directory)
        assert model.max_seq_length == source.length(role)
        assert model.similarity_fn_name == "dot"
        modules = ["Transformer", "Pooling", "Normalize"]
        expected = modules[: 2 + (source.config.normalization is Normalization.L2)]
        assert [type(module).__name__ for module in model] == expected
        same(model.encode(GIVEN[role]), embed_given(source, role))
    # Weights are written once.
    files = {path.parent for path in output_dir.rglob("*.safetensors")}
    assert files == {directory for directory, _ in paths(source, output_dir)}


def test_passages_of_any_length_are_cut_as_in_training(written):
    transformers = pytest.importorskip("transformers")
    source, output_dir = written
    tokenizer = transformers.AutoTokenizer.from_pretrained(paths(source, output_dir)[-1][0])
    counts = range(PASSAGE_LENGTH)
    pairs = [("paris " * title or " ", "city " * text) for title in counts for text in counts]
    ids = tokenizer(pairs, truncation=True)["input_ids"]
    assert ids == passage_ids(*zip(*pairs, strict=True), source.vocabulary, PASSAGE_LENGTH)


def prompted(directory, kind, *prompt):
    """Queries come after a prompt, passages after another."""
    return dataclasses.replace(
        tiny_source(directory, **KINDS[kind]),
        query_settings=QuerySettings(prompt=tuple(map(PIECES.index, prompt))),
        passage_prompt=(PIECES.index("france"),),
    )


def test_a_tasks_prompt_is_before_its_queries(tmp_path, sentence_transformer):
    # [SEP] in a text is no token: a name with it is TACO-DR's prompt.
    source = prompted(tmp_path, "taser", "city", "[SEP]")
    expected = embed_given(source, Role.QUERY)
    plain = dataclasses.replace(source, query_settings=QuerySettings())
    assert np.abs(expected - embed_given(plain, Role.QUERY)).max() > 100 * TOLERANCE
    directory = exported(export_sentence_transformers, source, tmp_path)
    model = sentence_transformer(directory)
    same(model.encode_query(TEXTS), expected)
    same(model.encode_document(PAIRS), embed_given(source, Role.PASSAGE))
    same(sentence_transformer(directory / "query").encode(TEXTS), expected)


def test_onnx_gives_the_models_own_embeddings(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    source = prompted(tmp_path, "shared", "city", "[SEP]")
    directory = exported(onnx.export_onnx, source, tmp_path)
    write_card(source, directory, onnx.card_texts(source))
    names = run_card(directory)
    encode = {Role.QUERY: names["encode_queries"], Role.PASSAGE: names["encode_passages"]}
    for path, role in paths(source, directory):
        expected = embed_given(source, role)
        same(encode[role](GIVEN[role]), expected)
        # Any batch size and any length.
        same(encode[role](GIVEN[role][1:2]), expected[1:2])
        session = onnxruntime.InferenceSession(path / onnx.MODEL)
        assert [value.name for value in session.get_outputs()] == [onnx.OUTPUT]


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
    rotary = ROTARY.get(family, RotaryConfig())
    source = tiny_source(
        tmp_path,
        vocabulary=vocabulary,
        bert={"vocab_size": vocabulary.size, "family": family, "rotary": rotary},
        pooling=Pooling.LAST if family is Family.MODERNBERT else Pooling.MEAN,
    )
    the, cats = (tuple(ids) for ids in vocabulary.encode(["the", "cats"]))
    settings = QuerySettings(prompt=the)
    source = dataclasses.replace(source, query_settings=settings, passage_prompt=cats)
    config, output = source.config, exported(export_sentence_transformers, source, tmp_path)
    model = sentence_transformer(output)
    same(model.encode_query(SENTENCES), embed_queries(source, SENTENCES))
    embeddings = model.encode_document([("A cat", text) for text in SENTENCES])
    same(embeddings, embed_passages(source, ["A cat"] * len(SENTENCES), SENTENCES))

    queries = encode_queries(SENTENCES, vocabulary, length=QUERY_LENGTH, settings=settings)
    program = lower_encoder(source, Role.QUERY, any_length=True)
    for tokens in (queries, Tokens(queries.ids[1:3, :4], queries.mask[1:3, :4])):
        embeddings = program.call(source.params, tokens.ids, tokens.mask)
        same(embeddings, embed(source, Role.QUERY, tokens))

    assert read_encoder_settings(output / "query").pooling is config.pooling
    assert pretrained_bert(output / "query", numerics=config.bert) == config.bert
    weights = Pretrained(str(output / "query"), passage_source=str(output / "passage"))
    again = read_pretrained(weights, config=config, params=source.params)
    jax.tree.map(np.testing.assert_array_equal, again, source.params)
