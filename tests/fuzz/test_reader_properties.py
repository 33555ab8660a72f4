"""Generated files: valid ones come back as they were written."""

import csv
import io
import json
import pathlib
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_files import write

from taser_jax.cli import configuration
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.records import Passage

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
# A column of a file without quotes.
COLUMN = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r"), max_size=30)
# White space, line ends and control characters are refused in ids.
ANY_ID = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"]), min_size=1
).filter(lambda text: text.split() == [text])
ID = st.text(string.ascii_letters + string.digits + "_:/äλ中-.", min_size=1, max_size=8)


def with_words(texts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return texts.filter(lambda text: bool(text.strip()))


def passages(text: st.SearchStrategy[str], ids: st.SearchStrategy[str] = ID) -> st.SearchStrategy:
    any_passage = st.builds(Passage, id=ids, text=with_words(text), title=text)
    return st.lists(any_passage, min_size=1, max_size=5, unique_by=lambda passage: passage.id)


# The same examples each time.
PROPERTY = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("written")


def csv_text(rows: list[list[str]], line_end: str) -> str:
    file = io.StringIO()
    # Of carriage returns, Python quotes only those that are part of its line ends.
    quoting = csv.QUOTE_MINIMAL if "\r" in line_end else csv.QUOTE_ALL
    csv.writer(file, delimiter="\t", lineterminator=line_end, quoting=quoting).writerows(rows)
    return file.getvalue()


LINE_ENDS = st.sampled_from(["\n", "\r\n"])


@PROPERTY
@given(passages(ANY_TEXT), LINE_ENDS)
def test_dpr_passages(folder: pathlib.Path, corpus: list[Passage], line_end: str):
    rows = [["id", "text", "title"], *([entry.id, entry.text, entry.title] for entry in corpus)]
    path = write(folder / "dpr", csv_text(rows, line_end))
    assert [entry.passage for entry in read_passages(path)] == corpus


@PROPERTY
@given(st.lists(st.tuples(with_words(COLUMN), st.lists(ANY_TEXT)), min_size=1, max_size=4))
def test_questions_as_qa_csv(folder: pathlib.Path, questions: list[tuple[str, list[str]]]):
    content = csv_text([[text, repr(answers)] for text, answers in questions], "\n")
    path = write(folder / "x.qa.csv", content)
    assert [(q.text, list(q.answers)) for q in read_questions(path)] == questions


@PROPERTY
@given(passages(ANY_TEXT, ids=ANY_ID), st.booleans())
def test_beir_corpora_and_queries(folder: pathlib.Path, corpus: list[Passage], has_escapes: bool):
    records = [{"_id": entry.id, "title": entry.title, "text": entry.text} for entry in corpus]
    content = "".join(json.dumps(record, ensure_ascii=has_escapes) + "\n" for record in records)
    path = write(folder / "corpus.jsonl", content)
    assert [entry.passage for entry in read_passages(path)] == corpus
    queries = list(read_questions(write(folder / "queries.jsonl", content)))
    assert [(query.id, query.text) for query in queries] == [
        (entry.id, entry.text) for entry in corpus
    ]


@PROPERTY
@given(passages(COLUMN.map(str.strip), ids=ANY_ID), st.booleans())
def test_tsv_passages_and_queries(folder: pathlib.Path, corpus: list[Passage], has_titles: bool):
    # A first line of these names is a header.
    corpus = [entry for entry in corpus if (entry.id, entry.text) != ("id", "text")] or [
        Passage("1", "a")
    ]
    # Titles that are longer than their texts are refused: the columns may be swapped.
    corpus = [
        Passage(
            entry.id, entry.text, entry.title * (has_titles and len(entry.title) <= len(entry.text))
        )
        for entry in corpus
    ]
    columns = [[entry.id, entry.text, *([entry.title] if has_titles else [])] for entry in corpus]
    path = write(folder / "passages", "".join("\t".join(row) + "\n" for row in columns))
    assert [entry.passage for entry in read_passages(path)] == corpus
    path = write(folder / "queries", "".join("\t".join(row[:2]) + "\n" for row in columns))
    queries = [(query.id, query.text) for query in read_questions(path)]
    assert queries == [(entry.id, entry.text) for entry in corpus]


def given_to_gin(*, value: object = "absent") -> object:
    return value


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(ID, inner, max_size=3)
    ),
    max_leaves=6,
)


@PROPERTY
@given(LITERALS, st.sampled_from(["", "  # a comment", "\n\n"]))
def test_gin_values(folder: pathlib.Path, value: object, after: str):
    macro = f"VALUE = {value!r}{after}\ngiven_to_gin.value = %VALUE\n"
    for content in (f"given_to_gin.value = {value!r}{after}\n", macro):
        flags = configuration.GinFlags(files=(str(write(folder / "x.gin", content)),))
        assert configuration.resolve(given_to_gin, flags=flags).function() == value
