"""Formats of folders, from the names and first lines of their files."""

import json
import logging
import os

import pytest
from written_files import write_all

from taser_jax.data.prepare.detection import detect
from taser_jax.storage.errors import ConfigError

PASSAGES = "id\ttext\ttitle\np1\tsome text\tA title\n"
QRELS = "query-id\tcorpus-id\tscore\n"
DPR = {"question": "q?", "answers": ["a"], "positive_ctxs": []}
KILT = {"id": "1", "input": "q", "output": [{"answer": "a"}]}
BEIR = {
    "corpus.jsonl.gz": [{"_id": "1"}],
    "queries.jsonl.gz": [{"_id": "1"}],
    "qrels/dev.tsv.gz": QRELS,
    "qrels/test.tsv.gz": QRELS,
    "notes.json": "{}",
}
FILES_OF_DPR = {
    "psgs.tsv.gz": PASSAGES,
    "nq-train.json.gz": json.dumps([DPR]),
    "nq-dev.qa.csv": "q?\t['a']\n",
    "trivia.test.jsonl": [DPR],
    "one.json": [DPR],
    "README.md": "text",
    "scores.json": '{\n "a": 1\n}',
}
FILES_OF_KILT = {
    "passages.tsv": "id\ttext\ttitle\twikipedia_id\tparagraph_id\n1\tx\tX\t7\t0\n",
    "fever-train-kilt.jsonl": [KILT],
    "fever-dev-kilt.jsonl": [KILT],
}
TABLES = {
    "passages.tsv": PASSAGES,
    "faq.train.queries.tsv": "1\thow many 3\n",
    "faq.train.qrels.tsv": "1 0 p1 1\n",
    "faq.dev.queries.csv": "id,text\n3,when\n",
    "faq.dev.qrels.csv": "qid,doc_id,relevance\n3,p1,1\n",
    "faq.dev.run.csv": "qid,doc_id,rank,score\n3,p1,1,0.5\n",
    "unjudged.tsv": "3\twhy\n",
}


@pytest.mark.parametrize(
    ("files", "passages", "questions"),
    [
        (
            BEIR,
            "corpus.jsonl.gz",
            {
                # "dev" is our validation; the task is the folder's.
                "folder.validation": "queries.jsonl.gz qrels/dev.tsv.gz",
                "folder.test": "queries.jsonl.gz qrels/test.tsv.gz",
            },
        ),
        (
            FILES_OF_DPR,
            "psgs.tsv.gz",
            {
                "nq.train": "nq-train.json.gz",
                "nq.validation": "nq-dev.qa.csv",
                "trivia.test": "trivia.test.jsonl",
                "one.train+validation+test": "one.json",
            },
        ),
        (
            FILES_OF_KILT,
            "passages.tsv",
            {
                # KILT's test sets are blind: dev is for tests, and train is divided.
                "fever.test": "fever-dev-kilt.jsonl",
                "fever.train+validation": "fever-train-kilt.jsonl",
            },
        ),
        (
            TABLES,
            "passages.tsv",
            {
                "faq.train": "faq.train.queries.tsv faq.train.qrels.tsv",
                "faq.validation": "faq.dev.queries.csv faq.dev.qrels.csv",
            },
        ),
    ],
    ids=["beir", "dpr", "kilt", "tables"],
)
def test_formats_by_names_and_first_lines(tmp_path, files, passages, questions):
    folder = write_all(tmp_path / "folder", files)
    detected = detect(folder)
    assert detected.passages == (str(folder / passages),)
    assert {
        f"{task}.{split}": " ".join(
            os.path.relpath(path, folder) for path in (asked.questions, asked.qrels) if path
        )
        for task, splits in detected.tasks.items()
        for split, asked in splits.items()
    } == questions


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no such folder"),
        ({"picture.png": "x"}, "found no file of text"),
        (
            {"a.tsv": PASSAGES, "b.tsv": PASSAGES, "nq-train.json": [DPR]},
            r"a\.tsv: passages; b\.tsv: passages; nq-train\.json",
        ),
        (
            {"corpus.jsonl": [{"_id": "1"}], "qrels/test.tsv": QRELS},
            r"no queries\.jsonl with judgements",
        ),
        # Which of two is meant, nobody can know.
        (
            {name: [{"_id": "a", "text": name}] for name in ("corpus.jsonl", "corpus.jsonl.gz")},
            r"folder: corpus\.jsonl and corpus\.jsonl\.gz may",
        ),
        (
            {"p.tsv": PASSAGES, "nq-dev.json": [DPR], "nq-validation.json": [DPR]},
            "are both validation",
        ),
    ],
)
def test_what_is_not_recognised_is_listed(tmp_path, files, message):
    if files:
        write_all(tmp_path / "folder", files)
    with pytest.raises(ConfigError, match=message):
        detect(tmp_path / "folder")


def test_queries_and_judgements_alone_are_named(tmp_path, caplog):
    files = {"passages.tsv": PASSAGES, "faq.train.queries.tsv": "1\twhy\n"}
    folder = write_all(tmp_path / "folder", files | {"faq.test.qrels.tsv": "1 0 p1 1\n"})
    with caplog.at_level(logging.WARNING, logger="taser"):
        assert detect(folder).tasks == {}
    assert "faq.train.queries.tsv is left out: no judgements" in caplog.text
    assert "faq.test.qrels.tsv is left out: no queries" in caplog.text
