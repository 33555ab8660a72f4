"""Formats of folders, from the names and first lines of their files."""

import json
import pathlib

import pytest
from written_files import write_all

from taser_jax.data.prepare.detection import detect
from taser_jax.storage.errors import ConfigError

PASSAGES = "id\ttext\ttitle\np1\tsome text\tA title\n"
QRELS = "query-id\tcorpus-id\tscore\n"
DPR = {"question": "q?", "answers": ["a"], "positive_ctxs": []}
KILT = {"id": "1", "input": "q", "output": [{"answer": "a"}]}
# Name of a file -> its content, and what it is taken for.
BEIR = {
    "corpus.jsonl.gz": ([{"_id": "1"}], "passages"),
    "queries.jsonl.gz": ([{"_id": "1"}], "folder.train", "folder.validation", "folder.test"),
    # "dev" is our validation; the task is the folder's.
    "qrels/dev.tsv.gz": (QRELS, "folder.validation qrels"),
    "qrels/test.tsv.gz": (QRELS, "folder.test qrels"),
    "qrels/training.jsonl": ([{"query-id": "1", "corpus-id": "1"}], "folder.train qrels"),
    "qrels/run.tsv": ("1\t1\t1\n",),
    "notes.json": ("{}",),
}
FILES_OF_DPR = {
    "psgs.tsv.gz": (PASSAGES, "passages"),
    "nq-train.json.gz": (json.dumps([DPR]), "nq.train"),
    "nq-dev.qa.csv": ("q?\t['a']\n", "nq.validation"),
    "trivia.test.jsonl": ([DPR], "trivia.test"),
    "one.json": ([DPR], "one.train+validation+test"),
    "README.md": ("text",),
    "scores.json": ('{\n "a": 1\n}',),
}
FILES_OF_KILT = {
    "passages.tsv": ("id\ttext\ttitle\twikipedia_id\tparagraph_id\n1\tx\tX\t7\t0\n", "passages"),
    # KILT's test sets are blind: dev is for tests, and train is divided.
    "fever-train-kilt.jsonl": ([KILT], "fever.train+validation"),
    "fever-dev-kilt.jsonl": ([KILT], "fever.test"),
}
TABLES = {
    "passages.tsv": (PASSAGES, "passages"),
    "faq.train.queries.tsv": ("1\thow many 3\n", "faq.train"),
    "faq.train.qrels.tsv": ("1 0 p1 1\n", "faq.train qrels"),
    "faq.dev.queries.csv": ("id,text\n3,when\n", "faq.validation"),
    "faq.dev.qrels.csv": ("qid,doc_id,relevance\n3,p1,1\n", "faq.validation qrels"),
    "faq.test.queries.csv": ("id,text\n5,who\n", "faq.test"),
    "faq.test.qrels.csv": ("query_id,doc_id\n5,p1\n", "faq.test qrels"),
    "faq.dev.run.csv": ("qid,doc_id,rank,score\n3,p1,1,0.5\n",),
    "unjudged.tsv": ("3\twhy\n",),
    "one.queries.tsv": ("4\twho\n", "one.train", "one.test"),
    "one.qrels.train.tsv": ("4 0 p1 1\n", "one.train qrels"),
    "one.qrels.test.tsv": ("4 0 p1 1\n", "one.test qrels"),
    "two.test.queries.tsv": ("4\twho\n", "two.test"),
    "two.test.qrels.tsv": ("4\tp1\t1\n", "two.test qrels"),
}

MS_MARCO = {
    "collection.tsv": ("0\tsome text\n", "passages"),
    "queries.train.tsv": ("1\thow\n", "folder.train"),
    "qrels.train.tsv": ("1\t0\t0\t1\n", "folder.train qrels"),
    "queries.dev.small.tsv": ("2\twhy\n", "folder.validation"),
    "qrels.dev.small.tsv": ("2\t0\t0\t1\n", "folder.validation qrels"),
}
NAMES = {
    "Passages.CSV": ("ID,TEXT\np1,some text\n", "passages"),
    "train_queries.tsv": ("1\thow\n", "folder.train"),
    "train_qrels.tsv": ("1 0 p1 1\n", "folder.train qrels"),
    "my_faq_val.jsonl": ([DPR], "my_faq.validation"),
    "my_faq_Test.JSONL": ([DPR], "my_faq.test"),
    "their_training.jsonl": ([DPR], "their.train"),
    "their-testset.jsonl": ([DPR], "their.test"),
    "his-eval.jsonl": ([DPR], "his.test"),
    "herMedQuADTrain.jsonl": ([DPR], "herMedQuAD.train"),
    "Über (1).json": ([DPR], "ber_1.train+validation+test"),
    "._Passages.CSV": ("\0",),
}


@pytest.mark.parametrize(
    "files",
    [BEIR, FILES_OF_DPR, FILES_OF_KILT, TABLES, MS_MARCO, NAMES],
    ids=["beir", "dpr", "kilt", "tables", "ms marco", "names"],
)
def test_formats_by_names_and_first_lines(tmp_path, files):
    folder = write_all(tmp_path / "folder", {name: parts[0] for name, parts in files.items()})
    detected = detect(folder)
    found = {(path, "passages") for path in detected.passages}
    for task, splits in detected.tasks.items():
        for split, asked in splits.items():
            found.add((asked.questions, f"{task}.{split}"))
            if asked.qrels:
                found.add((asked.qrels, f"{task}.{split} qrels"))
    told = {(str(folder / name), part) for name, (_, *parts) in files.items() for part in parts}
    assert found == told


