"""Texts and ids as other programs write them: taken as they are meant, or named with file and line.

Ids that run files and qrels cannot hold were found after training; halves of characters were
tracebacks.
"""

import codecs
import json
import pathlib

import pytest
from written_files import json_lines

from taser_jax.data.collections.store import PassageStore, QuerySet, write_collection, write_queries
from taser_jax.data.prepare.collection import prepare as prepare_files
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, Query, check_id

CORPUS = [{"_id": "d1", "title": "One\tor 1", "text": "first"}, {"_id": "d2", "text": "second"}]
QUERIES = [{"_id": "q1", "text": "one?"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\n"
# Character -> how the message names it.
UNUSABLE = {
    " ": r"a space \(U\+0020\)",
    "\xa0": r"a no-break space \(U\+00A0\)",
    "\u2028": r"a line separator \(U\+2028\)",
    "\x85": r"a control character \(U\+0085\)",
    "\x1f": r"a control character \(U\+001F\)",
    "\x00": r"a control character \(U\+0000\)",
    "\x0c": r"a control character \(U\+000C\)",
}


def beir_folder(root: pathlib.Path, convert=str.encode, **changed: str) -> pathlib.Path:
    files = {"corpus.jsonl": json_lines(*CORPUS), "queries.jsonl": json_lines(*QUERIES)}
    files |= {"qrels/test.tsv": QRELS} | changed
    (root / "qrels").mkdir(parents=True)
    for name, content in files.items():
        (root / name).write_bytes(convert(content))
    return root


def prepare(root: pathlib.Path, **changed: str):
    folder = beir_folder(root / "beir", **changed)
    return prepare_files(data_dir=root / "data", collection="c", directories={"t": folder})


@pytest.mark.parametrize("character", UNUSABLE)
def test_an_id_that_run_files_cannot_hold_is_named(character):
    message = rf"here: the id .* has {UNUSABLE[character]}(.|\n)*without white space"
    with pytest.raises(DataError, match=rf"{message}(.|\n)*fix: write another"):
        check_id(f"d{character}3", where="here")


def test_an_id_that_run_files_cannot_hold_is_refused_where_it_comes_in(tmp_path):
    passages = json_lines(*CORPUS, {"_id": "d 3", "text": "third"})
    with pytest.raises(DataError, match=r"corpus\.jsonl:3, field 'id': the id 'd 3' has a space"):
        prepare(tmp_path / "passages", **{"corpus.jsonl": passages})
    queries = json_lines(*QUERIES, {"_id": "q 2", "text": "two?"})
    qrels = f"{QRELS}q 2\td2\t1\n"
    with pytest.raises(DataError, match=r"queries\.jsonl:2, field 'id': the id 'q 2' has a space"):
        prepare(tmp_path / "queries", **{"queries.jsonl": queries, "qrels/test.tsv": qrels})
    with pytest.raises(DataError, match="has a space"):
        write_collection(tmp_path, "own", [Passage("1 ", "text")])
    write_collection(tmp_path, "own", [Passage("1", "text")])
    with pytest.raises(DataError, match="has a space"):
        write_queries(tmp_path, "own", "t", "test", [Query(" 1", "text", "t")])


@pytest.mark.parametrize(
    ("file", "record", "place"),
    [
        ("corpus.jsonl", {"_id": "d3", "text": "a \ud83d"}, "corpus.jsonl:3, field 'text'"),
        ("corpus.jsonl", {"_id": "\udc00", "text": "a"}, "corpus.jsonl:3, field '_id'"),
        ("queries.jsonl", {"_id": "q2", "text": "\ud800"}, "queries.jsonl:2, field 'text'"),
    ],
)
def test_halves_of_characters_are_named(tmp_path, file, record, place):
    before = {"corpus.jsonl": CORPUS, "queries.jsonl": QUERIES}[file]
    with pytest.raises(DataError, match=rf"{place}: one half of a character of two") as raised:
        prepare(tmp_path, **{file: json_lines(*before, record)})
    assert r"such as \ud800" in str(raised.value)
    # Both halves are one character.
    whole = json.dumps({"_id": "d3", "text": "\U0001f600"})
    assert r"\ud83d\ude00" in whole
    prepare(tmp_path / "whole", **{"corpus.jsonl": json_lines(*CORPUS) + whole})
    assert PassageStore.open(tmp_path / "whole" / "data", "c")[2].text == "\U0001f600"


CONVERSIONS = {
    "Windows": lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    "no final newline": lambda text: text.removesuffix("\n").encode(),
    "blank lines at the end": lambda text: f"{text}\n\r\n".encode(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_files_as_editors_leave_them_are_the_same(tmp_path, name):
    """With a tab in a title, which JSON may have."""
    prepare(tmp_path)
    plain = PassageStore.open(tmp_path / "data", "c")
    assert plain[0].title == "One\tor 1"
    folder = beir_folder(tmp_path / "other", CONVERSIONS[name])
    prepare_files(data_dir=tmp_path / "o", collection="c", directories={"t": folder})
    assert PassageStore.open(tmp_path / "o", "c").fingerprint == plain.fingerprint
    queries, expected = (
        list(QuerySet.open(tmp_path / data, "c", "t", "test")) for data in ("o", "data")
    )
    assert queries == expected
    assert expected[0].positives == (0,)
    for content in ("id\ttext\ttitle\n1\tfirst\tOne\n", "1\tfirst\tOne\n"):
        (tmp_path / "p.tsv").write_bytes(CONVERSIONS[name](content))
        assert [entry.passage for entry in read_passages(tmp_path / "p.tsv")] == [
            Passage("1", "first", "One")
        ]
    for suffix, content in (("qa.csv", "who?\t['Ada']\n"), ("tsv", "q1\twho?\n")):
        (tmp_path / f"q.{suffix}").write_bytes(CONVERSIONS[name](content))
        assert [entry.text for entry in read_questions(tmp_path / f"q.{suffix}")] == ["who?"]


def test_text_as_windows_calls_unicode_is_named(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_bytes("1\ttext\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"p\.tsv:1: not UTF-8: .*\n  fix: .*-f utf-16"):
        list(read_passages(path))
