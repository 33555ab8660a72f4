"""What modules.json and the files beside it say of an encoder."""

import json

import pytest
from bert_checkpoints import write_modules

from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.interop.hub import (
    EncoderSettings,
    prompt_texts,
    read_encoder_settings,
    read_prompts,
    recorded_name,
    template_prompt,
)
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Normalization
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.storage.errors import ConfigError, DataError

NEW = "sentence_transformers.sentence_transformer.modules"
WITHOUT_PROMPTS = {"pooling_mode": "mean", "include_prompt": False}


def test_pooling_norm_and_length(tmp_path):
    assert read_encoder_settings(tmp_path) is None
    write_modules(
        tmp_path, kinds=("Transformer", "Pooling"), package=NEW, pooling={"pooling_mode": "cls"}
    )
    expected = EncoderSettings(Pooling.CLS, Normalization.NONE, max_length=128)
    assert read_encoder_settings(tmp_path) == expected


@pytest.mark.parametrize(
    "prompts",
    [
        {"search_document": "passage: "},
        {"corpus": "passage: ", "clustering": "cluster: "},
        # That of documents counts.
        {"passage": "another: ", "document": "passage: "},
    ],
)
def test_prompts_of_both_roles(tmp_path, prompts):
    write_modules(tmp_path, prompts={"query": "query: ", **prompts})
    assert read_encoder_settings(tmp_path) == EncoderSettings(
        pooling=Pooling.MEAN,
        normalization=Normalization.L2,
        max_length=128,
    )
    assert prompt_texts(tmp_path) == ("query: ", "passage: ")


def test_prompts_under_other_names_are_refused(tmp_path):
    """Which is that of queries is not for us to guess; an empty `query` says that none is."""
    path = write_modules(tmp_path) / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": {"s2p_query": "Instruct: ", "sts": "a "}}))
    message = r"(?s)sentence_transformers.json: prompts s2p_query, sts: none.*fix: .*`query`"
    with pytest.raises(ConfigError, match=message):
        prompt_texts(tmp_path)
    path.write_text(json.dumps({"prompts": {"sts": "a ", "query": ""}}))
    assert prompt_texts(tmp_path) == ("", "")


def test_a_prompt_of_the_tokenizer_is_before_the_texts_of_both_roles(tmp_path):
    """As `write_tokenizer` puts it there: it is no text of `prompts`."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "find", ":", "text"]
    vocabulary = WordPieceVocabulary(pieces)
    vocabulary.save(str(tmp_path / "words"))
    write_modules(tmp_path, prompts={"query": "find"})
    write_tokenizer(tmp_path / "words", tmp_path, max_length=8, prompt=(6, 3))
    assert template_prompt(tmp_path) == (6, 3)
    assert read_prompts(tmp_path, vocabulary) == ((6, 3, 4), (6, 3))
    write_tokenizer(tmp_path / "words", tmp_path, max_length=8)
    assert read_prompts(tmp_path, vocabulary) == ((4,), ())


def test_a_local_folder_is_recorded_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "weights" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recorded_name("weights/bert") == str(tmp_path.resolve() / "weights" / "bert")
    assert recorded_name("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense")}, "modules .*Dense"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling by max"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "pooling by cls, mean"),
        (
            {"pooling": WITHOUT_PROMPTS, "prompts": {"query": "find: "}},
            "1_Pooling/config.json: a mean that leaves the tokens of prompts out",
        ),
    ],
)
def test_what_a_dual_encoder_does_not_have_is_refused(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        read_encoder_settings(write_modules(tmp_path, **wrong))
    (tmp_path / "modules.json").write_text('[{"type": 3}]')
    with pytest.raises(DataError, match=r"modules\.json"):
        read_encoder_settings(tmp_path)