BARE_BEIR = {"corpus.jsonl": [{"_id": "1"}], "qrels/test.tsv": QRELS}
ASKED_TWICE = {"queries.jsonl": [{"_id": "1"}], "qrels/eval.tsv": QRELS}
# What is said -> files of which it is said.
UNRECOGNISED = {
    "no such folder": {},
    r"found no file of text \(\.json, ": {"picture.png": "x"},
    "found a.json: no col.*; nli.csv: no": {"nli.csv": "premise,hypothesis\n", "a.json": "{}"},
    r"a\.tsv: passages; b\.tsv: passages; nq-dev\.json": {"a.tsv": PASSAGES, "b.tsv": PASSAGES}
    | {"nq-dev.json": [DPR]},
    r"no queries\.jsonl with judgements": BARE_BEIR,
    r"queries\.jsonl, but no corpus\.jsonl\n": ASKED_TWICE | {"README.md": "card"},
    # Two texts that are compared are no passage, and the options of a quiz no answers.
    r"quiz\.csv: no col(.|\n)*sts\.csv: no": {
        "quiz.csv": "question,answer1,answer2\nq,a,b\n",
        "sts.csv": "text1,text2,label\na,b,1\n",
    },
    # A card is not what is looked for.
    r"faq\.csv: no col(.|\n)*rename files or col": {"README.md": "x", "faq.csv": "Frage;Antwort\n"},
    # Which of two is meant, nobody can know.
    r"folder: corpus\.jsonl and corpus\.jsonl\.gz may": {
        name: [{"_id": "a", "text": name}] for name in ("corpus.jsonl", "corpus.jsonl.gz")
    },
    "are both validation": {name: [DPR] for name in ("nq-dev.json", "nq-validation.json")}
    | {"p.tsv": PASSAGES},
    r"qrels/eval\.tsv and .*qrels/test\.tsv are both test": BARE_BEIR | ASKED_TWICE,
    r"faq\.csv: its column 'split' is not": {"faq.csv": "question,answer,Split\nq,a,test\n"},
}


@pytest.mark.parametrize("message", UNRECOGNISED)
def test_what_is_not_recognised_is_listed(tmp_path, message):
    if files := UNRECOGNISED[message]:
        write_all(tmp_path / "folder", files)
    with pytest.raises(ConfigError, match=message):
        detect(tmp_path / "folder")


def test_what_is_not_read_is_named(tmp_path, caplog):
    files = {"a.md": "x", "b.txt": "list\n\tone\t2\n", "clicks.csv": "url,day\n"}
    assert detect(write_all(tmp_path / "notes", files)).passages == (str(tmp_path / "notes"),)
    detect(write_all(tmp_path / "notes", {"links.csv": "name,content\na,b\n"}))
    assert "2 other files are left out, such as " in caplog.text
    assert "a.md, " in caplog.text
    assert "clicks.csv is left out: no columns" in caplog.text
    # All but the card of a data set is in folders of its own.
    files = {"README.md": "card", "topics.md": "text", "en/a.csv": "", ".git/b.csv": ""}
    folder = write_all(tmp_path / "cloned", files)
    (folder / "linked").symlink_to(tmp_path)
    caplog.clear()
    assert detect(folder).passages == (str(folder),)
    assert caplog.text.count("left out") == 1
    assert "2 other files are left out, such as " in caplog.text
    assert "cloned/linked: the passages are those of .txt," in caplog.text
    with pytest.raises(ConfigError, match=r"links\.csv: it is a file"):
        detect(tmp_path / "notes" / "links.csv")


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_tables_of_a_cloned_data_set_are_beside_its_card(tmp_path, name):
    table = [{"question": "q", "answer": "a"}] if name.endswith("l") else "question,answer\nq,a\n"
    files = {"README.md": "card", "requirements.txt": "", f"data/{name}": table}
    folder = write_all(tmp_path / "faq", files)
    assert detect(folder).passages == (str(folder / "data" / name),)
    # Of a site's pages the tables are another matter.
    folder = write_all(tmp_path / "faq", {"page.md": "text"})
    assert detect(folder).passages == (str(folder),)


def test_a_folder_of_texts_is_walked_once(tmp_path, monkeypatch):
    folder = write_all(tmp_path / "notes", {"a.md": "x", "b/c.md": "y", "d.csv": "url\n"})
    walked, walk = [], pathlib.Path.rglob

    def rglob(path, pattern):
        walked.append(pattern)
        return walk(path, pattern)

    monkeypatch.setattr(pathlib.Path, "rglob", rglob)
    assert detect(folder).passages == (str(folder),)
    assert walked.count("*") == 1


def test_queries_and_judgements_alone_are_named(tmp_path, caplog):
    files = {"passages.tsv": PASSAGES, "faq.train.queries.tsv": "1\twhy\n"}
    folder = write_all(tmp_path / "folder", files | {"faq.test.qrels.tsv": "1 0 p1 1\n"})
    assert detect(folder).tasks == {}
    assert "faq.train.queries.tsv is left out: no judgements" in caplog.text
    assert "faq.test.qrels.tsv is left out: no queries" in caplog.text
