"""Passages of tables with and without a header, of BEIR's corpora and of KILT's pages; qrels."""

import itertools
import json
import random

import pytest
from written_files import write

from taser_jax.data.readers import fields, located
from taser_jax.data.readers.fields import read_qrels
from taser_jax.data.readers.kilt import Page, chunk_page, read_pages
from taser_jax.data.readers.located import PARAGRAPH_END, LeftOut, Span
from taser_jax.data.readers.passages import read_passages
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


def passages(path, left_out: LeftOut | None = None) -> list[Passage]:
    return [one.passage for one in read_passages(path, left_out)]


@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz"])
def test_a_header_brings_csv_quotes(tmp_path, name):
    path = write(
        tmp_path / name,
        "id\ttext\ttitle\n"
        '1\t"He said ""no"", and left."\tNo\n'
        "2\tplain\t\n"
        '3\t"two\nlines"\t"A ""B"""\n'
        "4\tit's 5' 10\" tall\tBob\n"
        '5\t"Yes" she said\t"open\n'
        "6\tlast\tZ\n",
    )
    assert passages(path) == [
        Passage("1", 'He said "no", and left.', "No"),
        Passage("2", "plain", ""),
        Passage("3", "two\nlines", 'A "B"'),
        Passage("4", "it's 5' 10\" tall", "Bob"),
        # No quotes of csv's: as they are.
        Passage("5", '"Yes" she said', '"open'),
        Passage("6", "last", "Z"),
    ]
    assert [one.line for one in read_passages(path)] == [2, 3, 4, 6, 7, 8]


def test_columns_go_by_the_header_not_by_their_place(tmp_path):
    path = write(
        tmp_path / "p.tsv", "title\twikipedia_id\tparagraph_id\tid\ttext\nT\t9\t0\t1\tbody\n"
    )
    [found] = read_passages(path)
    assert found.passage == Passage("1", "body", "T", page_id="9")
    assert found.span == Span((0, 0), (0, PARAGRAPH_END))
    maillard = write(tmp_path / "six.tsv", "id\ttext\ttitle\tpage\ta\tb\n0\tc\tT\t7\t\t\n")
    [found] = read_passages(maillard)
    assert (found.passage, found.span) == (Passage("0", "c", "T", "7"), None)


def test_without_a_header_quotes_are_taken_as_they_are(tmp_path):
    path = write(tmp_path / "p.tsv", '1\t"quoted" text\r\n2\ta "b\tTitle\n3\t"a ""b"""\n')
    assert passages(path) == [
        Passage("1", '"quoted" text'),
        Passage("2", 'a "b', "Title"),
        Passage("3", '"a ""b"""'),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "id\ttext\ttitle\n1\ta\tb\n2\tno title\n",
            r":3: 2 tab-separated columns, not 3: id, text",
        ),
        ("id\ttext\ttitle\n1\ta\tb\tc\n", r":2: 4 tab-separated columns"),
        ("id\ttext\ttitle\n1\ta\tb\n2\t \t\n", r":3, field 'text': it is empty"),
        ("id\ttext\ttitle\n1\ta\tb\n\ta\tb\n", r":3, field 'id': the id is empty"),
        ("1\ta\n2\n", r":2: 1 tab-separated columns"),
        ("1\ta\tb\tc\n", r":1: 4 tab-separated columns"),
        ("1\ta\n1\tb\n", r":2, field 'id': the id '1' was already used on line 1"),
        ("1\ta\n2\t\t\n", r":2, field 'text': it is empty"),
        ("id\ttext\tparagraph_id\n1\ta\tx\n", r":2, field 'paragraph_id': found 'x'"),
    ],
)
def test_bad_passages_name_line_field_and_fix(tmp_path, content, message):
    with pytest.raises(DataError, match=r"p\.tsv" + message) as caught:
        passages(write(tmp_path / "p.tsv", content))
    assert caught.value.fix or caught.value.expected


CORPUS = [
    {"_id": "d1", "title": "One", "text": "first", "metadata": {}},
    {"_id": "d2", "text": "second"},
]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_beirs_corpus(tmp_path, name):
    path = write(tmp_path / name, CORPUS)
    assert passages(path) == [Passage("d1", "first", "One"), Passage("d2", "second", "")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "x"}', r":2, field 'id': no id"),
        ('{"_id": "", "text": "x"}', r":2, field '_id': no id"),
        ('{"_id": "d9"}', r":2, field 'text': no field 'text'"),
        ('{"_id": "d9", "text": "x", "title": 3}', r":2, field 'title': found 3"),
        ('{"_id": "d9", "text": ""}', r":2, field 'text': it is empty"),
        ('{"_id": "d1", "text": "x"}', r":2, field 'id': the id 'd1' was already used on line 1"),
        ('{"_id": "d9", "text": ', r":2: not valid JSON"),
    ],
)
def test_a_bad_corpus_names_line_and_field(tmp_path, row, message):
    path = write(tmp_path / "corpus.jsonl", f"{json.dumps(CORPUS[0])}\n{row}\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl" + message):
        passages(path)


def test_a_field_beyond_all_measure_is_an_open_quote(tmp_path, monkeypatch):
    monkeypatch.setattr(fields, "_LONGEST_FIELD", 200_000)
    path = write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "x" * 199_000 + '"\tb\n')
    assert len(passages(path)[0].text) == 199_000
    path = write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "long line\n" * 30_000)
    with pytest.raises(DataError, match=r"p\.tsv:2: 2 tab-separated columns.*\n.*quote left open"):
        passages(path)


