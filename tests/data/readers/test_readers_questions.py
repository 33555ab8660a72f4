"""Questions of DPR's, BEIR's and plain files; those of KILT's are in test_readers_kilt.py."""

import json

import pytest
from written_files import write

from taser_jax.data.readers.located import Context, Question
from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.errors import DataError

ROW = {
    "question": "who?",
    "answers": ["Ada", 1815],
    "positive_ctxs": [{"title": "Ada", "text": "She ...", "passage_id": 12, "score": 3.0}],
    "negative_ctxs": [{"title": None, "text": "other"}],
    "hard_negative_ctxs": [{"text": "near", "psg_id": "13"}],
}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.jsonl", "t.jsonl.gz"])
def test_training_rows_in_json_and_jsonl(tmp_path, name):
    rows = [ROW, {"question": "when?", "answers": [], "positive_ctxs": [], "qid": 7}]
    as_array = ".jsonl" not in name
    path = write(tmp_path / name, json.dumps(rows, indent=4) if as_array else rows)
    first, second = read_questions(path)
    assert first == Question(
        where=f"{path}:{2 if as_array else 1}",
        text="who?",
        answers=("Ada", "1815"),
        positives=(Context("Ada", "She ...", "12"),),
        hard_negatives=(Context("", "near", "13"),),
        negatives=(Context("", "other"),),
    )
    assert (second.id, second.positives) == ("7", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": "Ada"}, r"field 'answers': found 'Ada', a str(.|\n)*fix: write \['Ada'\]"),
        ({"answers": None}, r"field 'answers': found None"),
        ({"answers": [["Ada"]]}, r"field 'answers': found \[\['Ada'\]\]"),
        ({"question": 3}, r"field 'question': found 3"),
        ({"question": " "}, r"field 'question': the question is empty"),
        ({"positive_ctxs": {}}, r"field 'positive_ctxs': .* expected a list"),
        ({"positive_ctxs": ["x"]}, r"field 'positive_ctxs\[0\]': .* expected an object"),
        ({"positive_ctxs": [{"title": "x"}]}, r"field 'positive_ctxs\[0\]': .* field 'text'"),
        (
            {"positive_ctxs": [{"text": "x", "passage_id": [1]}]},
            r"field 'positive_ctxs\[0\].passage_id': .* is \[1\]",
        ),
        ({"qid": True}, r"field 'qid': found True"),
    ],
)
def test_bad_training_rows_name_line_and_field(tmp_path, changes, message):
    path = write(tmp_path / "t.jsonl", [ROW, {**ROW, **changes}])
    with pytest.raises(DataError, match=r"t\.jsonl:2, " + message):
        list(read_questions(path))


@pytest.mark.parametrize("name", ["q.qa.csv", "q.qa.csv.gz"])
def test_qa_csv_bare_and_in_pyserini_quotes(tmp_path, name):
    path = write(
        tmp_path / name,
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
        ("who?\t'Ada'", r":2, field 'answers': found 'Ada', a str"),
        ("who?\t{'Ada'}", r":2, field 'answers': found \{'Ada'\}, a set"),
        ("who?\tAda", r":2, field 'answers': found 'Ada', which is not a list literal"),
        ("who?\t__import__('os').getcwd()", r":2, field 'answers': .* not a list literal"),
        ("who?", r":2: 1 tab-separated columns"),
        ('"who?\t["Ada"]', r":2: 1 tab-separated columns"),
        ("who?\t['a']\tx", r":2: 3 tab-separated columns"),
        ("\t['a']", r":2, field 'question': the question is empty"),
    ],
)
def test_bad_qa_csv_lines_name_line_and_field(tmp_path, line, message):
    path = write(tmp_path / "q.qa.csv", f"fine?\t['a']\n{line}\n")
    with pytest.raises(DataError, match=r"q\.qa\.csv" + message):
        list(read_questions(path))


@pytest.mark.parametrize("name", ["queries.jsonl", "queries.jsonl.gz"])
def test_beirs_queries(tmp_path, name):
    path = write(tmp_path / name, '{"_id": "q1", "text": "one?"}\n{"_id": "q2", "text": "two?"}\n')
    found = [(question.id, question.text) for question in read_questions(path)]
    assert found == [("q1", "one?"), ("q2", "two?")]


def test_a_table_of_id_and_text(tmp_path):
    for header in ("", "id\ttext\n"):
        path = write(tmp_path / "q.tsv", f"{header}q1\twho?\nq2\twhen?\n")
        found = [(question.id, question.text) for question in read_questions(path)]
        assert found == [("q1", "who?"), ("q2", "when?")]
    for content, message in [("q1 who?\n", ":1: 1 tab-"), ("a\tb\n\tb\n", ":2: the query's id")]:
        with pytest.raises(DataError, match=r"q\.tsv" + message):
            list(read_questions(write(tmp_path / "q.tsv", content)))
