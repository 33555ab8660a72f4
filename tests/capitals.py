"""Eight passages to check by hand, with questions that have answers and some that have not."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from small_world import gin, succeed

from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.storage.records import Passage, Query

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


_ASKED = [
    Query("bern", "capital of Switzerland", "capital", answers=("Bern",)),
    Query("tiber", "on which river lies Rome", "capital", answers=("Tiber",)),
    Query("wheel", "who invented the wheel", "capital", answers=("nobody knows",)),
]
_RIVERS = [
    Query("r0", "river in France", "rivers", (1, 0), relevance=(2, 1)),
    Query("r1", "river in Italy", "rivers", (5,)),
]
_TRAINING = [
    Query(
        country,
        f"what is the capital of {country}",
        "capital",
        (gold,),
        hard_negatives=(7,),
        answers=(city,),
    )
    for country, city, gold in (("France", "Paris", 0), ("Italy", "Rome", 3))
]
QUERIES = {
    "capital": {"train": _TRAINING, "validation": _ASKED, "test": _ASKED},
    "rivers": {"train": _RIVERS, "test": _RIVERS},
}


@dataclasses.dataclass(frozen=True)
class Capitals:
    """The collection "capitals" with task "capital", and qrels-only task "rivers".

    Attributes:
        root: holds data/.
    """

    root: pathlib.Path

    @property
    def where(self) -> list[str]:
        return gin(DATA_DIR=self.root / "data", COLLECTION="capitals")

    def make(self) -> None:
        passages = [Passage(id, text, title) for id, (title, text) in PASSAGES.items()]
        write_collection(self.root / "data", "capitals", passages)
        for task, splits in QUERIES.items():
            for split, queries in splits.items():
                write_queries(self.root / "data", "capitals", task, split, queries)

    def bm25(self, runs_dir: pathlib.Path, **more: object) -> None:
        index_dir = self.root / "bm25"
        succeed("bm25", *self.where, *gin(BM25_RUNS_DIR=runs_dir, BM25_INDEX_DIR=index_dir, **more))


def mined(negatives_dir: pathlib.Path, task: str) -> list[set[str]]:
    """Ids of the negatives of each training query."""
    lines = (negatives_dir / f"{task}.train.jsonl").read_text().splitlines()
    return [{IDS[row] for row in json.loads(line)["rows"]} for line in lines]


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
