"""Checkpoints from the hub, and what modules.json and the files beside it say of an encoder.

The hub is a folder on this machine, or a port that nobody answers at: no network.
"""

import json
import shutil
import socket
import time
from unittest import mock

import huggingface_hub
import pytest
from bert_checkpoints import write_checkpoint, write_modules
from huggingface_hub import constants

from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.interop import hub
from taser_jax.interop.hub import EncoderSettings, fetch, prompt_texts, read_encoder_settings
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Normalization
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.storage.errors import ConfigError, DataError

ADVICE = r"(?s)the Hugging Face hub did not provide it.*fix: .*path of the directory"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """What a hub has as us/tiny; downloads take what they ask for, and keep it."""
    directory, _ = write_checkpoint(tmp_path / "served")
    for name in ("vocab.txt", "README.md", "pytorch_model.bin"):
        (directory / name).write_text("of the hub")

    def download(hub_id, *, allow_patterns, local_files_only):
        assert hub_id == "us/tiny"
        if not local_files_only:
            (tmp_path / "cache").mkdir(exist_ok=True)
            for pattern in allow_patterns:
                for path in directory.glob(pattern):
                    shutil.copy(path, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    assert fetch(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert fetch(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("given", ["model", "model/checkpoint_3"])
def test_a_model_directory_of_ours_is_told_where_it_belongs(given, tmp_path):
    (tmp_path / "model" / "checkpoint_3" / "state").mkdir(parents=True)
    (tmp_path / "model" / "model.json").touch()
    with pytest.raises(DataError, match=r"(?s)taser_jax's own.*INITIAL_CHECKPOINT_PATH"):
        fetch(tmp_path / given)


def test_an_export_of_two_models_is_told_how_both_are_named(tmp_path):
    (tmp_path / "router_config.json").touch()
    named = rf"PRETRAINED={tmp_path}/query and Pretrained.passage_source={tmp_path}/passage"
    with pytest.raises(DataError, match=named):
        fetch(tmp_path)


@pytest.mark.parametrize("source", ["./nowhere", "/no/where/at/all", "a/b/c", "~/x/y"])
def test_a_path_that_is_not_there_is_no_hub_id(source):
    with pytest.raises(DataError, match="no such directory"):
        fetch(source)


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(DataError, match=ADVICE):
            fetch("us/tiny")
        assert time.monotonic() - start < 5


def test_only_what_is_needed_is_downloaded_and_then_kept(served, monkeypatch):
    directory = fetch("us/tiny")
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.txt"}
    unreachable = mock.Mock(side_effect=OSError("name resolution failed"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    (served / "config.json").unlink()
    assert fetch("us/tiny") == directory
    assert (directory / "config.json").is_file()


def test_pytorch_files_where_there_is_nothing_else(served):
    (served / "model.safetensors").unlink()
    assert (fetch("us/tiny") / "pytorch_model.bin").is_file()


WITHOUT_PROMPTS = {
    "pooling": {"pooling_mode": "mean", "include_prompt": False},
    "prompts": {"query": "find: "},
}
NEW = {"kinds": ("Transformer", "Pooling"), "pooling": {"pooling_mode": "cls"}}
NEW["package"] = "sentence_transformers.sentence_transformer.modules"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, EncoderSettings(Pooling.MEAN, Normalization.L2, max_length=128)),
        (NEW, EncoderSettings(Pooling.CLS, Normalization.NONE, max_length=128)),
    ],
)
def test_pooling_norm_and_length(tmp_path, files, expected):
    assert read_encoder_settings(tmp_path) == EncoderSettings(Pooling.CLS, Normalization.NONE)
    assert read_encoder_settings(write_modules(tmp_path, **files)) == expected


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
    vocabulary = WordPieceVocabulary(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "find", ":", "text"])
    vocabulary.save(str(tmp_path / "words"))
    write_modules(tmp_path, prompts={"query": "find"})
    write_tokenizer(tmp_path / "words", tmp_path, max_length=8, prompt=(6, 3))
    assert hub.template_prompt(tmp_path) == (6, 3)
    assert hub.read_prompts(tmp_path, vocabulary) == ((6, 3, 4), (6, 3))
    write_tokenizer(tmp_path / "words", tmp_path, max_length=8)
    assert hub.read_prompts(tmp_path, vocabulary) == ((4,), ())


def test_a_local_folder_is_recorded_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "weights" / "bert").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.recorded_name("weights/bert") == str(tmp_path.resolve() / "weights" / "bert")
    assert hub.recorded_name("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense")}, "modules .*Dense"),
        ({"kinds": ("Transformer", "Pooling", "Pooling")}, "once each"),
        ({"kinds": ("Transformer",)}, "no Pooling"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling by max"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "pooling by cls, mean"),
        (WITHOUT_PROMPTS, "1_Pooling/config.json: a mean that leaves the tokens of prompts out"),
    ],
)
def test_what_a_dual_encoder_does_not_have_is_refused(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        read_encoder_settings(write_modules(tmp_path, **wrong))
    (tmp_path / "modules.json").write_text('[{"type": 3}]')
    with pytest.raises(DataError, match=r"modules\.json"):
        read_encoder_settings(tmp_path)
