import json
import subprocess

import pytest
from sentence_models import save_bert_pieces
from tokenizers import Tokenizer

from taser_jax.data.text.preprocessors import query_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.interop.tokenizer_files import write_tokenizer

PIECES = (
    *("[PAD]", "[UNK]", "[MASK]", "[SEP]", "[CLS]"),
    *("the", "cat", "##s", "Cat", ",", "!", "e", "##te", "été", "sat", "on", "猫", "un", "##do"),
)
TEXTS = ("The cats, un-undo!", "Été ETE été", "猫cat sat on猫", "Cat", "", "\u200bthe\tcat\u0000s")


@pytest.fixture(params=[True, False], ids=["uncased", "cased"])
def vocabulary(request, tmp_path):
    vocabulary = WordPieceVocabulary(PIECES, lower_case=request.param)
    vocabulary.save(str(tmp_path / "vocabulary"))
    return vocabulary


def written(tmp_path, **kwargs):
    output = tmp_path / "output"
    output.mkdir()
    write_tokenizer(tmp_path / "vocabulary", output, max_length=20, **kwargs)
    return output


def test_ids_are_the_vocabularys(vocabulary, tmp_path):
    tokenizer = Tokenizer.from_file(str(written(tmp_path) / "tokenizer.json"))
    expected = vocabulary.encode(TEXTS)
    assert len({tuple(ids) for ids in expected}) > 3
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [4, *ids, 3]


def test_settings(vocabulary, tmp_path):
    output = written(tmp_path)
    settings = json.loads((output / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["do_lower_case"] is vocabulary.lower_case
    assert settings["model_max_length"] == 20
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert settings["cls_token"] == "[CLS]"
    assert set(PIECES[:5]) <= set(map(str, settings.values()))


@pytest.mark.parametrize("prompt", [(), (7, 3)])
def test_ids_of_a_sentencepiece_of_berts_are_the_vocabularys(tmp_path, prompt):
    texts = ["the river flows", "a dog and a cat " * 9, ""]
    learned = [*texts, *json.__doc__.splitlines(), *subprocess.__doc__.splitlines()]
    save_bert_pieces(tmp_path / "vocabulary", learned, 100)
    tokenizer = Tokenizer.from_file(str(written(tmp_path, prompt=prompt) / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    ours = query_ids(texts, load_vocabulary(tmp_path / "vocabulary"), 12, prompt=prompt)
    assert [tokenizer.encode(text).ids for text in texts] == [list(ids) for ids in ours]


@pytest.mark.parametrize("without", ["vocab.txt", "tokenizer_config.json", "tokenizer.json"])
def test_it_comes_back_from_what_is_there(vocabulary, tmp_path, without):
    output = written(tmp_path)
    (output / without).unlink()
    assert load_vocabulary(output).fingerprint == vocabulary.fingerprint
