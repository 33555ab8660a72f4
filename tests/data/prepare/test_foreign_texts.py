"""Texts and ids as other programs write them: taken as they are meant, or named with file and line.

Ids that run files and qrels cannot hold were found after training.
"""

import codecs

import pytest
from written_files import json_lines, write, write_all

from taser_jax.data.collections.store import PassageStore
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage, check_id

CORPUS = [{"_id": "d1", "title": "One\tor 1", "text": "first"}, {"_id": "d2", "text": "second"}]
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


@pytest.fixture
def prepare_beir(tmp_path, prepare_here):
    """Prepares a folder of BEIR's, some of whose files are changed."""

    def prepare(convert=str.encode, **changed: str):
        queries = json_lines({"_id": "q1", "text": "one?"})
        files = {"corpus.jsonl": json_lines(*CORPUS), "queries.jsonl": queries}
        files |= {"qrels/test.tsv": QRELS} | changed
        write_all(tmp_path / "beir", {name: convert(text) for name, text in files.items()})
        prepare_here(directories={"t": "beir"})
        return PassageStore.open(tmp_path / "data", "c")

    return prepare


@pytest.mark.parametrize("character", UNUSABLE)
def test_an_id_that_run_files_cannot_hold_is_named(character):
    message = rf"here: the id .* has {UNUSABLE[character]}(.|\n)*without white space"
    with pytest.raises(DataError, match=rf"{message}(.|\n)*fix: write another"):
        check_id(f"d{character}3", where="here")


@pytest.mark.parametrize("name", ["corpus", "queries"])
def test_an_id_that_run_files_cannot_hold_is_refused_where_it_comes_in(prepare_beir, name):
    content = json_lines({"_id": "d1", "text": "one"}, {"_id": "a 2", "text": "two"})
    with pytest.raises(DataError, match=rf"{name}\.jsonl:2, field 'id': the id 'a 2' has a space"):
        prepare_beir(**{f"{name}.jsonl": content, "qrels/test.tsv": f"{QRELS}a 2\td1\t1\n"})


CONVERSIONS = {
    "Windows": lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    "no final newline": lambda text: text.removesuffix("\n").encode(),
    "blank lines at the end": lambda text: f"{text}\n\r\n".encode(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_files_as_editors_leave_them_are_the_same(tmp_path, prepare_beir, queries_of, name):
    """With a tab in a title, which JSON may have."""
    plain, queries = prepare_beir(), queries_of("t", "test")
    assert (plain[0].title, queries[0].positives) == ("One\tor 1", (0,))
    assert prepare_beir(CONVERSIONS[name]).fingerprint == plain.fingerprint
    assert queries_of("t", "test") == queries
    for content in ("id\ttext\ttitle\n1\tfirst\tOne\n", "1\tfirst\tOne\n"):
        [located] = read_passages(write(tmp_path / "p.tsv", CONVERSIONS[name](content)))
        assert located.passage == Passage("1", "first", "One")
    for file, content in (("q.qa.csv", "who?\t['Ada']\n"), ("q.tsv", "q1\twho?\n")):
        [question] = read_questions(write(tmp_path / file, CONVERSIONS[name](content)))
        assert question.text == "who?"
