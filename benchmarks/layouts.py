"""The same 300 documents in thirteen layouts, each through `taser compare`: what it made of them.

    python benchmarks/layouts.py --beir=DIR --out=DIR [--pretrained=minilm] [--only=csv,trec]
        [-- flags of taser compare]

DIR is a BEIR folder with training and test queries, such as scifact's. Documents are drawn by the
hash of their ids: positives of the drawn queries, then others. A layout that is finished leaves
OUT/NAME.json and is not run again. Prints one JSON line per layout, then a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import never_worse
import pyarrow
import pyarrow.parquet

from taser_jax.evaluation.reports import markdown_table
from taser_jax.storage.artifacts import write_json, write_text

PASSAGES, QUERIES = 300, {"train": 120, "test": 60}
Row = dict[str, str]


def documents(folder: pathlib.Path) -> never_worse.Data:
    """300 documents of a BEIR folder, with queries whose positives are among them."""
    data = never_worse.read_beir(folder)
    for split, count in QUERIES.items():
        queries = data.queries[split]
        data.queries[split] = {id: queries[id] for id in never_worse.drawn(queries, count)}
    gold = {id for split in data.queries.values() for _, ids in split.values() for id in ids}
    others = never_worse.drawn(data.passages.keys() - gold, PASSAGES - len(gold))
    data.passages = {id: data.passages[id] for id in [*sorted(gold), *others]}
    return data


def passages_of(data: never_worse.Data) -> list[Row]:
    """id, title and text of each document."""
    return [{"id": id, "title": title, "text": text} for id, (title, text) in data.passages.items()]


def pairs_of(data: never_worse.Data, split: str) -> list[Row]:
    """Each query with its first positive, and a document of another query as its negative."""
    queries = list(data.queries[split].values())
    return [
        {
            "anchor": text,
            "positive": " ".join(data.passages[ids[0]]),
            "negative": " ".join(data.passages[queries[(number + 1) % len(queries)][1][0]]),
        }
        for number, (text, ids) in enumerate(queries)
    ]


def write_csv(path: pathlib.Path, rows: Sequence[Row], delimiter: str = ",") -> None:
    """A table with a header."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def _text_files(suffix: str, template: str) -> Callable[[never_worse.Data, pathlib.Path], None]:
    def write(data: never_worse.Data, folder: pathlib.Path) -> None:
        for passage in passages_of(data):
            name = passage["title"].replace("/", " ")[:60] or passage["id"]
            path = folder / f"{name} {passage['id']}.{suffix}"
            path.write_text(template.format(**passage), encoding="utf-8")

    return write


def _csv_passages(data: never_worse.Data, folder: pathlib.Path) -> None:
    rows = [
        {"Body": passage["text"], "Headline": passage["title"]} for passage in passages_of(data)
    ]
    write_csv(folder / "export.csv", rows, ";")


def _tsv_passages(data: never_worse.Data, folder: pathlib.Path) -> None:
    write_csv(folder / "passages.tsv", passages_of(data), "\t")


def _json_passages(data: never_worse.Data, folder: pathlib.Path) -> None:
    lines = [
        json.dumps({"docid": passage["id"], "contents": f"{passage['title']}\n{passage['text']}"})
        for passage in passages_of(data)
    ]
    (folder / "docs.jsonl").write_text("\n".join(lines), encoding="utf-8")


def _parquet_passages(data: never_worse.Data, folder: pathlib.Path) -> None:
    table = pyarrow.Table.from_pylist(passages_of(data))
    pyarrow.parquet.write_table(table, folder / "passages.parquet")


def _pairs(data: never_worse.Data, folder: pathlib.Path) -> None:
    for split in QUERIES:
        write_csv(folder / f"{split}.csv", pairs_of(data, split))


def _faq(data: never_worse.Data, folder: pathlib.Path) -> None:
    rows = [*pairs_of(data, "train"), *pairs_of(data, "test")]
    write_csv(
        folder / "faq.csv", [{"question": row["anchor"], "answer": row["positive"]} for row in rows]
    )


def _hugging_face(data: never_worse.Data, folder: pathlib.Path) -> None:
    (folder / "data").mkdir()
    for split in QUERIES:
        table = pyarrow.Table.from_pylist(pairs_of(data, split))
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(table, path)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Pairs\n", encoding="utf-8")


