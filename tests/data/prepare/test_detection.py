"""Formats of folders, from the names and first lines of their files."""

from __future__ import annotations

import gzip
import json
import pathlib

import pytest

from taser_jax.data.prepare.detection import detect
from taser_jax.storage.errors import ConfigError

PASSAGES = "id\ttext\ttitle\np1\tsome text\tA title\n"
DPR = {"question": "q?", "answers": ["a"], "positive_ctxs": []}
KILT = {"id": "1", "input": "q", "output": [{"answer": "a"}]}


def _write(folder: pathlib.Path, **files: str | dict) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        text = content if isinstance(content, str) else json.dumps(content) + "\n"
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    return folder


def test_a_file_beside_its_packed_twin_is_refused(tmp_path):
    """Which of the two is meant, nobody can know."""
    folder = _write(tmp_path / "raw", corpus__jsonl={"_id": "a", "text": "one"})
    _write(folder, corpus__jsonl__gz={"_id": "a", "text": "two"})
    with pytest.raises(ConfigError, match=r"raw: corpus\.jsonl and corpus\.jsonl\.gz may"):
        detect(folder)


def _names(found):
    return {
        task: {
            split: tuple(
                path and pathlib.Path(path).name for path in (files.questions, files.qrels)
            )
            for split, files in splits.items()
        }
        for task, splits in found.questions.items()
    }


@pytest.mark.parametrize("suffix", ["", "__gz"])
def test_beir(tmp_path: pathlib.Path, suffix: str):
    folder = tmp_path / "facts"
    for split in ("dev", "test"):
        _write(folder / "qrels", **{f"{split}__tsv{suffix}": "query-id\tcorpus-id\tscore\n"})
    files = {f"{name}__jsonl{suffix}": {"_id": "1"} for name in ("corpus", "queries")}
    _write(folder, **files, notes__json="{}")
    ending = suffix.replace("__", ".")
    found = detect(folder)
    assert found.passages == (f"{folder}/corpus.jsonl{ending}",)
    queries = f"queries.jsonl{ending}"
    expected = {
        "validation": (queries, f"dev.tsv{ending}"),
        "test": (queries, f"test.tsv{ending}"),
    }
    assert _names(found) == {"facts": expected}
    # "dev" is our validation; a name given replaces the folder's.
    assert _names(detect(folder, "claims")) == {"claims": expected}
    (folder / queries).unlink()
    with pytest.raises(ConfigError, match=r"no queries\.jsonl with judgements"):
        detect(folder)


def test_dpr(tmp_path: pathlib.Path):
    _write(
        tmp_path,
        psgs__tsv__gz=PASSAGES,
        **{"nq-train__json__gz": json.dumps([DPR]), "nq-dev__qa__csv": "q?\t['a']\n"},
        **{"trivia__test__jsonl": DPR, "README__md": "text", "scores__json": '{"a": 1}'},
    )
    found = detect(tmp_path)
    assert [pathlib.Path(path).name for path in found.passages] == ["psgs.tsv.gz"]
    assert _names(found) == {
        "nq": {"train": ("nq-train.json.gz", None), "validation": ("nq-dev.qa.csv", None)},
        "trivia": {"test": ("trivia.test.jsonl", None)},
    }


def test_kilt_tests_on_dev_and_divides_train(tmp_path: pathlib.Path):
    pages = "id\ttext\ttitle\twikipedia_id\tparagraph_id\n1\tx\tX\t7\t0\n"
    _write(
        tmp_path,
        passages__tsv=pages,
        **{"fever-train-kilt__jsonl": KILT, "fever-dev-kilt__jsonl": KILT},
        claims__jsonl=KILT,
    )
    found = detect(tmp_path)
    assert _names(found) == {
        "claims": {"train+validation+test": ("claims.jsonl", None)},
        "fever": {
            "test": ("fever-dev-kilt.jsonl", None),
            "train+validation": ("fever-train-kilt.jsonl", None),
        },
    }


def test_tsv_with_and_without_a_task_in_the_names(tmp_path: pathlib.Path):
    files = {
        "passages__tsv": PASSAGES,
        "faq__train__queries__tsv": "1\thow many 3\n",
        "faq__train__qrels__tsv": "1 0 p1 1\n",
        "faq__test__queries__tsv": "2\twhat\n",
        "faq__test__qrels__tsv": "query-id\tcorpus-id\tscore\n2\tp1\t1\n",
        "unjudged__tsv": "3\twhy\n",
    }
    found = detect(_write(tmp_path / "my_faq", **files))
    assert _names(found) == {
        "faq": {
            "train": ("faq.train.queries.tsv", "faq.train.qrels.tsv"),
            "test": ("faq.test.queries.tsv", "faq.test.qrels.tsv"),
        }
    }
    plain = {name.replace("faq__", ""): text for name, text in files.items()}
    assert list(detect(_write(tmp_path / "plain", **plain)).questions) == ["plain"]


def test_what_is_not_recognised_is_listed(tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match="no such folder"):
        detect(tmp_path / "none")
    _write(tmp_path, a__tsv=PASSAGES, b__tsv=PASSAGES, **{"nq-train__json": DPR})
    with pytest.raises(ConfigError, match=r"a\.tsv: passages; b\.tsv: passages; nq-train\.json"):
        detect(tmp_path)


def test_a_file_without_a_split_is_all_three_and_two_of_one_split_clash(tmp_path: pathlib.Path):
    _write(tmp_path / "one", p__tsv=PASSAGES, nq__json=DPR)
    assert _names(detect(tmp_path / "one")) == {"nq": {"train+validation+test": ("nq.json", None)}}
    _write(tmp_path / "two", p__tsv=PASSAGES, **{"nq-dev__json": DPR, "nq-validation__json": DPR})
    with pytest.raises(ConfigError, match="are both validation"):
        detect(tmp_path / "two")
