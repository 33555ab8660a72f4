"""Folders of several formats become one collection."""

from __future__ import annotations

import json
import pathlib

from written_files import write_all

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.receipts import gold_path


def _table(rows: object) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def dpr(folder: pathlib.Path, task: str = "trivia") -> pathlib.Path:
    texts = ["water flows downhill", "cliffs fall"]
    files = {"passages.tsv": "id\ttext\ttitle\n" + _table((n, t, "") for n, t in enumerate(texts))}
    for split, row in (("train", 0), ("dev", 1), ("test", 1)):
        context = {"passage_id": str(row), "title": "", "text": texts[row]}
        record = {"question": f"question {split}", "answers": ["x"], "positive_ctxs": [context]}
        lists = {"negative_ctxs": [], "hard_negative_ctxs": []}
        files[f"{task}-{split}.json"] = json.dumps([record | lists])
    return write_all(folder, files)


def kilt(folder: pathlib.Path) -> pathlib.Path:
    pages = [
        {
            "_id": n,
            "wikipedia_id": n,
            "wikipedia_title": t,
            "text": [t, f"{t} is a long paragraph."],
        }
        for n, t in (("1", "Fens"), ("2", "Woods"))
    ]
    files = {"knowledge.jsonl": pages}
    for split, page in (("train", "1"), ("dev", "2")):
        proof = {"wikipedia_id": page, "title": "Fens", "start_paragraph_id": 1}
        proof |= {"end_paragraph_id": 1, "start_character": 0, "end_character": 5}
        output = {"answer": "yes", "provenance": [proof]}
        files[f"fever-{split}-kilt.jsonl"] = [
            {"id": f"{split}{n}", "input": f"query {n}", "output": [output]} for n in range(9)
        ]
    return write_all(folder, files)


def _gold(store: PassageStore, root: pathlib.Path, task: str, split: str) -> list[str]:
    queries = QuerySet.open(root / "data", "land", task, split)
    return [store[row].text for query in queries for row in query.positives]


def test_kilt_beside_dpr(tmp_path):
    folders = [kilt(tmp_path / "pages"), dpr(tmp_path / "cliffs")]
    prepare(data_dir=tmp_path / "data", collection="land", directories=folders)
    store = PassageStore.open(tmp_path / "data", "land")
    assert list_tasks(tmp_path / "data", "land").keys() == {"fever", "trivia"}
    assert _gold(store, tmp_path, "trivia", "test") == ["cliffs fall"]
    assert set(_gold(store, tmp_path, "fever", "test")) == {"Woods is a long paragraph."}
    # KILT's gold, which page measures read, comes along.
    queries = QuerySet.open(tmp_path / "data", "land", "fever", "test")
    assert queries[0].id == "dev0"
    assert gold_path(queries).read_text().count("dev") == 9
