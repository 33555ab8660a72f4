import json

import numpy as np
import pytest

from taser_jax.data.token_store.negatives import read_metadata, read_negatives, write_negatives
from taser_jax.storage.errors import DataError, FingerprintError

METADATA = {"collection_fingerprint": "c0", "source": "bm25"}


def write(directory, task="squad", **changes):
    arguments = {
        "query_ids": ["q0", "q1"],
        "rows": [np.array([5, 3, -1]), np.array([7])],
        "scores": [np.array([2.5, 1.0, -np.inf]), np.array([0.5])],
        "metadata": METADATA,
    }
    return write_negatives(directory, task, "train", **(arguments | changes))


def test_file_is_as_documented(tmp_path):
    path = write(tmp_path)
    assert path.name == "squad.train.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"query_id": "q0", "rows": [5, 3], "scores": [2.5, 1.0]},
        {"query_id": "q1", "rows": [7], "scores": [0.5]},
    ]
    files = {"squad.train.jsonl": {}}
    assert read_metadata(tmp_path) == {"format_version": 2, **METADATA, "files": files}


def test_reads_aligned_with_the_queries(tmp_path):
    write(tmp_path)
    ids = ["q1", "unseen", "q0"]
    lines = read_negatives(tmp_path, "squad", "train", ids, collection_fingerprint="c0")
    assert [line.rows.tolist() for line in lines] == [[7], [], [5, 3]]
    assert not any(line.is_dropped for line in lines)


def test_kinds_do_not_mix(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match="it has negatives with source 'bm25', not 'model'"):
        write(tmp_path, metadata=METADATA | {"source": "model"})
    with pytest.raises(FingerprintError, match=r"collection c0\n  expected: collection c1"):
        read_negatives(tmp_path, "squad", "train", ["q0"], collection_fingerprint="c1")


def test_each_file_has_facts_of_its_own(tmp_path):
    write(tmp_path, facts={"left_out": 3})
    write(tmp_path, "nq", query_ids=["a"], rows=[[1]], scores=[[1.0]], facts={"left_out": 5})
    files = {"squad.train.jsonl": {"left_out": 3}, "nq.train.jsonl": {"left_out": 5}}
    assert read_metadata(tmp_path)["files"] == files
    write(tmp_path, facts={"left_out": 4})
    assert read_metadata(tmp_path)["files"] == files | {"squad.train.jsonl": {"left_out": 4}}
    assert read_negatives(tmp_path, "nq", "train", ["a"])[0].rows.tolist() == [1]
    assert read_negatives(tmp_path, "squad", "train", ["q1"])[0].rows.tolist() == [7]


def test_dropped_queries_come_back(tmp_path):
    path = write(tmp_path, rows=[[5, 3], []], scores=[[2.0, 1.0], []], dropped={"q1"})
    second = json.loads(path.read_text().splitlines()[1])
    assert second == {"query_id": "q1", "rows": [], "scores": [], "dropped": True}
    second, first = read_negatives(tmp_path, "squad", "train", ["q1", "q0"])
    assert (first.is_dropped, second.is_dropped) == (False, True)


def test_fields_of_another_version_are_skipped(tmp_path):
    path = write(tmp_path, metadata=METADATA | {"teachers": {"bm25": 1.0}})
    line = {"query_id": "q0", "rows": [5], "scores": [2.0]}
    path.write_text(json.dumps(line | {"teacher": {"positives": [1.5], "negatives": [0.25]}}))
    (tmp_path / "checksums.txt").unlink()
    [read] = read_negatives(tmp_path, "squad", "train", ["q0"], collection_fingerprint="c0")
    assert (read.rows.tolist(), read.scores.tolist(), read.is_dropped) == ([5], [2.0], False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a line of negatives"),
        ("\udcff", "not a line of negatives .*invalid character"),
        ('{"query_id": "q2", "rows": [-1], "scores": [1]}', r">= 0 - at `\$.rows\[0\]`"),
        ('{"query_id": "q1", "rows": [], "scores": []}', "'q1' is repeated"),
        ('{"query_id": "q2", "rows": [1], "scores": []}', "query 'q2': 0 scores of 1 rows"),
        ('{"query_id": "q2", "rows": [1], "scores": [1e999]}', "out of range"),
        ('{"query_id": "q2", "rows": [1], "scores": ["1"]}', r"at `\$.scores\[0\]`"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    (tmp_path / "checksums.txt").unlink()
    with pytest.raises(DataError, match=rf"squad\.train\.jsonl:3.*{message}"):
        read_negatives(tmp_path, "squad", "train", ["q0"])


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match="no negatives here"):
        read_negatives(tmp_path, "squad", "train", ["q0"])
    write(tmp_path)
    with pytest.raises(DataError, match=r"no such file\n  expected: one of squad\.train\.jsonl"):
        read_negatives(tmp_path, "nq", "train", ["q0"])
    with pytest.raises(DataError, match="none of the 1 queries"):
        read_negatives(tmp_path, "squad", "train", ["x"])
    (tmp_path / "metadata.json").write_text('{"format_version": 1}')
    (tmp_path / "checksums.txt").unlink()
    with pytest.raises(DataError, match=r"format version 1\n(.|\n)*mine them again"):
        read_negatives(tmp_path, "squad", "train", ["q0"])
