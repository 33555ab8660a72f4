"""Question files that are found by pattern, and what is said where they are not."""

from __future__ import annotations

import pathlib

import pytest

from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.options import QuestionFiles, below, by_task_and_split
from taser_jax.storage.errors import ConfigError


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Two tasks, one of three splits, and files beside them that are none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faq").mkdir()
    for name in ("code.train", "code.validation", "code.test", "sum.mary.train"):
        (tmp_path / "faq" / f"{name}.queries.tsv").write_text(f"{name}-1\twhere is {name}\n")
        (tmp_path / "faq" / f"{name}.qrels.tsv").write_text(f"{name}-1 0 p1 1\n")
    (tmp_path / "faq" / "passages.tsv").write_text("p1\tsome text\tTitle\n")
    return tmp_path


QUERIES = "faq/{task}.{split}.queries.tsv"
QRELS = "faq/{task}.{split}.qrels.tsv"


def paths(found: dict[str, dict[str, QuestionFiles]]) -> dict[str, dict[str, str]]:
    """The questions' files alone."""
    return {
        task: {split: str(files.questions) for split, files in splits.items()}
        for task, splits in found.items()
    }


def test_every_task_and_split_of_a_pattern(folder: pathlib.Path):
    found = paths(by_task_and_split(QUERIES))
    assert found == {
        "code": {one: f"faq/code.{one}.queries.tsv" for one in ("train", "validation", "test")},
        # A dot may be part of a task's name, since splits are known.
        "sum.mary": {"train": "faq/sum.mary.train.queries.tsv"},
    }
    assert list(found["code"]) == ["train", "validation", "test"]
    # Paths below another folder, and absolute ones, as `directory` makes them.
    absolute = paths(by_task_and_split(below(folder, QUERIES)))
    assert absolute["code"]["test"] == str(folder / "faq" / "code.test.queries.tsv")


def test_places_in_folders_and_twice(folder: pathlib.Path):
    (folder / "nq" / "train").mkdir(parents=True)
    (folder / "nq" / "train" / "nq.json").touch()
    (folder / "nq" / "train" / "other.json").touch()
    assert paths(by_task_and_split("{task}/{split}/{task}.json")) == {
        "nq": {"train": "nq/train/nq.json"}
    }


def test_patterns_and_files_side_by_side(folder: pathlib.Path):
    given = {"docs": "faq/code.{split}.queries.tsv", "one": {"test": "anything.tsv"}}
    found = paths(by_task_and_split(given))
    assert found["docs"]["train"] == "faq/code.train.queries.tsv"
    assert found["one"] == {"test": "anything.tsv"}


def test_files_of_several_splits_and_without_a_split(folder: pathlib.Path):
    (folder / "fever.train+validation.jsonl").touch()
    (folder / "fever.train+dev.jsonl").touch()
    assert paths(by_task_and_split("{task}.{split}.jsonl")) == {
        "fever": {"train+validation": "fever.train+validation.jsonl"}
    }
    everything = "train+validation+test"
    (folder / "selqa.json").touch()
    assert paths(by_task_and_split("{task}.json")) == {"selqa": {everything: "selqa.json"}}
    assert paths(by_task_and_split({"selqa": "s.json"})) == {"selqa": {everything: "s.json"}}


def test_judgements_go_with_their_questions(folder: pathlib.Path):
    prepare(
        data_dir="data",
        collection="faq",
        passages="faq/passages.tsv",
        queries=QuestionFiles(QUERIES, qrels=QRELS),
    )
    assert list_tasks("data", "faq") == {
        "code": ["train", "validation", "test"],
        "sum.mary": ["train"],
    }
    [query] = QuerySet.open("data", "faq", "sum.mary", "train")
    assert (query.id, query.text, query.positives) == (
        "sum.mary.train-1",
        "where is sum.mary.train",
        (0,),
    )


def test_what_is_passed_over_is_reported(folder: pathlib.Path, caplog: pytest.LogCaptureFixture):
    (folder / "faq" / "code.dev.queries.tsv").touch()
    with caplog.at_level("INFO"):
        assert "dev" not in by_task_and_split(QUERIES)["code"]
    assert "skipped, since their names have no split: faq/code.dev.queries.tsv" in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("faq/{task}.queries.tsv", ["the pattern has no {split}, and finds code.test, code.tr"]),
        ("faq/queries.tsv", ["the pattern has no {task}", "'folder/{task}.{split}"]),
        ("fqa/{task}.{split}.tsv", ["no file matches; there is no folder fqa"]),
        (
            "faq/{task}-{split}.tsv",
            ["no file matches; faq has code.test.qrels.tsv, ", "passages.tsv", "name the files"],
        ),
        (
            "faq/{task}.{split}.tsv",
            ["no file matches; faq/code.test.qrels.tsv, ", "is one of train, validation, test"],
        ),
        (
            QuestionFiles(QUERIES, qrels="faq/{task}.{split}.qrel.tsv"),
            ["QuestionFiles.qrels: missing: faq/code.train.qrel.tsv, faq", "there is: none"],
        ),
    ],
)
def test_refusals_say_what_matched_and_what_did_not(folder: pathlib.Path, given, words):
    with pytest.raises(ConfigError) as error:
        by_task_and_split(given)
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_of_judgements_is_named_with_those_there_are(folder: pathlib.Path):
    (folder / "faq" / "code.test.qrels.tsv").unlink()
    with pytest.raises(ConfigError) as error:
        by_task_and_split(QuestionFiles(QUERIES, qrels=QRELS))
    assert "missing: faq/code.test.qrels.tsv" in str(error.value)
    assert "there is: faq/code.train.qrels.tsv, faq/code.validation" in str(error.value)