def test_what_is_empty_or_repeated_is_left_out_counted_and_listed(tmp_path):
    content = "id\ttext\ttitle\n1\ta\tT\n2\t\t\n1\ta\tT\n3\t\tonly a title\n"
    path, left_out = write(tmp_path / "p.tsv", content), LeftOut()
    assert passages(path, left_out) == [Passage("1", "a", "T"), Passage("3", "", "only a title")]
    assert left_out.counts == {"empty passages": 1, "repeated passages": 1}
    assert left_out.lines == [
        f"{path}:3, field 'text': it is empty",
        f"{path}:4, field 'id': the id '1' was already used on line 2",
    ]
    with pytest.raises(DataError, match=r":3, field 'text'"):
        passages(path)
    path = write(tmp_path / "p.tsv", "1\ta\n1\ta\tT\n")
    with pytest.raises(DataError, match="already used on line 1"):
        passages(path, LeftOut())


def test_a_repeated_id_is_found_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(located, "_BLOCK", 8)
    rows = [f"{n}\ttext\ttitle\n" for n in range(70)]
    path = write(tmp_path / "p.tsv", "id\ttext\ttitle\n" + "".join(rows) + "5\tx\ty\n")
    message = r"p\.tsv:72, field 'id': the id '5' was already used on line 7"
    with pytest.raises(DataError, match=message):
        passages(path, LeftOut())


def test_passages_are_streamed(tmp_path):
    rows = "".join(f"{n}\ta\tb\n" for n in range(40_000))
    path = write(tmp_path / "p.tsv", f"id\ttext\ttitle\n{rows}2\tbroken\n")
    assert next(read_passages(path)).passage.id == "0"


@pytest.mark.parametrize(
    "content",
    ["q1 0 d1 1\nq1\t0\td2\t-1\n\n", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t-1\n"],
)
def test_qrels_of_trec_and_beir(tmp_path, content):
    path = write(tmp_path / "qrels.tsv", content)
    assert [(one.query_id, one.passage_id, one.relevance) for one in read_qrels(path)] == [
        ("q1", "d1", 1),
        ("q1", "d2", -1),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1 0 d1 1\nq1 d2 1\n", r":2: 3 tab-separated columns"),
        ("query-id\tcorpus-id\tscore\nq1 d1 1\n", r":2: 1 tab-separated columns"),
        ("q1 0 d1 yes\n", r":1, last column: the grade is 'yes'"),
        (f"q1 0 d1 {10**30}\n", r":1, last column: the grade is '10{30}'(.|\n)*32 bits"),
    ],
)
def test_bad_qrels_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=r"qrels\.tsv" + message):
        list(read_qrels(write(tmp_path / "qrels.tsv", content)))


PAGE = Page(
    1,
    "7",
    "Bern",
    (
        "Bern\n",
        "Bern is a city. It lies on the Aare.\n",
        "Bears live there.\n",
        "Section::::History.\n",
        "Founded in 1191 by Duke B. of Zurich it grew. It burned.\n",
        "",
    ),
)


def test_windows_of_a_page_by_hand():
    assert [(p.passage.id, p.passage.text, p.span) for p in chunk_page(PAGE, words=10)] == [
        ("7.0", "Bern is a city. It lies on the Aare. Bears", Span((1, 0), (2, 5))),
        ("7.1", "live there. Founded in 1191 by Duke B. of Zurich", Span((2, 6), (4, 36))),
        ("7.2", "it grew. It burned.", Span((4, 37), (4, 56))),
    ]
    page = Page(1, "7", "Bern", ("Bern", "Bern is a city.", "Bears live there."))
    texts = [one.passage.text for one in chunk_page(page, words=5)]
    assert texts == ["Bern is a city. Bears", "live there."]


@pytest.mark.parametrize("limit", [1, 7, 30])
def test_no_word_of_a_page_is_lost_or_repeated(limit):
    rng = random.Random(limit)
    paragraphs = [
        "".join(rng.choice(["word ", "Name. ", "It's ", "(x) ", "1.5 "]) for _ in range(n))
        for n in (0, 3, 40, 1, 25)
    ]
    page = Page(1, "9", "T", ("T", *paragraphs[:3], "Section::::S", *paragraphs[3:]))
    chunks = list(chunk_page(page, words=limit))
    assert " ".join(c.passage.text for c in chunks).split() == " ".join(paragraphs).split()
    spans = [chunk.span for chunk in chunks]
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    assert {chunk.passage.page_id for chunk in chunks} == {"9"}
    assert [len(c.passage.text.split()) for c in chunks[:-1]] == [limit] * (len(chunks) - 1)


def test_pages_of_a_knowledge_source(tmp_path):
    record = {"wikipedia_id": "7", "wikipedia_title": "Bern", "text": ["Bern\n", "A city.\n"]}
    path = write(tmp_path / "k.json", [record])
    [page] = read_pages(path)
    assert (page.id, page.title, page.paragraphs) == ("7", "Bern", ("Bern\n", "A city.\n"))
    assert passages(path) == [Passage("7.0", "A city.", "Bern", "7")]
    for bad, message in (
        ({**record, "wikipedia_id": None}, r":2, field 'wikipedia_id': the id is empty"),
        (
            {**record, "wikipedia_id": "8", "text": "A city."},
            r":2, field 'text': .* expected a list",
        ),
        ({"wikipedia_id": "8", "text": []}, r":2: .*field 'wikipedia_title'"),
        ({**record, "text": ["Bern", "A town."]}, r":2, field 'id': the id '7.0' was already used"),
    ):
        with pytest.raises(DataError, match=r"k\.json" + message):
            passages(write(tmp_path / "k.json", [record, bad]))
