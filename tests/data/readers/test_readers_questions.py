"""Questions of DPR's, BEIR's, KILT's and plain files."""

import json

import pytest
from written_files import write

from taser_jax.data.readers.fields import content_id
from taser_jax.data.readers.located import PARAGRAPH_END, Question, Span
from taser_jax.data.readers.questions import read_kilt, read_questions
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

ROW = {
    "question": "who?",
    "answers": ["Ada", 1815],
    "positive_ctxs": [{"title": "Ada", "text": "She ...", "passage_id": 12, "score": 3.0}],
    "negative_ctxs": [{"title": None, "text": "other"}],
    "hard_negative_ctxs": [{"text": "near", "psg_id": "13"}],
}


@pytest.mark.parametrize("name", ["t.json.gz", "t.jsonl"])
def test_training_rows_in_json_and_jsonl(tmp_path, name):
    other = {"question": "when?", "answers": [], "positive_ctxs": [], "qid": 7}
    rows = [ROW, other, {**other, "negative_ctxs": ROW["negative_ctxs"]}]
    as_array = ".jsonl" not in name
    path = write(tmp_path / name, json.dumps(rows, indent=4) if as_array else rows)
    first, second, third = read_questions(path)
    assert first == Question(
        where=f"{path}:{2 if as_array else 1}",
        text="who?",
        answers=("Ada", "1815"),
        positives=(Passage("12", "She ...", "Ada"),),
        hard_negatives=(Passage("13", "near", ""),),
    )
    assert (second.id, second.positives, second.hard_negatives) == ("7", (), ())
    # DPR's fallback; what has no id has one of its content.
    assert third.hard_negatives == (Passage(content_id("", "other"), "other", ""),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": "Ada"}, r"field 'answers': found 'Ada', a str(.|\n)*fix: write a list"),
        ({"answers": [["Ada"]]}, r"field 'answers': found \[\['Ada'\]\]"),
        ({"question": 3}, r"field 'question': found 3"),
        ({"question": " "}, r"field 'question': the question is empty"),
        ({"positive_ctxs": [3]}, r"field 'positive_ctxs': found 3"),
        ({"positive_ctxs": [{"text": ["x"]}]}, r"field 'positive_ctxs': found {'text'"),
        (
            {"positive_ctxs": [{"text": "x", "passage_id": [1]}]},
            r"field 'positive_ctxs', field 'passage_id': found \[1\]",
        ),
        ({"qid": True}, r"field 'qid': found True"),
        ({"qid": 1.0}, r"field 'qid': found 1.0\n  fix: write a string or an integer"),
    ],
)
def test_bad_training_rows_name_line_and_field(tmp_path, changes, message):
    path = write(tmp_path / "t.jsonl", [ROW, {**ROW, **changes}])
    with pytest.raises(DataError, match=r"t\.jsonl:2, " + message):
        list(read_questions(path))


def test_qa_csv_bare_and_in_pyserini_quotes(tmp_path):
    path = write(
        tmp_path / "q.qa.csv.gz",
        "who?\t['Ada', \"O'Hara\"]\n"
        'when?\t["1815"]\n'
        'quoted?\t"[""5\' 10"", ""a \\""b\\""""]"\n'
        'the "Charge" of?\t["Crimean War", "x\\\\s?y"]\n'
        "none?\t[]\n",
    )
    assert [(q.text, q.answers, q.where.rpartition(":")[2]) for q in read_questions(path)] == [
        ("who?", ("Ada", "O'Hara"), "1"),
        ("when?", ("1815",), "2"),
        ("quoted?", ("5' 10", 'a "b"'), "3"),
        ('the "Charge" of?', ("Crimean War", "x\\s?y"), "4"),
        ("none?", (), "5"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("who?\t'Ada'", r":2, field 'answers': found \"'Ada'\", a str"),
        ("who?\tAda", r":2, field 'answers': found 'Ada', a str"),
        ("who?\t[__import__('os').getcwd()]", r":2, field 'answers': found .*, a str"),
        ("who?", r":2: 1 columns, not 2: the question and a list of answers"),
        ("who?\t['a']\tx", r":2: 3 columns"),
        ("\t['a']", r":2, field 'question': the question is empty"),
    ],
)
def test_bad_qa_csv_lines_name_line_and_field(tmp_path, line, message):
    path = write(tmp_path / "q.qa.csv", f"fine?\t['a']\n{line}\n")
    with pytest.raises(DataError, match=r"q\.qa\.csv" + message):
        list(read_questions(path))


