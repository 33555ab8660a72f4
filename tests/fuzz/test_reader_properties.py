"""Generated files: valid ones come back as they were written."""

import csv
import io
import json
import pathlib
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taser_jax.cli import configuration
from taser_jax.data.readers.fields import read_qrels
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_kilt, read_questions
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


def unique(records: st.SearchStrategy, key: Callable) -> st.SearchStrategy:
    return st.lists(records, min_size=1, max_size=5, unique_by=key)


def passages(text: st.SearchStrategy[str], ids: st.SearchStrategy[str] = ID) -> st.SearchStrategy:
    any_passage = st.builds(Passage, id=ids, text=with_words(text), title=text)
    return unique(any_passage, lambda passage: passage.id)


# The same examples each time.
PROPERTY = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@contextmanager
def written(content: str | bytes, name: str = "file") -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield path


def csv_text(rows: list[list[str]], line_end: str) -> str:
    file = io.StringIO()
    # Of carriage returns, Python quotes only those that are part of its line ends.
    quoting = csv.QUOTE_MINIMAL if "\r" in line_end else csv.QUOTE_ALL
    csv.writer(file, delimiter="\t", lineterminator=line_end, quoting=quoting).writerows(rows)
    return file.getvalue()


LINE_ENDS = st.sampled_from(["\n", "\r\n"])


@PROPERTY
@given(passages(ANY_TEXT), LINE_ENDS)
def test_dpr_passages(corpus: list[Passage], line_end: str):
    rows = [["id", "text", "title"], *([entry.id, entry.text, entry.title] for entry in corpus)]
    with written(csv_text(rows, line_end)) as path:
        assert [entry.passage for entry in read_passages(path)] == corpus


CONTEXT = st.fixed_dictionaries({"title": ANY_TEXT, "text": ANY_TEXT, "passage_id": ID})
QUESTION = st.fixed_dictionaries(
    {
        "question": with_words(ANY_TEXT),
        "answers": st.lists(ANY_TEXT, max_size=3),
        "positive_ctxs": st.lists(CONTEXT, max_size=2),
        "hard_negative_ctxs": st.lists(CONTEXT, max_size=2),
    }
)
# Writers differ: escapes or UTF-8, one line or many, lines or an array.
STYLES = st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}])


@PROPERTY
@given(st.lists(QUESTION, min_size=1, max_size=4), STYLES, st.booleans())
def test_dpr_training_files(records: list[dict], style: dict, as_array: bool):
    if as_array:
        content = json.dumps(records, **style)
    else:
        style = {name: value for name, value in style.items() if name != "indent"}
        content = "".join(json.dumps(record, **style) + "\n" for record in records)
    with written(content, "t.json") as path:
        questions = list(read_questions(path))
    assert [(q.text, list(q.answers)) for q in questions] == [
        (record["question"], record["answers"]) for record in records
    ]
    for question, record in zip(questions, records, strict=True):
        for name, contexts in (
            ("positive_ctxs", question.positives),
            ("hard_negative_ctxs", question.hard_negatives),
        ):
            assert record[name] == [
                {"title": context.title, "text": context.text, "passage_id": context.id}
                for context in contexts
            ]
    if not as_array:
        numbers = range(1, len(records) + 1)
        assert [q.where for q in questions] == [f"{path}:{number}" for number in numbers]


@PROPERTY
@given(st.lists(st.tuples(with_words(COLUMN), st.lists(ANY_TEXT)), min_size=1, max_size=4))
def test_questions_as_qa_csv(questions: list[tuple[str, list[str]]]):
    content = csv_text([[text, repr(answers)] for text, answers in questions], "\n")
    with written(content, "x.qa.csv") as path:
        assert [(q.text, list(q.answers)) for q in read_questions(path)] == questions


@PROPERTY
@given(passages(ANY_TEXT, ids=ANY_ID), STYLES)
def test_beir_corpora_and_queries(corpus: list[Passage], style: dict):
    style = {name: value for name, value in style.items() if name != "indent"}
    records = [{"_id": entry.id, "title": entry.title, "text": entry.text} for entry in corpus]
    content = "".join(json.dumps(record, **style) + "\n" for record in records)
    with written(content, "corpus.jsonl") as path:
        assert [entry.passage for entry in read_passages(path)] == corpus
    with written(content, "queries.jsonl") as path:
        queries = list(read_questions(path))
    assert [(query.id, query.text) for query in queries] == [
        (entry.id, entry.text) for entry in corpus
    ]


@PROPERTY
@given(passages(COLUMN.map(str.strip), ids=ANY_ID), st.booleans())
def test_tsv_passages_and_queries(corpus: list[Passage], has_titles: bool):
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
    with written("".join("\t".join(row) + "\n" for row in columns)) as path:
        assert [entry.passage for entry in read_passages(path)] == corpus
    with written("".join("\t".join(row[:2]) + "\n" for row in columns)) as path:
        queries = [(query.id, query.text) for query in read_questions(path)]
    assert queries == [(entry.id, entry.text) for entry in corpus]


@PROPERTY
@given(
    st.lists(st.tuples(ID, ID, st.integers(-3, 2**31 - 1)), min_size=1, max_size=6), st.booleans()
)
def test_qrels(judgements: list[tuple[str, str, int]], as_beir: bool):
    if as_beir:
        content = "query-id\tcorpus-id\tscore\n"
        content += "".join(f"{query}\t{passage}\t{grade}\n" for query, passage, grade in judgements)
    else:
        content = "".join(f"{query} 0 {passage} {n}\r\n" for query, passage, n in judgements)
        # Line 1 would be taken for a header.
        content = "x 0 y 0\n" + content
    with written(content) as path:
        triples = [(j.query_id, j.passage_id, j.relevance) for j in read_qrels(path)]
    assert triples == ([] if as_beir else [("x", "y", 0)]) + judgements


PLACE = st.integers(0, 40)
PROVENANCE = st.fixed_dictionaries(
    {"wikipedia_id": ID, "title": ANY_TEXT},
    optional={"start_paragraph_id": PLACE, "end_character": PLACE},
)
KILT = st.fixed_dictionaries(
    {
        "id": ID,
        "input": with_words(ANY_TEXT),
        "output": st.lists(
            st.fixed_dictionaries(
                {"answer": st.none() | ANY_TEXT, "provenance": st.lists(PROVENANCE, max_size=2)}
            ),
            min_size=1,
            max_size=3,
        ),
    }
)


@PROPERTY
@given(unique(KILT, lambda record: record["id"]))
def test_kilt_queries(records: list[dict]):
    with written("".join(json.dumps(record) + "\n" for record in records)) as path:
        queries = list(read_kilt(path))
    for query, record in zip(queries, records, strict=True):
        assert (query.record, query.id, query.text) == (record, record["id"], record["input"])
        places = [place for output in record["output"] for place in output["provenance"]]
        assert [
            (place.page_id, place.span and place.span.start[0]) for place in query.provenance
        ] == [(place["wikipedia_id"], place.get("start_paragraph_id")) for place in places]


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
def test_gin_values(value: object, after: str):
    macro = f"VALUE = {value!r}{after}\ngiven_to_gin.value = %VALUE\n"
    for content in (f"given_to_gin.value = {value!r}{after}\n", macro):
        with written(content, "x.gin") as path:
            flags = configuration.GinFlags(files=(str(path),))
            resolved = configuration.resolve(given_to_gin, flags=flags)
            assert resolved.function() == value
