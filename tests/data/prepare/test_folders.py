"""Folders of several formats become one collection."""

from __future__ import annotations

import json
import pathlib

from written_files import beir, write_all

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.receipts import gold_path

_SHARED = "water flows downhill"


def waters(folder: pathlib.Path) -> pathlib.Path:
    """Passages 0 to 3, a query on each; the first is in every folder."""
    texts = [_SHARED, "rivers freeze", "lakes are deep", "seas are salty"]
    return beir(
        folder,
        corpus={f"{n}": text for n, text in enumerate(texts)},
        queries={f"q{n}": text[:6] for n, text in enumerate(texts)},
        train=["q0 0 1", "q1 1 1"],
        dev=["q2 2 1"],
        test=["q3 3 1"],
    )


def tsv(folder: pathlib.Path, task: str = "faq") -> pathlib.Path:
    """The same passage first under the same id, another under an id of BEIR's."""
    texts = [_SHARED, "hills erode", "moors burn"]
    files = {"passages.tsv": "id\ttext\ttitle\n" + _table((n, t, "") for n, t in enumerate(texts))}
    for row, split in enumerate(("train", "validation", "test")):
        files[f"{task}.{split}.queries.tsv"] = f"a{row}\tquestion {row}\n"
        files[f"{task}.{split}.qrels.tsv"] = f"a{row} 0 {row} 1\n"
    return write_all(folder, files)


def _table(rows: object) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def dpr(folder: pathlib.Path, task: str = "trivia") -> pathlib.Path:
    texts = [_SHARED, "cliffs fall"]
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


def prepare_folders(root: pathlib.Path, *folders: pathlib.Path) -> PassageStore:
    prepare(data_dir=root / "data", collection="land", directories=folders)
    return PassageStore.open(root / "data", "land")


def _gold(store: PassageStore, root: pathlib.Path, task: str, split: str) -> list[str]:
    queries = QuerySet.open(root / "data", "land", task, split)
    return [store[row].text for query in queries for row in query.positives]


def test_beir_beside_tsv(tmp_path):
    store = prepare_folders(tmp_path, waters(tmp_path / "waters"), tsv(tmp_path / "ground"))
    assert list_tasks(tmp_path / "data", "land").keys() == {"waters", "faq"}
    texts = [passage.text for passage in store]
    assert (len(texts), texts.count(_SHARED)) == (6, 1)
    # Ids 1 and 2 mean other passages in the two folders.
    assert _gold(store, tmp_path, "waters", "train") == [_SHARED, "rivers freeze"]
    assert _gold(store, tmp_path, "faq", "train") == [_SHARED]
    assert _gold(store, tmp_path, "faq", "validation") == ["hills erode"]
    assert _gold(store, tmp_path, "faq", "test") == ["moors burn"]


def test_kilt_beside_dpr(tmp_path):
    store = prepare_folders(tmp_path, kilt(tmp_path / "pages"), dpr(tmp_path / "cliffs"))
    assert list_tasks(tmp_path / "data", "land").keys() == {"fever", "trivia"}
    assert _gold(store, tmp_path, "trivia", "test") == ["cliffs fall"]
    assert set(_gold(store, tmp_path, "fever", "test")) == {"Woods is a long paragraph."}
    # KILT's gold, which page measures read, comes along.
    queries = QuerySet.open(tmp_path / "data", "land", "fever", "test")
    assert queries[0].id == "dev0"
    assert gold_path(queries).read_text().count("dev") == 9


def test_two_folders_of_kilt(tmp_path):
    second = kilt(tmp_path / "b")
    for path in second.glob("fever-*"):
        path.rename(path.with_name(path.name.replace("fever", "trex")))
    store = prepare_folders(tmp_path, kilt(tmp_path / "a"), second)
    assert len(store) == 2
    for task in ("fever", "trex"):
        assert set(_gold(store, tmp_path, task, "test")) == {"Woods is a long paragraph."}