def test_answers_of_a_table_with_a_header(tmp_path):
    path = write(tmp_path / "q.csv", 'question,answers\nwho?,"[""Ada"", \'Lovelace\']"\nwhen?,[]\n')
    answers = [(question.text, question.answers) for question in read_questions(path)]
    assert answers == [("who?", ("Ada", "Lovelace")), ("when?", ())]
    path = write(tmp_path / "q.csv", "question,answers\nwho?,[Ada]\n")
    with pytest.raises(DataError, match=r"q\.csv:2, field 'answers': found '\[Ada\]', a str"):
        list(read_questions(path))


def test_a_table_of_id_and_text(tmp_path):
    for header in ("", "id\ttext\n"):
        path = write(tmp_path / "q.tsv", f"{header}q1\twho?\nq2\twhen?\n")
        questions = [(question.id, question.text) for question in read_questions(path)]
        assert questions == [("q1", "who?"), ("q2", "when?")]
    for content, message in [
        ("q1 who?\n", ":1: 1 columns"),
        ("a\tb\nc\t \n", ":2, field 'question'"),
    ]:
        with pytest.raises(DataError, match=r"q\.tsv" + message):
            list(read_questions(write(tmp_path / "q.tsv", content)))


GOLD = {"answer": "Bern", "provenance": [{"wikipedia_id": "7", "title": "Bern"}]}


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
            # Or P1 would drop the passages that contain the word "supports".
            {"answer": "SUPPORTS"},
        ]
    )
    path = write(tmp_path / "q.jsonl.gz", [record, {"id": 5, "input": "blind?"}])
    query, blind = read_kilt(path)
    assert (query.where, query.id, query.text) == (f"{path}:1", "q1", "capital?")
    assert query.answers == ("Bern", "the city of Bern")
    whole = Span((2, 0), (3, PARAGRAPH_END))
    assert [(place.page_id, place.passage, place.span) for place in query.provenance] == [
        ("7", "", whole),
        ("8", "", Span((2, 5), (3, 9))),
        ("8", "", whole),
        ("", "12", None),
    ]
    assert [output.provenance is None for output in query.outputs] == [False, False, True, True]
    assert query.record == record
    assert (blind.id, blind.outputs) == ("5", ())


def test_an_array_of_queries_is_read_as_lines_are(tmp_path):
    records = [_query(), _query(id="q2")]
    array = write(tmp_path / "q.json", json.dumps(records, indent=1))
    lines = write(tmp_path / "q.jsonl", records)
    read = [[(q.id, q.text, q.outputs) for q in read_questions(path)] for path in (array, lines)]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_query(output="Bern"), r", field 'output': output is \"Bern\": expected a list"),
        (
            _query(output=[GOLD, {"provenance": [7]}]),
            r", field 'output\[1\].provenance\[0\]': .* is 7",
        ),
        (
            _query(output=[{"provenance": [{"start_paragraph_id": "two"}]}]),
            r".*provenance\[0\].start_paragraph_id': .* is \"two\"",
        ),
        (_query(input=" "), r", field 'input': the input is empty"),
    ],
)
def test_bad_queries_name_line_and_field(tmp_path, record, message):
    path = write(tmp_path / "q.jsonl", [_query(id="q2"), record])
    with pytest.raises(DataError, match=r"q\.jsonl:2" + message):
        list(read_kilt(path))
