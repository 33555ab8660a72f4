"""BERT's relatives with their own tokenizers as sentence-transformers directories, and back."""

import dataclasses

import jax
import numpy as np
import pytest
from bert_checkpoints import byte_level_tokenizer
from tiny_source import (
    DETERMINISTIC,
    QUERY_LENGTH,
    embed,
    embed_passages,
    embed_queries,
    tiny_source,
)

from taser_jax.data.text.preprocessors import encode_queries
from taser_jax.data.text.vocabularies import TokenizerJsonVocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop.hub import read_encoder_settings
from taser_jax.interop.pretrained import Pretrained, pretrained_bert, read_pretrained
from taser_jax.interop.sentence_transformers import export_sentence_transformers
from taser_jax.interop.stablehlo import lower_encoder
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert_config import Family, RotaryConfig
from taser_jax.models.bert_dual_encoder import Pooling

pytestmark = pytest.mark.slow

TEXTS = ["the cats sat on the mat", "cats", "a </s> in été", "the mat " * 20]
ROTARY = {
    Family.MODERNBERT: RotaryConfig(local_window=4, global_every=2),
    Family.NOMIC_BERT: RotaryConfig(theta=1000.0, global_every=1),
}


def byte_pairs():
    tokenizer = byte_level_tokenizer(TEXTS, size=300)
    return TokenizerJsonVocabulary(tokenizer.to_str().encode("utf-8"))


def same(embeddings, expected):
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-5)


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
    vocabulary = byte_pairs()
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
    export_sentence_transformers(source, output)
    model = sentence_transformer(output)
    same(model.encode_query(TEXTS), embed_queries(source, TEXTS, settings))
    embeddings = model.encode_document([("A cat", text) for text in TEXTS])
    same(embeddings, embed_passages(source, ["A cat"] * len(TEXTS), TEXTS))

    queries = encode_queries(TEXTS, vocabulary, length=QUERY_LENGTH, settings=settings)
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
