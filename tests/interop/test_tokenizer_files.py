import json
import subprocess

import pytest
from sentence_models import save_bert_pieces
from tiny_source import T5_PASSAGES, T5_QUERIES, T5_TEXTS, t5_vocabulary
from tokenizers import Tokenizer

from taser_jax.data.text.preprocessors import passage_ids, query_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.data.token_store.store import QuerySettings
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


def pieces_of_bert(directory):
    learned = [*T5_TEXTS, *json.__doc__.splitlines(), *subprocess.__doc__.splitlines()]
    save_bert_pieces(directory, learned, 100)


def pieces_of_t5(directory):
    t5_vocabulary().save(str(directory))


# Of T5's ids, the last is one of its extra ids, after those of the model.
@pytest.mark.parametrize("prompt", [(), (5, 3), (41,)])
@pytest.mark.parametrize("save", [pieces_of_bert, pieces_of_t5])
def test_ids_of_a_sentencepiece_model_are_the_vocabularys(tmp_path, save, prompt):
    save(tmp_path / "vocabulary")
    vocabulary = load_vocabulary(tmp_path / "vocabulary")
    tokenizer = Tokenizer.from_file(str(written(tmp_path, prompt=prompt) / "tokenizer.json"))
    odd = ["  odd   spaces ", "½ ﬁ Ⅷ ÅNGSTRÖM 北京 😀", "the\tcity\nof", "wide\u3000\u00a0"]
    texts, pairs = [*T5_QUERIES, *odd], [pair for pair in T5_PASSAGES if pair[0]]
    for length in (100, 12):
        tokenizer.enable_truncation(length)
        ours = query_ids(texts, vocabulary, length, QuerySettings(prompt=tuple(prompt)))
        assert [tokenizer.encode(text).ids for text in texts] == [list(ids) for ids in ours]
        ours = passage_ids(*zip(*pairs, strict=True), vocabulary, length, prompt=prompt)
        assert [tokenizer.encode(*pair).ids for pair in pairs] == ours
    assert load_vocabulary(tmp_path / "output").fingerprint == vocabulary.fingerprint


@pytest.mark.parametrize("without", ["vocab.txt", "tokenizer_config.json", "tokenizer.json"])
def test_it_comes_back_from_what_is_there(vocabulary, tmp_path, without):
    output = written(tmp_path)
    (output / without).unlink()
    assert load_vocabulary(output).fingerprint == vocabulary.fingerprint