def _judged_tables(data: never_worse.Data, folder: pathlib.Path) -> None:
    _tsv_passages(data, folder)
    for split, queries in data.queries.items():
        rows = [f"{id}\t{text}" for id, (text, _) in queries.items()]
        (folder / f"faq.{split}.queries.tsv").write_text("\n".join(rows), encoding="utf-8")
        lines = [f"{id} 0 {passage} 1" for id, (_, ids) in queries.items() for passage in ids]
        (folder / f"faq.{split}.qrels.tsv").write_text("\n".join(lines), encoding="utf-8")


def _trec(data: never_worse.Data, folder: pathlib.Path) -> None:
    texts = [
        f"<DOC>\n<DOCNO> {passage['id']} </DOCNO>\n<TITLE>{passage['title']}</TITLE>\n<TEXT>\n"
        f"{passage['text']}\n</TEXT>\n</DOC>\n"
        for passage in passages_of(data)
    ]
    (folder / "docs.trec").write_text("".join(texts), encoding="utf-8")
    queries = data.queries["test"]
    topics = [
        f"<top>\n<num> Number: {id}\n<title> {text}\n</top>\n" for id, (text, _) in queries.items()
    ]
    (folder / "topics.txt").write_text("".join(topics), encoding="utf-8")
    lines = [f"{id} 0 {passage} 1" for id, (_, ids) in queries.items() for passage in ids]
    (folder / "qrels.txt").write_text("\n".join(lines), encoding="utf-8")


def _beir(data: never_worse.Data, folder: pathlib.Path) -> None:
    never_worse.write_cell(data, folder, size=None, passages=PASSAGES)


LAYOUTS: dict[str, Callable[[never_worse.Data, pathlib.Path], None]] = {
    "txt": _text_files("txt", "{text}\n"),
    "md": _text_files("md", "# {title}\n\n{text}\n"),
    "html": _text_files("html", "<html><body><h1>{title}</h1><p>{text}</p></body></html>"),
    "csv": _csv_passages,
    "tsv": _tsv_passages,
    "jsonl": _json_passages,
    "parquet": _parquet_passages,
    "pairs": _pairs,
    "faq": _faq,
    "hugging_face": _hugging_face,
    "judged_tables": _judged_tables,
    "trec": _trec,
    "beir": _beir,
}


def run_layout(name: str, data: never_worse.Data, options: argparse.Namespace) -> dict[str, Any]:
    """Writes a layout and compares it: rows of the table, what is recommended, and seconds."""
    folder, output = options.out / "work" / name, options.out / "work" / f"{name}-results"
    for place in (folder, output):
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True)
    LAYOUTS[name](data, folder)
    command = [sys.executable, "-m", "taser_jax.cli.main", "compare", str(folder)]
    command += [f"--pretrained={options.pretrained}", f"--out={output}", *options.flags]
    start = time.monotonic()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {
        "layout": name,
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "seconds": round(time.monotonic() - start),
        "status": finished.returncode,
    }
    if finished.returncode:
        return row | {"error": finished.stderr.strip().splitlines()[-3:]}
    results = map(json.loads, (path.read_text() for path in output.glob("results/*.json")))
    rows = {
        system_result["system"]: round(
            100 * next(iter(system_result["tasks"].values()))["metrics"]["nDCG@10"], 1
        )
        for system_result in results
    }
    recommended = output / "recommended.json"
    chosen = json.loads(recommended.read_text())["row"] if recommended.exists() else None
    return row | {"rows": rows, "recommended": chosen}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the layouts that are not finished, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beir", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pretrained", default="minilm")
    parser.add_argument("--only", default=",".join(LAYOUTS))
    parser.add_argument("flags", nargs="*", help="further flags of `taser compare`, after --")
    options = parser.parse_args(arguments)
    data = documents(options.beir)
    for name in options.only.split(","):
        path = options.out / f"{name}.json"
        if not path.exists():
            row = run_layout(name, data, options)
            print(json.dumps(row), flush=True)
            if not row["status"]:
                write_json(path, row)
    header = ["layout", "files", "rows", "recommended", "seconds"]
    lines = []
    for name in LAYOUTS:
        path = options.out / f"{name}.json"
        if path.exists():
            row = json.loads(path.read_text())
            rows = ", ".join(f"{system} {value}" for system, value in row["rows"].items())
            recommended = row["recommended"] or "an index, ready to ask"
            lines.append([name, str(row["files"]), rows, recommended, str(row["seconds"])])
    table = markdown_table(header, lines)
    write_text(options.out / "table.md", table + "\n")
    print(table)


if __name__ == "__main__":
    main()
