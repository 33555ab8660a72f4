import pytest

from taser_jax.data.readers import tsv
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


def _write(path, text: str):
    path.write_text(text)
    return path


@pytest.mark.parametrize("header", ["", "id\ttext\n", "id\ttext\ttitle\n"])
def test_passages_take_quotes_as_they_are(tmp_path, header):
    path = _write(tmp_path / "p.tsv", header + '1\t"quoted" text\r\n2\ta "b\tTitle\n')
    assert list(tsv.read_passages(path)) == [
        Passage("1", '"quoted" text'),
        Passage("2", 'a "b', "Title"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\ta\n2\n", r":2: 1 columns"),
        ("1\ta\tb\tc\n", r":1: 4 columns"),
        ("1\ta\n1\tb\n", r":2, field 'id': the id '1' was already used on line 1"),
        ("1\ta\n2\t\tT\n", r":2, field 'text': the passage is empty"),
    ],
)
def test_bad_passages_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=r"p\.tsv" + message):
        list(tsv.read_passages(_write(tmp_path / "p.tsv", content)))


def test_queries(tmp_path):
    path = _write(tmp_path / "q.tsv", "q1\twho?\nq2\twhen?\n")
    assert [(query.id, query.text) for query in tsv.read_queries(path)] == [
        ("q1", "who?"),
        ("q2", "when?"),
    ]
    for content, message in [("q1 who?\n", ":1: 1 columns"), ("a\tb\n\tb\n", ":2: the query's id")]:
        with pytest.raises(DataError, match=r"q\.tsv" + message):
            list(tsv.read_queries(_write(tmp_path / "q.tsv", content)))


@pytest.mark.parametrize(
    "content",
    ["q1 0 d1 1\nq1\t0\td2\t-1\n\n", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t-1\n"],
)
def test_qrels_of_trec_and_beir(tmp_path, content):
    path = _write(tmp_path / "qrels.tsv", content)
    assert [(one.query_id, one.passage_id, one.relevance) for one in tsv.read_qrels(path)] == [
        ("q1", "d1", 1),
        ("q1", "d2", -1),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1 0 d1 1\nq1 d2 1\n", r":2: 3 columns"),
        ("query-id\tcorpus-id\tscore\nq1 d1 1\n", r":2: 1 columns"),
        ("q1 0 d1 yes\n", r":1, last column: the grade is 'yes'"),
    ],
)
def test_bad_qrels_name_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=r"qrels\.tsv" + message):
        list(tsv.read_qrels(_write(tmp_path / "qrels.tsv", content)))
