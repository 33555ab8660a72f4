"""Writes a small sample of raw text to try the tutorials with, as TSV, BEIR and DPR files.

    python docs/make_sample.py sample

The text is the docstrings of a few installed modules, so nothing is downloaded; the same versions
give the same files. Two tasks over one collection: "summary" (the first sentence of a docstring
finds the rest of it) and "code" (the body of a function finds its docstring).
"""

from __future__ import annotations

import csv
import json
import pathlib
import sys
from collections.abc import Sequence

from taser_jax.data.pydocs.build import build_pydocs
from taser_jax.storage.records import Passage, Query

MODULES = (
    *("argparse", "collections", "csv", "email", "json", "logging", "optax"),
    *("pathlib", "statistics", "unittest", "urllib", "zipfile"),
)
TASKS = ("summary", "code")
BEIR_SPLITS = {"train": "train", "validation": "dev", "test": "test"}


def main() -> None:
    """Writes the files into the folder that the command line names."""
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "sample")
    built = build_pydocs(MODULES)
    passages = [_plain(passage) for passage in built.passages]
    write_tsv(root / "tsv" / "passages.tsv", [[p.id, p.text, p.title] for p in passages])
    write_dpr_passages(root / "dpr" / "passages.tsv", passages)
    for task in TASKS:
        corpus = [{"_id": p.id, "title": p.title, "text": p.text} for p in passages]
        write_json_lines(root / "beir" / task / "corpus.jsonl", corpus)
        everything = []
        for split, queries in built.queries[task].items():
            write_split(root, task, split, queries, passages)
            everything += [{"_id": query.id, "text": _flat(query.text)} for query in queries]
        write_json_lines(root / "beir" / task / "queries.jsonl", everything)
    for path in sorted(root.rglob("*.*")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        print(f"{path}: {lines:,} lines")


def write_split(
    root: pathlib.Path, task: str, split: str, queries: Sequence[Query], passages: Sequence[Passage]
) -> None:
    """One task's split in all three formats."""
    judged = [(query.id, passages[row].id) for query in queries for row in query.positives]
    name = f"{task}.{split}"
    write_tsv(root / "tsv" / f"{name}.queries.tsv", [[q.id, _flat(q.text)] for q in queries])
    write_tsv(root / "tsv" / f"{name}.qrels.tsv", [[q, "0", p, "1"] for q, p in judged])
    write_tsv(
        root / "beir" / task / "qrels" / f"{BEIR_SPLITS[split]}.tsv",
        [["query-id", "corpus-id", "score"], *([q, p, "1"] for q, p in judged)],
    )
    questions = [
        {
            "question": _flat(query.text),
            "answers": [],
            "positive_ctxs": [_context(passages[row]) for row in query.positives],
            "hard_negative_ctxs": [],
        }
        for query in queries
    ]
    path = root / "dpr" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(questions, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tsv(path: pathlib.Path, rows: Sequence[Sequence[str]]) -> None:
    """Tab-separated columns, nothing quoted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def write_dpr_passages(path: pathlib.Path, passages: Sequence[Passage]) -> None:
    """DPR's passages: a header, and CSV quoting with tabs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["id", "text", "title"])
        writer.writerows([passage.id, passage.text, passage.title] for passage in passages)


def write_json_lines(path: pathlib.Path, records: Sequence[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")


def _flat(text: str) -> str:
    """Text on one line: a tab or a newline would end a TSV column."""
    return " ".join(text.split())


def _plain(passage: Passage) -> Passage:
    return Passage(id=passage.id, text=_flat(passage.text), title=_flat(passage.title))


def _context(passage: Passage) -> dict[str, str]:
    return {"title": passage.title, "text": passage.text, "passage_id": passage.id}


if __name__ == "__main__":
    main()
