"""T5's `<extra_id_N>` after the pieces of a SentencePiece model."""

import json

import pytest
import seqio
from sentence_models import t5_model
from written_files import write

from taser_jax.data.text.vocabularies import SentencePieceVocabulary, load_vocabulary
from taser_jax.storage.errors import DataError

TEXTS = ["which river flows through the old town", "a bear lives there", "nq fever trex"]
PIECES = 32


@pytest.fixture(scope="module")
def model() -> bytes:
    return t5_model(TEXTS * 20, PIECES)


@pytest.fixture
def checkpoint(tmp_path, model):
    """A T5 checkpoint's directory, as far as its vocabulary goes."""
    return write(tmp_path / "t5" / "spiece.model", model).parent


def test_ids_and_size_are_seqios(model, checkpoint):
    ours = SentencePieceVocabulary(model, extra_ids=100)
    theirs = seqio.SentencePieceVocabulary(str(checkpoint / "spiece.model"), extra_ids=100)
    assert ours.size == theirs.vocab_size == PIECES + 100
    for number in (0, 1, 42, 99):
        name = f"<extra_id_{number}>"
        assert theirs.decode([ours.id_of(name)]) == name
    assert (ours.id_of("<extra_id_0>"), ours.id_of("<extra_id_99>")) == (PIECES + 99, PIECES)
    for nothing in ("<extra_id_100>", "<extra_id_>", "extra_id_1", "▁<extra_id_1>"):
        assert ours.id_of(nothing) is None
    plain = SentencePieceVocabulary(model)
    assert plain.id_of("<extra_id_0>") is None
    assert ours.encode(TEXTS) == [theirs.encode(text) for text in TEXTS]
    # Texts never contain them.
    texts = [*TEXTS, "<extra_id_1> which river", ""]
    assert ours.encode(texts) == plain.encode(texts)
    assert max(map(max, ours.encode(texts[:-1]))) < PIECES


def test_saved_and_loaded(tmp_path, model):
    plain, extra = (SentencePieceVocabulary(model, extra_ids=n) for n in (0, 100))
    assert plain.fingerprint != extra.fingerprint
    for name, made in (("plain", plain), ("extra", extra)):
        made.save(str(tmp_path / name))
        loaded = load_vocabulary(tmp_path / name)
        assert (loaded.size, loaded.fingerprint) == (made.size, made.fingerprint)
        assert loaded.id_of("<extra_id_1>") == made.id_of("<extra_id_1>")
    # What was saved before there were extra ids is read and written as it was.
    assert "extra_ids" not in json.loads((tmp_path / "plain" / "vocabulary.json").read_text())
    with pytest.raises(DataError, match=r"(?s)it has 100 extra ids, requested were 0"):
        load_vocabulary(tmp_path / "extra", extra_ids=0)


def test_a_checkpoint_has_the_extra_ids_of_its_tokenizer_config(checkpoint):
    assert load_vocabulary(checkpoint).size == PIECES
    (checkpoint / "tokenizer_config.json").write_text('{"extra_ids": 100, "eos_token": "</s>"}')
    for path in (checkpoint, checkpoint / "spiece.model"):
        assert load_vocabulary(path).size == PIECES + 100
    assert load_vocabulary(checkpoint, extra_ids=7).size == PIECES + 7


def test_what_cannot_be(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(DataError, match="it has 0 extra ids, requested were 5"):
        load_vocabulary(tmp_path, extra_ids=5)
    own = t5_model(TEXTS * 20, PIECES, user_defined_symbols=["<extra_id_0>"])
    with pytest.raises(DataError, match="pieces of their names"):
        SentencePieceVocabulary(own, extra_ids=100)
    assert SentencePieceVocabulary(own).id_of("<extra_id_0>") is not None
