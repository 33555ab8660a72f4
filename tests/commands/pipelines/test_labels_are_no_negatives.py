"""Graded judgements of a BEIR folder, mined as `taser compare` mines: no label is a negative."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import random

import pytest
import recipes

from taser_jax.commands.mine import mine
from taser_jax.commands.search import bm25
from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.collection import prepare
from taser_jax.retrieval.mining import MiningConfig
from taser_jax.retrieval.runs import read_trec_run

TOPICS = ("river", "moor", "cliff", "marsh", "shore", "field")
WORDS = ("blue", "green", "cold", "deep", "wide")
GRADES = (3, 2, 1, 1, 0, 0)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A prepared collection "judged" with BM25's run of its training queries.

    Attributes:
        root: holds the BEIR folder, data/ and runs/.
        grades: query id -> passage id -> grade, as in the qrels.
    """

    root: pathlib.Path
    grades: dict[str, dict[str, int]]

    def positives(self, query_id: str) -> set[str]:
        return {passage for passage, grade in self.grades[query_id].items() if grade >= 1}

    def mined(self, directory: pathlib.Path, config: MiningConfig) -> dict[str, set[str]]:
        """Query id -> ids of its negatives, from the file that training reads."""
        mine(
            runs_dir=str(self.root / "runs"),
            data_dir=str(self.root / "data"),
            collection="judged",
            output_dir=str(directory),
            config=config,
        )
        ids = [passage.id for passage in PassageStore.open(self.root / "data", "judged")]
        lines = (directory / "topics.train.jsonl").read_text().splitlines()
        negatives = map(json.loads, lines)
        return {one["query_id"]: {ids[row] for row in one["rows"]} for one in negatives}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Ten passages on each topic; four queries on each judge six of them, graded 3 to 0."""
    root = tmp_path_factory.mktemp("judged")
    folder = root / "beir"
    (folder / "qrels").mkdir(parents=True)
    draw = random.Random(0)
    passages = {
        f"{topic}{n}": f"{topic} {' '.join(draw.choices(WORDS, k=4))}"
        for topic in TOPICS
        for n in range(10)
    }
    grades: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for topic in TOPICS:
        for n in range(4):
            chosen = draw.sample(range(10), len(GRADES))
            for passage, grade in zip(chosen, draw.sample(GRADES, len(GRADES)), strict=True):
                grades[f"q-{topic}{n}"][f"{topic}{passage}"] = grade
    corpus = [{"_id": id, "title": "", "text": text} for id, text in passages.items()]
    queries = [{"_id": id, "text": id[2:-1]} for id in grades]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    qrels = "".join(
        f"{query}\t{passage}\t{grade}\n"
        for query, judgements in grades.items()
        for passage, grade in judgements.items()
    )
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels)
    data_dir = str(root / "data")
    prepare(data_dir=data_dir, collection="judged", directories={"topics": folder})
    bm25(
        data_dir=data_dir,
        collection="judged",
        output_dir=str(root / "runs"),
        index_dir=str(root / "bm25"),
        split="train",
    )
    return Judged(root, dict(grades))


def test_every_grade_above_0_is_a_positive(judged: Judged):
    store = PassageStore.open(judged.root / "data", "judged")
    queries = list(QuerySet.open(judged.root / "data", "judged", "topics", "train"))
    assert len(queries) == len(judged.grades)
    for query in queries:
        assert {store[row].id for row in query.positives} == judged.positives(query.id)
        assert list(query.relevance) == [3, 2, 1, 1]


@pytest.mark.parametrize("round_of", ["first_mining", "second_mining"])
def test_compare_mines_no_label(judged: Judged, round_of: str, tmp_path: pathlib.Path):
    setting = recipes.value("compare", "setting", "runs/compare.gin")
    negatives = judged.mined(tmp_path, getattr(setting, round_of))
    assert negatives.keys() == judged.grades.keys()
    for query, mined in negatives.items():
        assert not mined & judged.positives(query)
        # What was judged not to be relevant is a negative like any other passage on the topic.
        assert judged.grades[query].keys() - judged.positives(query) < mined
        assert len(mined) == 10 - 4


def test_the_run_has_labels_to_leave_out(judged: Judged):
    """Else the tests above could not fail."""
    store = PassageStore.open(judged.root / "data", "judged")
    run = read_trec_run(judged.root / "runs" / "topics.train.trec", store.row_of)
    for query, rows in zip(run.query_ids, run.rows, strict=True):
        ranked = {store[row].id for row in rows.tolist() if row >= 0}
        assert judged.positives(query) <= ranked
