import gzip
import json

import pytest

from taser_jax.data.readers import kilt
from taser_jax.data.readers.kilt import PARAGRAPH_END, Output, Outputs, Provenance, Span
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

GOLD = {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern"}]}


def _write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _query(**fields) -> dict:
    return {"id": "q1", "input": "capital?", "output": [GOLD], **fields}


def test_a_query_with_every_kind_of_provenance(tmp_path):
    place = {"start_paragraph_id": 2, "end_paragraph_id": 3}
    record = _query(
        output=[
            {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern", **place}]},
            {
                "provenance": [
                    {"wikipedia_id": 8, **place, "start_character": 5, "end_character": 9},
                    {"wikipedia_id": "8", **place, "start_character": -1, "end_character": -1},
                    {"wikipedia_id": None, "passage_id": 12},
                ]
            },
            {"answer": "the city of Bern"},
        ]
    )
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(record).encode()))
    [query] = kilt.read_queries(path)
    whole = Span((2, 0), (3, PARAGRAPH_END))
    assert (query.where, query.id, query.text) == (f"{path}:1", "q1", "capital?")
    assert query.outputs == (
        Output("Bern", (Provenance("7", "Bern", span=whole),)),
        Output(
            None,
            (
                Provenance("8", span=Span((2, 5), (3, 9))),
                Provenance("8", span=whole),
                Provenance("", passage_id="12"),
            ),
        ),
        Output("the city of Bern", None),
    )
    assert query.record == record


def test_a_blind_test_set_has_no_outputs(tmp_path):
    path = _write(tmp_path / "q.jsonl", {"id": 5, "input": "capital?"})
    [query] = kilt.read_queries(path, outputs=Outputs.OPTIONAL)
    assert (query.id, query.outputs) == ("5", ())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"id": "q2", "input": "x"}, r":2, field 'output': no output"),
        (_query(id="q2", output=[]), r":2, field 'output': no output"),
        (_query(id="q2", output="Bern"), r":2, field 'output': found a str"),
        (_query(id="q2", output=["Bern"]), r":2, output\[0\]: found a str"),
        (_query(id="q2", output=[{"answer": 3}]), r"output\[0\], field 'answer': found 3"),
        (_query(id="q2", output=[{"provenance": {}}]), r"field 'provenance': found a dict"),
        (
            _query(id="q2", output=[GOLD, {"provenance": [7]}]),
            r"output\[1\].provenance\[0\]: found",
        ),
        (_query(id="q2", input=" "), r":2, field 'input': the input is empty"),
        (_query(id="q2", input=["x"]), r":2, field 'input': found \['x'\]"),
        (_query(id=""), r":2, field 'id': the id is empty"),
        (_query(), r":2, field 'id': the id 'q1' was already used on line 1"),
        (
            _query(id="q2", output=[{"provenance": [{"start_paragraph_id": "two"}]}]),
            r"provenance\[0\], field 'start_paragraph_id': found 'two'",
        ),
        (
            _query(
                id="q2", output=[{"provenance": [{"start_paragraph_id": 4, "end_paragraph_id": 3}]}]
            ),
            r"provenance\[0\], field 'end_paragraph_id': paragraphs 4 to 3",
        ),
    ],
)
def test_bad_queries_name_line_and_field(tmp_path, record, message):
    path = _write(tmp_path / "q.jsonl", _query(), record)
    with pytest.raises(DataError, match=r"q\.jsonl:2") as error:
        list(kilt.read_queries(path))
    assert error.match(message)


def test_passages_in_maillards_six_columns_and_in_five(tmp_path):
    six = tmp_path / "six.tsv"
    six.write_text('id\ttext\ttitle\tpage\ta\tb\n0\t"a ""b"""\tT\t7\t\t\n1\tc\tT\t7\t\t\n')
    assert [(p.passage, p.span) for p in kilt.read_passages(six)] == [
        (Passage("0", 'a "b"', "T", "7"), None),
        (Passage("1", "c", "T", "7"), None),
    ]
    five = tmp_path / "five.tsv"
    five.write_text("id\ttext\ttitle\twikipedia_id\tparagraph_id\n0\ta\tT\t7\t3\n1\tb\tU\t8\t0\n")
    assert [(p.passage.page_id, p.span) for p in kilt.read_passages(five)] == [
        ("7", Span((3, 0), (3, PARAGRAPH_END))),
        ("8", Span((0, 0), (0, PARAGRAPH_END))),
    ]


HEADER = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttext\ttitle\n1\ta\tT\n", r":1: columns id, text, title"),
        ("1\ta\tT\t7\t0\n", r":1: columns 1, a, T, 7, 0"),
        (HEADER + "1\ta\tT\t7\n", r":2: 4 tab-separated columns"),
        (HEADER + "1\ta\tT\t\t0\n", r":2, field 'wikipedia_id': the page's id is empty"),
        (HEADER + "1\ta\tT\t7\tx\n", r":2, field 'paragraph_id': found 'x'"),
        (HEADER + "1\ta\tT\t7\t0\n1\tb\tT\t7\t1\n", r":3, field 'id': the id '1' was already used"),
        (HEADER + "1\t \tT\t7\t0\n", r":2, field 'text': the passage is empty"),
    ],
)
def test_bad_passages_name_the_line(tmp_path, content, message):
    path = tmp_path / "p.tsv"
    path.write_text(content)
    with pytest.raises(DataError, match=r"p\.tsv" + message):
        list(kilt.read_passages(path))


def test_pages_of_a_knowledge_source(tmp_path):
    record = {"wikipedia_id": "7", "wikipedia_title": "Bern", "text": ["Bern\n", "A city.\n"]}
    [page] = kilt.read_pages(_write(tmp_path / "k.json", record))
    assert (page.id, page.title, page.paragraphs) == ("7", "Bern", ("Bern\n", "A city.\n"))
    for bad, message in (
        ({**record, "wikipedia_id": None}, r":2, field 'wikipedia_id': no page id"),
        ({**record, "wikipedia_id": "8", "text": "A city."}, r":2, field 'text': found a str"),
        ({"wikipedia_id": "8", "text": []}, r":2, field 'wikipedia_title': no field"),
        (record, r":2, field 'wikipedia_id': the page '7' is already on line 1"),
    ):
        with pytest.raises(DataError, match=r"k\.json" + message):
            list(kilt.read_pages(_write(tmp_path / "k.json", record, bad)))
