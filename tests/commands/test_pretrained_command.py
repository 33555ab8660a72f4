"""`taser import`, and trainings that start from pretrained weights, on a tiny Hugging Face BERT."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny_training
from bert_checkpoints import write_checkpoint, write_with_vocabulary
from safetensors.numpy import load_file, save_file
from sentence_models import save_bert_pieces
from small_world import gin, succeed

from taser_jax.assembly.model_directory import load_model
from taser_jax.assembly.run_record import text_settings
from taser_jax.commands.import_model import import_model
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary, wordpiece_tokenizer
from taser_jax.data.token_store.store import QueryNormalization, Titles, TokenStore
from taser_jax.interop.pretrained import Pretrained, check_words, pretrained_bert
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import ExpertConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retriever import Retriever
from taser_jax.storage.errors import ConfigError, DataError, TaserError

NO_DROPOUT = BertConfig(dropout_rate=0.0, attention_dropout_rate=0.0)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]
WORDS += [f"w{i}" for i in range(tiny_training.VOCABULARY_SIZE - len(WORDS))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    """Four blocks, 16 wide, with the tiny token store's 96 words."""
    directory = tmp_path_factory.mktemp("pretrained") / "bert"
    return write_with_vocabulary(directory, WORDS, num_layers=4)


def store_of(directory: pathlib.Path, vocabulary: WordPieceVocabulary) -> pathlib.Path:
    """The tiny token store with a real vocabulary."""
    tiny_training.write_token_store(directory)
    vocabulary.save(TokenStore.open(directory).vocabulary_directory)
    (directory / "checksums.txt").unlink()
    return directory


def taser(checkpoint: pathlib.Path, **changes) -> DualEncoderConfig:
    config = DualEncoderConfig(
        bert=pretrained_bert(checkpoint, num_layers=2, numerics=NO_DROPOUT),
        experts=ExpertConfig(num_experts=2, blocks=(2,)),
        pooling=Pooling.MEAN,
    )
    return dataclasses.replace(config, **changes)


def start(model_dir, store_dir, checkpoint, **changes):
    config = tiny_training.training_config(train_steps=2, validates=False)
    changes["pretrained"] = Pretrained(str(checkpoint), num_layers=2)
    config = dataclasses.replace(config, **changes)
    tiny_training.start(model_dir, store_dir, config, model=taser(checkpoint))


def load_into(model_dir, checkpoint, **changes):
    """Imports the checkpoint; `changes` are further arguments of `import_model`."""
    pretrained = Pretrained(str(checkpoint), num_layers=2)
    given = {"model": taser(checkpoint), "pretrained": pretrained} | changes
    return import_model(model_dir=str(model_dir), **given)


@pytest.mark.slow
def test_training_starts_from_the_pretrained_weights(checkpoint, tmp_path):
    store_dir = store_of(tmp_path / "tokens", load_vocabulary(checkpoint))
    # A step of rate zero leaves parameters where training found them.
    still = OptimizerConfig(learning_rate=0.0, warmup_steps=0)
    start(tmp_path / "trained", store_dir, checkpoint, optimizer=still)
    load_into(tmp_path / "imported", checkpoint)
    trained, imported = (load_model(tmp_path / name) for name in ("trained", "imported"))
    jax.tree.map(np.testing.assert_array_equal, trained.params, imported.params)
    facts = json.loads((tmp_path / "trained" / "run.json").read_text())
    assert facts["pretrained"] == str(checkpoint)
    lengths = (tiny_training.QUERY_LENGTH, tiny_training.PASSAGE_LENGTH)
    assert (facts["query_length"], facts["passage_length"]) == lengths


def test_texts_of_another_vocabulary_are_refused(checkpoint, tmp_path):
    other = WordPieceVocabulary([*WORDS[:-1], "other"])
    with pytest.raises(ConfigError, match="other pieces, or splits texts otherwise"):
        start(tmp_path / "model", store_of(tmp_path / "tokens", other), checkpoint)


def test_other_words_or_another_splitting_are_refused(checkpoint, tmp_path):
    """Of a vocab.txt, of a tokenizer.json alone, as transformers writes it today, and of pieces."""
    alone, pieces = tmp_path / "alone", tmp_path / "pieces"
    shutil.copytree(checkpoint, alone)
    ids = {word: i for i, word in enumerate(WORDS)}
    wordpiece_tokenizer(ids, lower_case=True).save(str(alone / "tokenizer.json"))
    (alone / "vocab.txt").unlink()
    WordPieceVocabulary([*WORDS[:-2], *WORDS[:-3:-1]]).save(tmp_path / "swapped")
    WordPieceVocabulary(WORDS, lower_case=False).save(tmp_path / "cased")
    save_bert_pieces(tmp_path / "others", ["other words"] * 9, 64)
    save_bert_pieces(pieces, WORDS, 64)
    (pieces / "sentencepiece.model").rename(pieces / "spiece.model")
    (pieces / "vocabulary.json").unlink()
    check_words(alone, checkpoint)
    check_words(pieces, pieces)
    for weights, used, kinds in (
        (alone, tmp_path / "swapped", ("wordpiece", "wordpiece")),
        (checkpoint, tmp_path / "cased", ("wordpiece", "wordpiece")),
        (checkpoint, pieces, ("sentencepiece", "wordpiece")),
        (pieces, checkpoint, ("wordpiece", "sentencepiece")),
        (pieces, tmp_path / "others", ("sentencepiece", "sentencepiece")),
    ):
        message = r"(?s)vocabulary \({}\) has other pieces.* of the weights \({}\).*VOCABULARY={}"
        with pytest.raises(ConfigError, match=message.format(*kinds, weights)):
            check_words(weights, used)


