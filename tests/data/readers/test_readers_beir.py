import gzip
import json
import pathlib

import pytest

from taser_jax.data.readers import beir, tsv
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

CORPUS = [
    {"_id": "d1", "title": "One", "text": "first", "metadata": {}},
    {"_id": "d2", "text": "second"},
]
QUERIES = [{"_id": "q1", "text": "one?"}, {"_id": "q2", "text": "two?"}]


def beir_folder(root: pathlib.Path, *, zipped: bool = False, **files: str) -> pathlib.Path:
    contents = {
        "corpus.jsonl": "".join(json.dumps(row) + "\n" for row in CORPUS),
        "queries.jsonl": "".join(json.dumps(row) + "\n" for row in QUERIES),
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n",
    }
    (root / "qrels").mkdir(parents=True)
    for name, content in {**contents, **files}.items():
        if zipped:
            (root / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        else:
            (root / name).write_text(content)
    return root


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_is_read_gzipped_or_not(tmp_path, zipped):
    folder = beir_folder(tmp_path / "beir", zipped=zipped)
    assert list(beir.read_passages(folder)) == [
        Passage("d1", "first", "One"),
        Passage("d2", "second", ""),
    ]
    assert [(query.id, query.text) for query in beir.read_queries(folder)] == [
        ("q1", "one?"),
        ("q2", "two?"),
    ]
    assert list(beir.qrels_files(folder)) == ["test"]
    judgements = tsv.read_qrels(beir.qrels_files(folder)["test"])
    assert [(one.query_id, one.passage_id, one.relevance) for one in judgements] == [
        ("q1", "d1", 1),
        ("q1", "d2", 0),
    ]


def test_dev_is_our_validation(tmp_path):
    folder = beir_folder(tmp_path, **{"qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq2\td2\t2\n"})
    assert list(beir.qrels_files(folder)) == ["validation", "test"]
    judgements = tsv.read_qrels(beir.qrels_files(folder)["validation"])
    assert [one.relevance for one in judgements] == [2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "x"}', r":2, field '_id': no id"),
        ('{"_id": "", "text": "x"}', r":2, field '_id': no id"),
        ('{"_id": "d9"}', r":2, field 'text': no field 'text'"),
        ('{"_id": "d9", "text": "x", "title": 3}', r":2, field 'title': found 3"),
        ('{"_id": "d9", "text": ""}', r":2, field 'text': the passage is empty"),
        ('{"_id": "d1", "text": "x"}', r":2, field 'id': the id 'd1' was already used on line 1"),
        ('{"_id": "d9", "text": ', r":2: not valid JSON"),
    ],
)
def test_a_bad_corpus_names_line_and_field(tmp_path, row, message):
    folder = beir_folder(tmp_path, **{"corpus.jsonl": f"{json.dumps(CORPUS[0])}\n{row}\n"})
    with pytest.raises(DataError, match=r"corpus\.jsonl" + message):
        list(beir.read_passages(folder))


def test_a_folder_that_is_no_beir_folder(tmp_path):
    with pytest.raises(DataError, match=r"there is no corpus\.jsonl"):
        beir.read_passages(tmp_path)
    with pytest.raises(DataError, match=r"there is no queries\.jsonl"):
        list(beir.read_queries(tmp_path))
