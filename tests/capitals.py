"""Eight passages to check by hand, with questions that have answers and some that have not."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Mapping

from small_world import gin, succeed

PASSAGES = {
    "p0": ("Paris", "Paris is the capital of France and lies on the Seine."),
    "p1": ("Seine", "The Seine is a river in France. It flows through Paris."),
    "p2": ("Lyon", "Lyon is a large city of France; it is no capital."),
    "p3": ("Rome", "Rome is the capital of Italy and lies on the Tiber."),
    "p4": ("Milan", "Milan is a large city of Italy; it is no capital."),
    "p5": ("Tiber", "The Tiber is a river in Italy."),
    "p6": ("Bern", "Bern is the capital of Switzerland."),
    "p7": ("Chess", "A game of two players on a board of 64 squares."),
}
IDS = list(PASSAGES)


@dataclasses.dataclass(frozen=True)
class Capitals:
    """The collection "capitals" with task "capital", and qrels-only task "rivers".

    Attributes:
        root: holds the source files and data/.
    """

    root: pathlib.Path

    @property
    def where(self) -> list[str]:
        return gin(DATA_DIR=self.root / "data", COLLECTION="capitals")

    def make(self) -> None:
        for name, writes in {
            "passages.tsv": self._passages,
            "train.json": self._training,
            "test.qa.csv": self._questions,
        }.items():
            with open(self.root / name, "w", newline="") as file:
                writes(file)
        (self.root / "rivers.tsv").write_text("r0\triver in France\nr1\triver in Italy\n")
        (self.root / "rivers.qrels").write_text("r0 0 p1 2\nr0 0 p0 1\nr0 0 p2 0\nr1 0 p5 1\n")
        (self.root / "questions.gin").write_text(
            f"rivers/QuestionFiles.questions = '{self.root}/rivers.tsv'\n"
            f"rivers/QuestionFiles.qrels = '{self.root}/rivers.qrels'\n"
        )
        succeed("prepare", *self.prepare_arguments())

    def prepare_arguments(self) -> list[str]:
        capital = {"train": f"{self.root}/train.json", "validation": f"{self.root}/test.qa.csv"}
        capital["test"] = f"{self.root}/test.qa.csv"
        splits = ", ".join(f"'{split}': @rivers/QuestionFiles()" for split in ("train", "test"))
        return [
            "--gin_file=runs/prepare.gin",
            f"--gin_file={self.root}/questions.gin",
            *self.where,
            *gin(PASSAGES=self.root / "passages.tsv"),
            f"--gin.QUERIES={{'capital': {capital}, 'rivers': {{{splits}}}}}",
        ]

    def bm25(self, runs_dir: pathlib.Path, **more: object) -> None:
        index_dir = self.root / "bm25"
        succeed("bm25", *self.where, *gin(BM25_RUNS_DIR=runs_dir, BM25_INDEX_DIR=index_dir, **more))

    def _passages(self, file) -> None:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["id", "text", "title"])
        writer.writerows([id, text, title] for id, (title, text) in PASSAGES.items())

    def _training(self, file) -> None:
        def context(id: str) -> dict[str, str]:
            title, text = PASSAGES[id]
            return {"passage_id": id, "title": title, "text": text}

        records = [
            {
                "question": f"what is the capital of {country}",
                "answers": [capital],
                "positive_ctxs": [context(positive)],
                "negative_ctxs": [],
                "hard_negative_ctxs": [context("p7")],
            }
            for country, capital, positive in (("France", "Paris", "p0"), ("Italy", "Rome", "p3"))
        ]
        json.dump(records, file)

    def _questions(self, file) -> None:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["capital of Switzerland", '["Bern"]'])
        writer.writerow(["on which river lies Rome", '["Tiber"]'])
        writer.writerow(["who invented the wheel", '["nobody knows"]'])


def mteb_task(
    name: str,
    passages: Mapping[str, tuple[str, str]],
    queries: Mapping[str, str],
    relevant: Mapping[str, Mapping[str, int]],
    **changes: object,
) -> object:
    """A retrieval task of MTEB whose data are here; passages are title and text."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    titles, texts = zip(*passages.values(), strict=True)
    corpus = {"id": list(passages), "title": titles, "text": texts}
    asked = {"id": list(queries), "text": list(queries.values())}
    data = {"corpus": Dataset.from_dict(corpus), "queries": Dataset.from_dict(asked)}
    data |= {"relevant_docs": relevant, "top_ranked": None} | changes

    class Task(AbsTaskRetrieval):
        metadata = TaskMetadata(
            type="Retrieval",
            name=name,
            description="A few passages.",
            dataset={"path": "none", "revision": "1"},
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, num_proc=None, **kwargs):
            self.dataset = {"default": {"test": data}}
            self.data_loaded = True

    return Task()