def test_import_train_and_retriever_refuse_alike(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "bert")
    with open(source / "vocab.txt", "a", encoding="utf-8") as file:
        file.write("more\n")
    store_dir = store_of(tmp_path / "tokens", WordPieceVocabulary([*WORDS, "more"]))
    message = r"(?s)97 ids.*at most 96.*config\.json, field 'vocab_size'"
    with pytest.raises(TaserError, match=message):
        load_into(tmp_path / "model", source)
    with pytest.raises(TaserError, match=message):
        start(tmp_path / "model", store_dir, source)
    with pytest.raises(TaserError, match=message):
        Retriever.from_pretrained(source)
    assert not (tmp_path / "model").exists()


def test_import_refuses_a_directory_that_holds_another_model(checkpoint, tmp_path, caplog):
    """The same import again, as after a kill before its end was reported, is left as it is."""
    count = load_into(tmp_path / "model", checkpoint)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "model").rglob("*")}
    with caplog.at_level("INFO"):
        assert load_into(tmp_path / "model", checkpoint) == count
    assert "the same import is here already" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "model").rglob("*")} == written
    for other in (
        {"model": taser(checkpoint, experts=ExpertConfig())},
        {"feature_lengths": {"query": 8, "passage": 12}},
        {"config_text": "import_model.seed = 1"},
    ):
        with pytest.raises(ConfigError, match="something here already"):
            load_into(tmp_path / "model", checkpoint, **other)
    source = shutil.copytree(checkpoint, tmp_path / "bert")
    load_into(tmp_path / "copied", source)
    tensors = load_file(source / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    with pytest.raises(ConfigError, match="something here already"):
        load_into(tmp_path / "copied", source)


def test_import_keeps_the_prompts_of_both_roles_and_how_titles_are_joined(checkpoint, tmp_path):
    """Of an export, whose tokenizer of passages adds theirs; of another, whose config names one."""
    roles = {role: tmp_path / role for role in ("query", "passage")}
    for directory in roles.values():
        shutil.copytree(checkpoint, directory)
    prompts = json.dumps({"prompts": {"query": "a b"}})
    (roles["query"] / "config_sentence_transformers.json").write_text(prompts)
    (roles["query"] / "modules.json").write_text("[]")
    write_tokenizer(checkpoint, roles["passage"], max_length=12, prompt=(6, 3))
    pretrained = Pretrained(str(roles["query"]), 2, passage_source=str(roles["passage"]))
    model = taser(checkpoint, experts=ExpertConfig(), towers=Towers.SEPARATE)
    load_into(tmp_path / "model", checkpoint, model=model, pretrained=pretrained)
    facts = json.loads((tmp_path / "model" / "run.json").read_text())
    assert facts["query_prompt"] == [WORDS.index("a"), WORDS.index("b")]
    assert facts["passage_prompt"] == [6, 3]
    settings = text_settings(facts, None)
    assert (settings.queries.prompt, settings.passage_prompt) == ((5, 6), (6, 3))
    assert settings.titles is Titles.JOIN
    # Above the two roles of an export is how it was trained.
    trained = {"titles": "include", "query_normalization": "curly_apostrophe"}
    (tmp_path / "export.json").write_text(json.dumps(trained))
    load_into(tmp_path / "again", checkpoint, model=model, pretrained=pretrained)
    settings = text_settings(json.loads((tmp_path / "again" / "run.json").read_text()), None)
    assert settings.titles is Titles.INCLUDE
    assert settings.queries.normalization is QueryNormalization.CURLY_APOSTROPHE


def test_import_without_a_vocabulary_says_what_to_give(checkpoint, tmp_path):
    bare, _ = write_checkpoint(tmp_path / "bare", vocab_size=tiny_training.VOCABULARY_SIZE)
    with pytest.raises(DataError, match=r"vocab\.txt"):
        load_into(tmp_path / "model", bare, model=taser(checkpoint))
    with pytest.raises(ConfigError, match="expected: of query and passage"):
        load_into(tmp_path / "model", checkpoint, feature_lengths={"query": 32})
    with pytest.raises(ConfigError, match="4 tokens or more"):
        load_into(tmp_path / "model", checkpoint, feature_lengths={"query": -3, "passage": 32})
    assert not list(tmp_path.glob("model/*"))


def test_command_line_takes_sizes_from_the_checkpoint(checkpoint, tmp_path):
    model_dir = tmp_path / "model"
    where = gin(PRETRAINED=checkpoint, MODEL_DIR=model_dir, PRETRAINED_LAYERS=3)
    succeed("import", *where, *gin("DualEncoderConfig", pooling="mean"))
    config = load_model(model_dir).model.config
    assert (config.bert.num_layers, config.bert.embed_dim, config.pooling) == (3, 16, Pooling.MEAN)
    assert "PRETRAINED_LAYERS = 3" in (model_dir / "config.gin").read_text()
    words = (model_dir / "vocabulary" / "vocab.txt").read_text(encoding="utf-8")
    assert words == (checkpoint / "vocab.txt").read_text(encoding="utf-8")
