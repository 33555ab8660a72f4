import json
import random
import subprocess
import sys

import pytest
import tensorflow as tf
from sentence_models import save_bert_pieces

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary, train_vocabulary
from taser_jax.interop.saved_model import TextGraph
from taser_jax.storage.errors import ConfigError, DataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cafe", "?"]
SMALL = WordPieceVocabulary(PIECES)


def test_saved_directory_and_graph_of_sentencepiece_give_the_same_ids(tmp_path):
    texts = [f"a question about the number {i} and its friends" for i in range(300)]
    save_bert_pieces(tmp_path / "vocabulary", texts, 200)
    loaded = load_vocabulary(tmp_path / "vocabulary")
    loaded.save(tmp_path / "again")
    assert load_vocabulary(tmp_path / "again").fingerprint == loaded.fingerprint
    assert (loaded.kind, loaded.cls_id, loaded.sep_id) == ("sentencepiece", 2, 3)
    ids = loaded.encode([*texts, "", "zebras", "[CLS] [SEP] [MASK]"])
    # The names of special tokens in a text are text.
    assert not {0, 2, 3, 4} & set(ids[-1])

    assert TextGraph(loaded).encode(tf.constant(texts)).to_list() == ids[: len(texts)]


def test_windows_line_ends_and_lone_surrogates(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("".join(f"{p}\r\n" for p in PIECES).encode())
    assert load_vocabulary(tmp_path / "vocab.txt").pieces == SMALL.pieces
    assert SMALL.encode(["the \ud83d cafe"]) == SMALL.encode(["the ? cafe"])


SPECIAL = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.txt", b"", r"no piece \[PAD\], "),
        ("vocab.txt", b"[PAD]\n[UNK]\n[SEP]\na\n", r"no piece \[CLS\]"),
        ("vocab.txt", b"[UNK]\n[PAD]\n[CLS]\n[SEP]\n", "not id 0"),
        ("vocab.txt", SPECIAL + b"a\nb\na\n", "piece 7 is 'a', which is a repetition"),
        ("vocab.txt", SPECIAL + b"\nb\n", "piece 5 is '', which is empty"),
        ("vocab.txt", b"[PAD]\n\xff\xfe\n", "not UTF-8"),
        ("vocabulary.json", b'{"format_version": 1, "kind": "bytes"}', 'kind is "bytes"'),
        ("vocabulary.json", b'{"format_version": 9, "kind": "wordpiece"}', "format version 9"),
        ("vocabulary.json", b"{", r"vocabulary\.json: not JSON"),
        ("vocabulary.json", b'{"format_version": 1}', "missing required field 'kind'"),
        ("spiece.model", b"not a model", "not a SentencePiece model"),
        ("spiece.model", b"", "the vocabulary is empty"),
        ("nothing", None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, file, content, message):
    if file == "vocabulary.json":
        SMALL.save(tmp_path)
        (tmp_path / "checksums.txt").unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_vocabulary(tmp_path / file if content is None else tmp_path)


def test_changed_files_are_refused(tmp_path):
    SMALL.save(tmp_path)
    loaded = load_vocabulary(tmp_path)
    assert (loaded.kind, loaded.cls_id, loaded.sep_id) == ("wordpiece", 2, 3)
    (tmp_path / "vocab.txt").write_bytes(SMALL.content + b"more\n")
    with pytest.raises(DataError, match=r"vocab\.txt: damaged"):
        load_vocabulary(tmp_path)


_SYLLABLES = ("wal", "ker", "ta", "ling", "größ", "naï", "ve", "漢", "字", "est", "ly", "un")
_RANDOM = random.Random(0)
TEXTS = [
    " ".join("".join(_RANDOM.choices(_SYLLABLES, k=_RANDOM.randint(1, 4))) for _ in range(8))
    for _ in range(100)
]

_TRAIN = """
import json, sys
from taser_jax.data.text.wordpiece import train_vocabulary
texts = json.load(open(sys.argv[1]))
print(train_vocabulary(texts, size=90, output_dir=sys.argv[2]).fingerprint)
"""


def test_same_texts_give_the_same_vocabulary_in_another_process(tmp_path):
    here = train_vocabulary(iter(TEXTS), size=90, output_dir=tmp_path / "here")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    command = [sys.executable, "-c", _TRAIN, str(tmp_path / "texts.json"), str(tmp_path / "there")]
    assert subprocess.check_output(command, text=True).strip() == here.fingerprint
    assert load_vocabulary(tmp_path / "there").fingerprint == here.fingerprint


def test_wordpiece_merges_by_hand(tmp_path):
    """ "ab" x 3: letters, then the only merge that occurs twice or more."""
    made = train_vocabulary(["ab ab", "Ab c", "á"], size=64, output_dir=tmp_path)
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert made.pieces == (*specials, "##b", "a", "b", "c", "ab")
    assert made.encode(["AB b", "bb", "ba"]) == [[9, 7], [7, 5], [1]]


def test_rare_letters_do_not_crowd_out_a_small_vocabulary(tmp_path):
    texts = ["common words are here"] * 50 + [chr(0x4E00 + i) * 2 for i in range(500)]
    made = train_vocabulary(texts, size=100, output_dir=tmp_path)
    assert made.size <= 100
    assert sum(piece >= "\u4e00" for piece in made.pieces) <= 25
    assert len(made.encode(["common words"])[0]) == 2


def test_what_cannot_be_learned_from(tmp_path):
    with pytest.raises(DataError, match="no words in the texts"):
        train_vocabulary(["", "  "], size=100, output_dir=tmp_path)
    with pytest.raises(ConfigError, match="size 5"):
        train_vocabulary(TEXTS, size=5, output_dir=tmp_path)
