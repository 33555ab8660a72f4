"""T5's `<extra_id_N>` after the pieces of a SentencePiece model."""

import json

import pytest
import seqio
from sentence_models import t5_model

from taser_jax.commands.tokenize import tokenize
from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.data.seqio_tasks.registry import add_retrieval_task, find_mixture
from taser_jax.data.seqio_tasks.tokenize import tokenize_collection
from taser_jax.data.text.preprocessors import Prompt, TaskPrompt, query_ids
from taser_jax.data.text.sentencepiece import SentencePieceVocabulary
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query

TEXTS = ["which river flows through the old town", "a bear lives there", "nq fever trex"]
PIECES = 32


@pytest.fixture(scope="module")
def model() -> bytes:
    return t5_model(TEXTS * 20, PIECES)


@pytest.fixture
def checkpoint(tmp_path, model):
    """A T5 checkpoint's directory, as far as its vocabulary goes."""
    directory = tmp_path / "t5"
    directory.mkdir()
    (directory / "spiece.model").write_bytes(model)
    return directory


def configured(checkpoint, **settings):
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    return checkpoint


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
    assert SentencePieceVocabulary(model).id_of("<extra_id_0>") is None
    assert ours.encode(TEXTS) == [theirs.encode(text) for text in TEXTS]


def test_t5s_own_numbers(monkeypatch, model):
    """32,000 pieces and 100 extra ids: the published model's vocabulary, without its file."""
    ours = SentencePieceVocabulary(model, extra_ids=100)
    monkeypatch.setattr(ours, "_processor", _Pieces(32_000))
    assert ours.size == 32_100
    assert (ours.id_of("<extra_id_0>"), ours.id_of("<extra_id_1>")) == (32_099, 32_098)


class _Pieces:
    def __init__(self, size):
        self._size = size

    def get_piece_size(self):
        return self._size

    def piece_to_id(self, piece):
        return 2

    def id_to_piece(self, id):
        return "<unk>"


def test_texts_never_contain_them(model):
    plain, extra = (SentencePieceVocabulary(model, extra_ids=n) for n in (0, 100))
    texts = [*TEXTS, "<extra_id_1> which river", ""]
    assert extra.encode(texts) == plain.encode(texts)
    assert max(max(ids, default=0) for ids in extra.encode(texts)) < PIECES


def test_decoding_names_them(model):
    vocabulary = SentencePieceVocabulary(model, extra_ids=3)
    words = vocabulary.encode(["a bear", "old town"])
    first, second = (vocabulary.id_of(f"<extra_id_{n}>") for n in (0, 1))
    ids = [second, *words[0], first, second, *words[1], vocabulary.sep_id, 0]
    assert vocabulary.decode(ids) == "<extra_id_1> a bear <extra_id_0> <extra_id_1> old town"
    assert vocabulary.decode([]) == ""


def test_saved_and_loaded(tmp_path, model):
    plain, extra = (SentencePieceVocabulary(model, extra_ids=n) for n in (0, 100))
    assert plain.fingerprint != extra.fingerprint
    for name, made in (("plain", plain), ("extra", extra)):
        made.save(str(tmp_path / name))
        found = load_vocabulary(tmp_path / name)
        assert (found.size, found.fingerprint) == (made.size, made.fingerprint)
        assert found.id_of("<extra_id_1>") == made.id_of("<extra_id_1>")
    # What was saved before there were extra ids is read and written as it was.
    assert "extra_ids" not in json.loads((tmp_path / "plain" / "vocabulary.json").read_text())
    with pytest.raises(DataError, match=r"(?s)it has 100 extra ids, requested were 0"):
        load_vocabulary(tmp_path / "extra", extra_ids=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_ids": 100},
        {"additional_special_tokens": [f"<extra_id_{i}>" for i in range(100)]},
        {"additional_special_tokens": [{"content": f"<extra_id_{i}>"} for i in range(100)]},
        {
            "extra_ids": 100,
            "added_tokens_decoder": {
                "0": {"content": "<pad>"},
                **{str(PIECES + 99 - i): {"content": f"<extra_id_{i}>"} for i in range(100)},
            },
        },
    ],
)
def test_a_checkpoints_tokenizer_config_has_them(checkpoint, settings):
    configured(checkpoint, **settings)
    for path in (checkpoint, checkpoint / "spiece.model"):
        assert load_vocabulary(path).size == PIECES + 100
    assert load_vocabulary(checkpoint, extra_ids=0).size == PIECES


def test_a_checkpoint_that_says_none_has_none(checkpoint):
    assert load_vocabulary(checkpoint).size == PIECES
    assert load_vocabulary(checkpoint, extra_ids=7).size == PIECES + 7
    configured(checkpoint, additional_special_tokens=None, extra_ids=0, eos_token="</s>")
    assert load_vocabulary(checkpoint).size == PIECES


def test_what_cannot_be(model, tmp_path):
    with pytest.raises(DataError, match="-1 extra ids"):
        SentencePieceVocabulary(model, extra_ids=-1)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    with pytest.raises(DataError, match="5 extra ids for a WordPiece vocabulary"):
        load_vocabulary(tmp_path, extra_ids=5)
    own = t5_model(TEXTS * 20, PIECES, user_defined_symbols=["<extra_id_0>"])
    with pytest.raises(DataError, match="pieces of their names"):
        SentencePieceVocabulary(own, extra_ids=100)
    assert SentencePieceVocabulary(own).id_of("<extra_id_0>") is not None


@pytest.mark.usefixtures("empty_registries")
def test_taco_drs_prompt_in_a_token_store(checkpoint, tmp_path):
    data_dir = str(tmp_path / "data")
    write_collection(data_dir, "toy", [Passage("0", "a bear lives there", title="bear")])
    query = Query("q", "which river", "river", positives=(0,))
    write_queries(data_dir, "toy", "river", "train", [query])
    prompt = TaskPrompt(Prompt.NAME, name="nq", separator="<extra_id_1>")
    add_retrieval_task("toy_river", collection="toy", task="river", prompt=prompt)

    def made(name, **options):
        tokenize(
            data_dir=data_dir,
            mixture_or_task="toy_river",
            vocabulary=str(checkpoint),
            feature_lengths={"query": 16, "passage": 16},
            output_dir=str(tmp_path / name),
            **options,
        )
        return tmp_path / name

    with pytest.raises(ConfigError, match=r"(?s)not a piece of the vocabulary.*extra_ids=100"):
        made("without")
    vocabulary = load_vocabulary(checkpoint, extra_ids=100)
    expected = [
        *vocabulary.encode(["nq"])[0],
        PIECES + 98,
        *vocabulary.encode(["which river"])[0],
        vocabulary.sep_id,
    ]
    assert query_ids(["which river"], vocabulary, 16, prompt=prompt.ids(vocabulary))[0] == expected
    directory = made("with", extra_ids=100)
    store = tokenize_collection(
        data_dir=data_dir,
        mixture=find_mixture("toy_river"),
        vocabulary=vocabulary,
        query_length=16,
        passage_length=16,
        output_dir=directory,
    )
    found = store.queries("river", "train").tokens([0])
    assert found.ids[0][found.mask[0]].tolist() == expected
    assert store.metadata.vocabulary_size == PIECES + 100
    saved = load_vocabulary(store.vocabulary_directory)
    assert (saved.size, saved.fingerprint) == (PIECES + 100, vocabulary.fingerprint)
