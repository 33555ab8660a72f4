"""Vocabularies that are a tokenizer.json, as encoders other than BERT have them."""

import json

import pytest
import tokenizers
from bert_checkpoints import SPECIAL, byte_level_tokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from taser_jax.data.text.preprocessors import passage_ids, query_ids
from taser_jax.data.text.vocabularies import TokenizerJsonVocabulary, load_vocabulary
from taser_jax.data.token_store.store import QuerySettings
from taser_jax.interop.saved_model import TextGraph
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.storage.errors import ConfigError

TEXTS = ["The cats sat on the mat.", "", " été  x²", "a </s> in a text", "cats on the mat " * 9]


def roberta():
    return byte_level_tokenizer(TEXTS, size=320)


def xlm_roberta():
    pieces = [*SPECIAL, "▁", *"abcdefghijklmnopqrstuvwxyzT.</>²é", "▁the", "▁cat", "s"]
    scores = [(piece, -float(id)) for id, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    around = {"single": "<s> $A </s>", "special_tokens": [("<s>", 0), ("</s>", 2)]}
    tokenizer.post_processor = processors.TemplateProcessing(**around)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def mpnet():
    # BERT's own special tokens are ordinary pieces, as in microsoft/mpnet-base.
    pieces = [*SPECIAL, "[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz./<>"]
    pieces += ["the", "cat", "##s", "on"]
    ids = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture(params=[roberta, xlm_roberta, mpnet])
def tokenizer(request, tmp_path):
    tokenizer = request.param()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


def test_ids_are_those_of_tokenizers(tokenizer, tmp_path):
    vocabulary = load_vocabulary(tmp_path)
    assert isinstance(vocabulary, TokenizerJsonVocabulary)
    assert (vocabulary.cls_id, vocabulary.sep_id) == (0, 2)
    assert vocabulary.size == tokenizer.get_vocab_size()
    ids = vocabulary.encode(TEXTS)
    for text, text_ids in zip(TEXTS, ids, strict=True):
        if "</s>" not in text:
            assert text_ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids[0]) > 5
    # A special token's name in a text is text, except in Unigram models, which have it as a piece.
    special = {0, 1, 2, 4} & {id for row in ids for id in row}
    is_unigram = json.loads(tokenizer.to_str())["model"]["type"] == "Unigram"
    assert special == ({2} if is_unigram else set())


def test_a_prompt_with_a_space_and_its_text_are_split_as_one(tokenizer, tmp_path):
    vocabulary = load_vocabulary(tmp_path)
    texts = [text for text in TEXTS if text and "</s>" not in text]
    [prompt] = vocabulary.encode(["the mat: "])
    whole = [tokenizer.encode(f"the mat: {text}", add_special_tokens=False).ids for text in texts]
    settings = QuerySettings(prompt=tuple(prompt))
    assert query_ids(texts, vocabulary, None, settings) == [[0, *row, 2] for row in whole]
    rows = passage_ids([""] * len(texts), texts, vocabulary, 16, prompt=prompt)
    assert rows == [[0, *row[:14], 2] for row in whole]
    # Without one, it is a word of its own.
    [prompt] = vocabulary.encode(["the"])
    apart = [[0, *prompt, *row, 2] for row in vocabulary.encode(texts)]
    assert query_ids(texts, vocabulary, None, QuerySettings(prompt=tuple(prompt))) == apart


def test_what_is_saved_comes_back(tokenizer, tmp_path):
    vocabulary = load_vocabulary(tmp_path)
    vocabulary.save(tmp_path / "saved")
    again = load_vocabulary(tmp_path / "saved")
    assert again.fingerprint == vocabulary.fingerprint
    assert again.encode(TEXTS) == vocabulary.encode(TEXTS)


def test_transformers_reads_what_is_written(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary = load_vocabulary(tmp_path)
    for before in ((), *vocabulary.encode(["on the mat", "on the mat: "])):
        output, length = tmp_path / f"written{len(before)}", 12 + len(before)
        output.mkdir()
        write_tokenizer(tmp_path, output, max_length=length, prompt=before)
        theirs = transformers.AutoTokenizer.from_pretrained(output)
        expected = query_ids(TEXTS, vocabulary, length, QuerySettings(prompt=tuple(before)))
        assert theirs(TEXTS, truncation=True)["input_ids"] == expected
        padded = theirs(TEXTS, truncation=True, padding=True)
        assert {len(row) for row in padded["input_ids"]} == {max(map(len, expected))}
        assert [sum(row) for row in padded["attention_mask"]] == list(map(len, expected))
        titles = ["A cat"] * len(TEXTS)
        encoded = theirs(titles, TEXTS, truncation=True)["input_ids"]
        assert encoded == passage_ids(titles, TEXTS, vocabulary, length, prompt=before)


def test_what_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="TensorFlow has no tokenizer"):
        TextGraph(load_vocabulary(tmp_path))
    value = json.loads(tokenizer.to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(ConfigError, match="0 special tokens around a text"):
        load_vocabulary(tmp_path)
