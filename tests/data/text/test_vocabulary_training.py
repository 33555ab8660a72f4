import json
import random
import subprocess
import sys

import pytest

from taser_jax.data.text.vocabularies import load_vocabulary, train_vocabulary
from taser_jax.storage.errors import ConfigError, DataError

_SYLLABLES = ("wal", "ker", "ta", "ling", "größ", "naï", "ve", "漢", "字", "est", "ly", "un")
_RANDOM = random.Random(0)
TEXTS = [
    " ".join("".join(_RANDOM.choices(_SYLLABLES, k=_RANDOM.randint(1, 4))) for _ in range(8))
    for _ in range(100)
]

_TRAIN = """
import json, sys
from taser_jax.data.text.vocabularies import train_vocabulary
texts = json.load(open(sys.argv[1]))
print(train_vocabulary(texts, size=90, output_dir=sys.argv[2]).fingerprint)
"""


def test_same_texts_give_the_same_vocabulary_in_another_process(tmp_path):
    here = train_vocabulary(iter(TEXTS), size=90, output_dir=tmp_path / "here")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    command = [sys.executable, "-c", _TRAIN, str(tmp_path / "texts.json")]
    there = subprocess.run(
        [*command, str(tmp_path / "there")], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here.fingerprint
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
