"""Tokenizer files of Hugging Face BERTs: one reader, with the ids of `tokenizers`, or a refusal."""

import json
import unicodedata

import pytest
import tokenizers
from written_files import write_all

from taser_jax.data.text.vocabularies import TokenizerJsonVocabulary, load_vocabulary
from taser_jax.data.text.wordpiece import WordPieceVocabulary, wordpiece_tokenizer
from taser_jax.storage.errors import ConfigError, DataError, TaserError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]"]
PIECES += ["new", "##word", "cafe", "café", "Cafe", "世", "界", "世界", "e", "##e", "é", "##é"]
IDS = {piece: i for i, piece in enumerate(PIECES)}
TEXTS = ["Café cafe CAFÉ newword", "世界 a世b", "É e\u0301 Ée", "[unused1] [CLS]", ""]
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
SPECIAL = [
    _FLAGS | {"id": i, "content": piece, "special": True}
    for i, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
]


def write(directory, *, tokenizer=None, config=None, words=PIECES, model_config=None):
    """A directory as transformers writes it; None leaves a file out."""
    values = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    values["config.json"] = model_config
    files = {name: json.dumps(value) for name, value in values.items() if value is not None}
    if words is not None:
        files["vocab.txt"] = "".join(f"{word}\n" for word in words)
    return write_all(directory, files)


def tokenizer_json(*, lower_case=True, added=(), **parts):
    """A tokenizer.json of BERT, with changed fields of its parts."""
    value = json.loads(wordpiece_tokenizer(dict(IDS), lower_case=lower_case).to_str())
    around = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    changed = {name: value[name] | changes for name, changes in parts.items()}
    return value | {"added_tokens": [*SPECIAL, *added], "post_processor": around} | changed


ADDED = _FLAGS | {"id": 18, "content": "newword", "special": False}


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_json(normalizer={"strip_accents": False}),
        tokenizer_json(normalizer={"handle_chinese_chars": False}),
        tokenizer_json(normalizer={"clean_text": False}),
        tokenizer_json(model={"unk_token": "[MASK]"}),
        tokenizer_json(model={"vocab": {**IDS, "##é": 40}}),
        tokenizer_json(added=[ADDED]),
        tokenizer_json(added=[{**ADDED, "id": 6, "content": "new"}]),
    ],
)
def test_tokenizers_of_other_settings_are_taken_as_they_are(tmp_path, tokenizer):
    vocabulary = load_vocabulary(write(tmp_path, tokenizer=tokenizer))
    assert isinstance(vocabulary, TokenizerJsonVocabulary)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True  # "[CLS]" in a text is ordinary text
    expected = [e.ids for e in theirs.encode_batch(TEXTS, add_special_tokens=False)]
    assert vocabulary.encode(TEXTS) == expected
    assert (vocabulary.cls_id, vocabulary.sep_id) == (2, 3)
    ids = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    assert vocabulary.size == 1 + max(ids.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"newword": 18}, "added tokens"),
        ("tokenizer_config.json", {"strip_accents": False}, "strip_accents is not True"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "tokenize_chinese_chars is"),
    ],
)
def test_words_alone_of_other_settings_are_refused(tmp_path, name, content, message):
    write(tmp_path)
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s){name}: {message}.*fix: write a tokenizer\.json"):
        load_vocabulary(tmp_path)


WHOLE_TEXTS = (
    *("straße Straße STRASSE ẞ", "ΟΔΟΣ ΣΑΣ Σ σς", "é é ́ Å ñ", "İstanbul ıI İ", "ﬁne Ⅻ ㎏ ﷺ"),
    *("中文字 ab漢字cd 한국어 かな", "😀😀 a😀b 👩\u200d👩\u200d👧", "", "   "),
    "a\tb\nc\rd\r\ne\x0bf\x0cg\x85h",
)


@pytest.mark.parametrize("lower_case", [True, False])
def test_every_character_has_the_id_that_tokenizers_gives(tmp_path, lower_case):
    """All scripts of Unicode: 614 characters differed while ids came from TensorFlow's tables."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "ab", "##cd", "##c", "##d", "abc", "cd", "abcd"]
    letters = {c for text in WHOLE_TEXTS for c in text + text.lower() if not c.isspace()}
    pieces += sorted({*letters, *(f"##{c}" for c in letters)} - {*pieces})
    WordPieceVocabulary(pieces, lower_case=lower_case).save(tmp_path)
    oracle = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=lower_case)
    codes = [*range(1, 0x3000), *range(0x3000, 0x20000, 7)]
    texts = [f"ab{chr(c)}cd" for c in codes if unicodedata.category(chr(c)) != "Cs"]
    texts += [*WHOLE_TEXTS, *(letter * n for letter in "aыé" for n in (100, 101))]
    ours = load_vocabulary(tmp_path).encode(texts)
    assert ours == [e.ids for e in oracle.encode_batch(texts, add_special_tokens=False)]
    assert len({tuple(ids) for ids in ours}) >= 4


def test_the_graph_has_the_same_ids_in_either_casing():
    import tensorflow as tf

    from taser_jax.interop.saved_model import TextGraph

    for lower_case in (True, False):
        vocabulary = WordPieceVocabulary(PIECES, lower_case=lower_case)
        ids = TextGraph(vocabulary).encode(tf.constant(TEXTS)).to_list()
        assert ids == vocabulary.encode(TEXTS)


def test_tokenizer_json_decides_on_words_and_tokenizer_config_on_splitting(tmp_path):
    config = {"do_lower_case": False, "strip_accents": False}
    write(tmp_path, tokenizer=tokenizer_json(), words=[*PIECES[:6], "other"], config=config)
    cased = WordPieceVocabulary(PIECES, lower_case=False)
    assert load_vocabulary(tmp_path).fingerprint == cased.fingerprint


def test_special_tokens_among_the_pieces_are_no_added_ones(tmp_path):
    unused = _FLAGS | {"id": 5, "content": "[unused1]", "special": True}
    write(tmp_path, tokenizer=tokenizer_json(added=[unused]), words=None)
    assert isinstance(load_vocabulary(tmp_path), WordPieceVocabulary)


def test_more_ids_than_rows_are_refused_and_more_rows_are_padding(tmp_path):
    write(tmp_path, model_config={"vocab_size": len(PIECES) - 1})
    with pytest.raises(DataError, match=r"(?s)18 ids.*at most 17.*ig\.json, field 'vocab_size'"):
        load_vocabulary(tmp_path)
    write(tmp_path, model_config={"vocab_size": len(PIECES) + 8})
    assert load_vocabulary(tmp_path).size == len(PIECES)
    with pytest.raises(DataError, match=r"(?s)18 ids.*at most 16, the rows of the .* of the model"):
        load_vocabulary(tmp_path, rows=16)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    write(tmp_path, tokenizer=tokenizer_json(model={"type": "BPE"}), words=None)
    with pytest.raises(TaserError, match=r"(?s)tokenizer\.json.*not a tokenizer of"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"model": 3, "strip_accents": 3, "vocab_size": "a"}'])
def test_json_that_is_not_what_it_must_be_is_named(tmp_path, name, text):
    write(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=name):
        load_vocabulary(tmp_path)
