"""Formats of folders, from the names and first lines of their files."""

import json
import pathlib

import pytest
from written_files import write_all

from taser_jax.data.prepare.detection import detect
from taser_jax.storage.errors import ConfigError

PASSAGES = "id\ttext\ttitle\np1\tsome text\tA title\n"
DPR = {"question": "q?", "answers": ["a"], "positive_ctxs": []}
KILT = {"id": "1", "input": "q", "output": [{"answer": "a"}]}


def test_a_file_beside_its_packed_twin_is_refused(tmp_path):
    """Which of the two is meant, nobody can know."""
    twins = {name: [{"_id": "a", "text": name}] for name in ("corpus.jsonl", "corpus.jsonl.gz")}
    with pytest.raises(ConfigError, match=r"raw: corpus\.jsonl and corpus\.jsonl\.gz may"):
        detect(write_all(tmp_path / "raw", twins))


def _names(detected):
    return {
        task: {
            split: tuple(
                path and pathlib.Path(path).name for path in (files.questions, files.qrels)
            )
            for split, files in splits.items()
        }
        for task, splits in detected.questions.items()
    }


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_beir(tmp_path, ending):
    folder = tmp_path / "facts"
    judged = {
        f"qrels/{name}.tsv{ending}": "query-id\tcorpus-id\tscore\n" for name in ("dev", "test")
    }
    texts = {f"{name}.jsonl{ending}": [{"_id": "1"}] for name in ("corpus", "queries")}
    write_all(folder, {**judged, **texts, "notes.json": "{}"})
    detected = detect(folder)
    assert detected.passages == (f"{folder}/corpus.jsonl{ending}",)
    queries = f"queries.jsonl{ending}"
    expected = {"validation": (queries, f"dev.tsv{ending}"), "test": (queries, f"test.tsv{ending}")}
    assert _names(detected) == {"facts": expected}
    # "dev" is our validation; a name given replaces the folder's.
    assert _names(detect(folder, "claims")) == {"claims": expected}
    (folder / queries).unlink()
    with pytest.raises(ConfigError, match=r"no queries\.jsonl with judgements"):
        detect(folder)


def test_dpr(tmp_path):
    files = {
        "psgs.tsv.gz": PASSAGES,
        "nq-train.json.gz": json.dumps([DPR]),
        "nq-dev.qa.csv": "q?\t['a']\n",
        "trivia.test.jsonl": [DPR],
        "README.md": "text",
        "scores.json": '{\n "a": 1\n}',
    }
    write_all(tmp_path, files)
    detected = detect(tmp_path)
    assert [pathlib.Path(path).name for path in detected.passages] == ["psgs.tsv.gz"]
    assert _names(detected) == {
        "nq": {"train": ("nq-train.json.gz", None), "validation": ("nq-dev.qa.csv", None)},
        "trivia": {"test": ("trivia.test.jsonl", None)},
    }


def test_kilt_tests_on_dev_and_divides_train(tmp_path):
    pages = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n1\tx\tX\t7\t0\n"
    names = ("fever-train-kilt", "fever-dev-kilt", "claims")
    write_all(tmp_path, {"passages.tsv": pages, **{f"{name}.jsonl": [KILT] for name in names}})
    detected = detect(tmp_path)
    assert _names(detected) == {
        "claims": {"train+validation+test": ("claims.jsonl", None)},
        "fever": {
            "test": ("fever-dev-kilt.jsonl", None),
            "train+validation": ("fever-train-kilt.jsonl", None),
        },
    }


def test_tsv_with_and_without_a_task_in_the_names(tmp_path):
    files = {
        "passages.tsv": PASSAGES,
        "faq.train.queries.tsv": "1\thow many 3\n",
        "faq.train.qrels.tsv": "1 0 p1 1\n",
        "faq.dev.queries.csv": "id,text\n3,when\n",
        "faq.dev.qrels.csv": "qid,doc_id,relevance\n3,p1,1\n",
        "faq.dev.run.csv": "qid,doc_id,rank,score\n3,p1,1,0.5\n",
        "faq.test.queries.tsv": "2\twhat\n",
        "faq.test.qrels.tsv": "query-id\tcorpus-id\tscore\n2\tp1\t1\n",
        "unjudged.tsv": "3\twhy\n",
    }
    detected = detect(write_all(tmp_path / "my_faq", files))
    assert _names(detected) == {
        "faq": {
            "train": ("faq.train.queries.tsv", "faq.train.qrels.tsv"),
            "validation": ("faq.dev.queries.csv", "faq.dev.qrels.csv"),
            "test": ("faq.test.queries.tsv", "faq.test.qrels.tsv"),
        }
    }
    plain = {name.replace("faq.", ""): text for name, text in files.items()}
    assert list(detect(write_all(tmp_path / "plain", plain)).questions) == ["plain"]


def test_what_is_not_recognised_is_listed(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        detect(tmp_path / "none")
    write_all(tmp_path, {"a.tsv": PASSAGES, "b.tsv": PASSAGES, "nq-train.json": [DPR]})
    with pytest.raises(ConfigError, match=r"a\.tsv: passages; b\.tsv: passages; nq-train\.json"):
        detect(tmp_path)


def test_a_file_without_a_split_is_all_three_and_two_of_one_split_clash(tmp_path):
    write_all(tmp_path / "one", {"p.tsv": PASSAGES, "nq.json": [DPR]})
    assert _names(detect(tmp_path / "one")) == {"nq": {"train+validation+test": ("nq.json", None)}}
    twice = {"nq-dev.json": [DPR], "nq-validation.json": [DPR]}
    write_all(tmp_path / "two", {"p.tsv": PASSAGES, **twice})
    with pytest.raises(ConfigError, match="are both validation"):
        detect(tmp_path / "two")
