import gzip
import json

import pytest

from taser_jax.data.readers import dpr
from taser_jax.data.readers.located import Context, Question
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import EmptyPassages, Passage


def _write(path, text: str):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["psgs.tsv", "psgs.tsv.gz"])
def test_passages_with_csv_quotes(tmp_path, name):
    path = _write(
        tmp_path / name,
        "id\ttext\ttitle\n"
        '1\t"He said ""no"", and left."\tNo\n'
        "2\tplain\t\n"
        '3\t"two\nlines"\t"A ""B"""\n'
        "4\tit's 5' 10\" tall\tBob\n",
    )
    assert list(dpr.read_passages(path)) == [
        Passage("1", 'He said "no", and left.', "No"),
        Passage("2", "plain", ""),
        Passage("3", "two\nlines", 'A "B"'),
        Passage("4", "it's 5' 10\" tall", "Bob"),
    ]


def test_columns_go_by_the_header_not_by_their_place(tmp_path):
    path = _write(
        tmp_path / "p.tsv", "title\twikipedia_id\tparagraph_id\tid\ttext\nT\t9\t0\t1\tbody\n"
    )
    assert list(dpr.read_passages(path)) == [Passage("1", "body", "T", page_id="9")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttext\n1\tx\n", r":1: the header has no column 'title'"),
        ("1\tsome text\ta title\n", r":1: the header has no column 'id'"),
        ("id\ttext\ttitle\n1\ta\tb\n2\tno title\n", r":3: 2 tab-separated columns"),
        ("id\ttext\ttitle\n1\ta\tb\tc\n", r":2: 4 tab-separated columns"),
        # The open quote swallows the two lines after it: the row is named by its first line.
        ('id\ttext\ttitle\n1\t"open\tb\n2\ta\tb\n3\ta\tb\n', r":2: 2 tab-separated columns"),
        ("id\ttext\ttitle\n1\ta\tb\n2\t \tb\n", r":3, field 'text': the passage is empty"),
        ("id\ttext\ttitle\n1\ta\tb\n\ta\tb\n", r":3, field 'id': the id is empty"),
        (
            "id\ttext\ttitle\n7\ta\tb\n8\ta\tb\n7\tc\td\n",
            r":4, field 'id': the id '7' was already used on line 2",
        ),
    ],
)
def test_bad_passages_name_line_field_and_fix(tmp_path, content, message):
    path = _write(tmp_path / "p.tsv", content)
    with pytest.raises(DataError, match=r"p\.tsv" + message) as caught:
        list(dpr.read_passages(path))
    assert caught.value.expected
    assert "'id': the id is empty" in message or caught.value.fix


def test_a_field_beyond_all_measure_is_an_open_quote(tmp_path, monkeypatch):
    monkeypatch.setattr(dpr, "_LONGEST_FIELD", 200_000)
    path = _write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "x" * 199_000 + '"\tb\n')
    assert len(next(dpr.read_passages(path)).text) == 199_000
    path = _write(tmp_path / "p.tsv", 'id\ttext\ttitle\n1\t"' + "long line\n" * 30_000)
    with pytest.raises(DataError, match=r"p\.tsv:2: not valid TSV: field larger"):
        list(dpr.read_passages(path))


def test_empty_passages_are_skipped_or_kept_on_request(tmp_path):
    path = _write(tmp_path / "p.tsv", "id\ttext\ttitle\n1\t\tT\n2\tx\tU\n")
    assert [p.id for p in dpr.read_passages(path, empty=EmptyPassages.SKIP)] == ["2"]
    assert [p.id for p in dpr.read_passages(path, empty=EmptyPassages.KEEP)] == ["1", "2"]


def test_a_repeated_id_is_found_across_blocks(tmp_path):
    rows = [f"{n}\ttext\ttitle\n" for n in range(70_000)]
    path = _write(tmp_path / "p.tsv", "id\ttext\ttitle\n" + "".join(rows) + "5\tx\ty\n")
    message = r"p\.tsv:70002, field 'id': the id '5' was already used on line 7"
    with pytest.raises(DataError, match=message):
        for _ in dpr.read_passages(path):
            pass


def test_passages_are_streamed(tmp_path):
    path = _write(tmp_path / "p.tsv", "id\ttext\ttitle\n1\ta\tb\n2\tbroken\n")
    assert next(dpr.read_passages(path)).id == "1"


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
    text = json.dumps(rows, indent=4) if as_array else "\n".join(map(json.dumps, rows)) + "\n"
    path = _write(tmp_path / name, text)
    first, second = dpr.read_training(path)
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
        ({"positive_ctxs": {}}, r"field 'positive_ctxs': found a dict"),
        ({"positive_ctxs": ["x"]}, r"positive_ctxs\[0\]: found a str"),
        ({"positive_ctxs": [{"title": "x"}]}, r"positive_ctxs\[0\], field 'text': no field"),
        (
            {"positive_ctxs": [{"text": "x", "passage_id": [1]}]},
            r"positive_ctxs\[0\], field 'passage_id': found \[1\]",
        ),
        ({"qid": True}, r"field 'qid': found True"),
    ],
)
def test_bad_training_rows_name_line_and_field(tmp_path, changes, message):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, **changes}) + "\n")
    with pytest.raises(DataError, match=r"t\.jsonl:2, " + message):
        list(dpr.read_training(path))


def test_a_file_without_positives_is_not_a_training_file(tmp_path):
    path = _write(tmp_path / "t.jsonl", '{"question": "q", "answers": ["a"]}\n')
    with pytest.raises(DataError, match=r"t\.jsonl:1: no field 'positive_ctxs'"):
        list(dpr.read_training(path))
    assert [q.answers for q in dpr.read_questions(path)] == [("a",)]


@pytest.mark.parametrize("name", ["q.qa.csv", "q.qa.csv.gz"])
def test_qa_csv_bare_and_in_pyserini_quotes(tmp_path, name):
    path = _write(
        tmp_path / name,
        "who?\t['Ada', \"O'Hara\"]\n"
        'when?\t["1815"]\n'
        'quoted?\t"[""5\' 10"", ""a \\""b\\""""]"\n'
        'the "Charge" of?\t["Crimean War", "x\\\\s?y"]\n'
        "none?\t[]\n",
    )
    assert [(q.text, q.answers, q.where.rpartition(":")[2]) for q in dpr.read_questions(path)] == [
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
    path = _write(tmp_path / "q.qa.csv", f"fine?\t['a']\n{line}\n")
    with pytest.raises(DataError, match=r"q\.qa\.csv" + message):
        list(dpr.read_questions(path))


def test_entity_questions_are_a_json_array(tmp_path):
    path = _write(tmp_path / "P17.test.json", '[{"question": "Where?", "answers": ["Peru"]}]')
    assert [(q.text, q.answers) for q in dpr.read_questions(path)] == [("Where?", ("Peru",))]
