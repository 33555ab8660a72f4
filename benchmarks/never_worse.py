"""Is what `taser compare` recommends ever worse than not training? Eight sets, four sizes.

    python benchmarks/never_worse.py --data=DIR --out=DIR --pretrained=minilm [--sets=scifact,fm2]
        [--sizes=50,150] [--train=3000] [--test=500] [--passages=8000] [-- flags of taser compare]

A cell is a set with so many of its training queries, drawn by the hash of their ids; smaller draws
are parts of larger ones. Each becomes a BEIR folder, and one `taser compare`. A cell that is
finished leaves OUT/cells/SET-SIZE.json, with its table (.md) and what was decided (.gin), and is
not run again; rerun the command to resume. A row is nDCG@10 of the recommended row minus that of
the untrained model with BM25 on the test queries, with its 95% interval by a bootstrap over
queries. OUT/cells.json and OUT/table.md hold all rows.

The sets' text is not part of the repository. DIR/beir/NAME holds BEIR folders; DIR/kilt_mini holds
passages.tsv, passage_sources.tsv and KILT's JSON lines. pydocs is built from what is installed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from taser_jax.data.pydocs.build import build_pydocs
from taser_jax.evaluation.reports import markdown_table
from taser_jax.evaluation.results import per_query_path, read_per_query
from taser_jax.evaluation.significance import AVERAGE, bootstrap_over_tasks
from taser_jax.storage.artifacts import write_json, write_text

BASELINE = "Pretrained, untrained + BM25"
MEASURE = "nDCG@10"
SETS = ("scifact", "medquad", "pubmedqa", "squad", "nq_qed", "fm2", "selqa", "pydocs")
SIZES = ("50", "150", "500", "all")
# KILT's files by split; one file alone is divided by the hash of its ids.
_KILT = {
    "squad": {"train": "squad-train", "test": "squad-dev"},
    "nq_qed": {"train": "nq_qed-train", "test": "nq_qed-dev"},
    "fm2": {"": "fm2-dev"},
    "selqa": {"": "selqa-dev"},
}
_TEST_SHARE = 0.4


@dataclasses.dataclass
class Data:
    """A set in memory.

    Attributes:
        passages: id -> (title, text).
        queries: split -> query id -> (text, ids of its positives).
    """

    passages: dict[str, tuple[str, str]]
    queries: dict[str, dict[str, tuple[str, list[str]]]]


def share(id: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") / 2**64


def drawn(ids: Iterable[str], count: int | None) -> list[str]:
    """The ids with the smallest hashes; None takes all."""
    return sorted(ids, key=share)[:count]


def lines_of(path: pathlib.Path) -> Iterator[str]:
    """Lines of a file that may be gzipped."""
    existing = path if path.exists() else path.with_name(f"{path.name}.gz")
    opened = gzip.open if existing.suffix == ".gz" else open
    with opened(existing, "rt", encoding="utf-8") as file:
        yield from file


def read_beir(folder: pathlib.Path) -> Data:
    """A BEIR folder with qrels/train.tsv and qrels/test.tsv."""
    corpus = map(json.loads, lines_of(folder / "corpus.jsonl"))
    passages = {record["_id"]: (record.get("title", ""), record["text"]) for record in corpus}
    texts = {
        record["_id"]: record["text"]
        for record in map(json.loads, lines_of(folder / "queries.jsonl"))
    }
    queries: dict[str, dict[str, tuple[str, list[str]]]] = {"train": {}, "test": {}}
    for split, split_queries in queries.items():
        for line in lines_of(folder / "qrels" / f"{split}.tsv"):
            query, passage, grade = line.split("\t")
            if grade.strip().isdigit() and int(grade) > 0 and passage in passages:
                split_queries.setdefault(query, (texts[query], []))[1].append(passage)
    return Data(passages, queries)


def read_kilt(folder: pathlib.Path, name: str) -> Data:
    """A set of kilt_mini: all passages, and its own queries with the passages of their gold."""
    passages = {}
    for line in csv.DictReader(lines_of(folder / "passages.tsv"), delimiter="\t"):
        passages[line["id"]] = (line["title"], line["text"])
    queries: dict[str, dict[str, tuple[str, list[str]]]] = {"train": {}, "test": {}}
    for split, stem in _KILT[name].items():
        for record in map(json.loads, lines_of(folder / f"{stem}.jsonl")):
            gold = {
                proof["passage_id"]
                for output in record["output"]
                for proof in output.get("provenance") or ()
            }
            own = split or ("test" if share(f"split {record['id']}") < _TEST_SHARE else "train")
            if gold:
                queries[own][record["id"]] = (record["input"], sorted(gold))
    return Data(passages, queries)


def read_pydocs() -> Data:
    """The docstrings of what is installed: the queries of all tasks."""
    built = build_pydocs(None)
    passages = {passage.id: (passage.title, passage.text) for passage in built.passages}
    ids = [passage.id for passage in built.passages]
    queries = {
        split: {
            f"{task}-{query.id}": (query.text, [ids[row] for row in query.positives])
            for task, splits in built.queries.items()
            for query in splits.get(split, ())
            if query.positives
        }
        for split in ("train", "test")
    }
    return Data(passages, queries)


def read_set(folder: pathlib.Path, name: str, *, train: int, test: int) -> Data:
    """One of `SETS`, with at most so many of its queries."""
    if name == "pydocs":
        data = read_pydocs()
    elif name in _KILT:
        data = read_kilt(folder / "kilt_mini", name)
    else:
        data = read_beir(folder / "beir" / name)
    for split, count in (("train", train), ("test", test)):
        queries = data.queries[split]
        data.queries[split] = {id: queries[id] for id in drawn(queries, count)}
    return data


def write_cell(
    data: Data, folder: pathlib.Path, *, size: int | None, passages: int
) -> dict[str, int]:
    """Writes a set with some of its queries as a BEIR folder; returns what it has of each.

    Positives of all queries stay, those that are not drawn too, so that all sizes of a set have
    the same passages.
    """
    gold = {id for split in data.queries.values() for _, ids in split.values() for id in ids}
    others = drawn(data.passages.keys() - gold, max(0, passages - len(gold)))
    corpus_ids = gold | set(others)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for id, (title, text) in data.passages.items():
            if id in corpus_ids:
                file.write(json.dumps({"_id": id, "title": title, "text": text}) + "\n")
    counts = {"passages": len(corpus_ids)}
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
        for split, count in (("train", size), ("test", None)):
            chosen = drawn(data.queries[split], count)
            counts[split] = len(chosen)
            qrels = ["query-id\tcorpus-id\tscore"]
            for id in chosen:
                text, positives = data.queries[split][id]
                file.write(json.dumps({"_id": id, "text": text}) + "\n")
                qrels += [f"{id}\t{passage}\t1" for passage in positives]
            (folder / "qrels" / f"{split}.tsv").write_text("\n".join(qrels) + "\n")
    return counts


def run_cell(
    data: Data, root: pathlib.Path, *, size: int | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs `taser compare` on a cell; returns its row."""
    folder, output = root / "cell", root / "results"
    counts = write_cell(data, folder, size=size, passages=options.passages)
    start = time.monotonic()
    subprocess.run(
        [
            *(sys.executable, "-m", "taser_jax.cli.main", "compare", str(folder)),
            *(f"--pretrained={options.pretrained}", f"--out={output}", *options.flags),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    chosen = json.loads((output / "recommended.json").read_text())
    rows = {}
    for path in (output / "results").glob("*.json"):
        result = json.loads(path.read_text())
        rows[result["system"]] = result["tasks"]["cell"]["metrics"][MEASURE]
    first, second = (
        {"cell": read_per_query(per_query_path(output, row, "cell", "test"))}
        for row in (chosen["row"], BASELINE)
    )
    compared = bootstrap_over_tasks(first, second, [MEASURE])
    return {
        "counts": counts,
        "recommended": chosen["row"],
        "rows": rows,
        "seconds": time.monotonic() - start,
        "gains": chosen["gains"],
        **dataclasses.asdict(compared[AVERAGE, MEASURE]),
    }


def write_table(out: pathlib.Path) -> None:
    """OUT/table.md and OUT/cells.json, of the cells that are finished."""
    names = [f"{name}-{size}" for name in SETS for size in SIZES]
    paths = {name: out / "cells" / f"{name}.json" for name in names}
    cells = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    header = ["set", "training queries", "recommended", "BM25", "untrained + BM25", "difference"]
    lines = []
    for name, cell in cells.items():
        points = [f"{100 * cell[key]:+.1f}" for key in ("difference", "low", "high")]
        lines.append(
            [
                name.rpartition("-")[0],
                f"{cell['counts']['train']:,}",
                cell["recommended"],
                *(f"{100 * cell['rows'][row]:.1f}" for row in ("BM25", BASELINE)),
                f"{points[0]} [{points[1]}, {points[2]}]",
            ]
        )
    table = markdown_table(header, lines)
    write_text(out / "table.md", table + "\n")
    print(table)
    if cells:
        write_json(out / "cells.json", summary(cells))
        print(json.dumps(summary(cells)["claims"], indent=2))


def summary(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Never below by more than noise, above on average: whether it holds, and the cells."""
    differences = np.array([cell["difference"] for cell in cells.values()])
    below = [name for name, cell in cells.items() if cell["high"] < 0]
    claims = {
        "never below by more than noise": {"holds": not below, "below": below},
        "above on average": {
            "holds": bool(differences.mean() > 0),
            "mean": float(differences.mean()),
            "cells": len(cells),
        },
    }
    return {"measure": MEASURE, "baseline": BASELINE, "claims": claims, "cells": dict(cells)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the cells that are not finished, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pretrained", default="minilm")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--train", type=int, default=3000, help="training queries, at most")
    parser.add_argument("--test", type=int, default=500, help="test queries, at most")
    parser.add_argument("--passages", type=int, default=8000, help="beside all positives")
    parser.add_argument("flags", nargs="*", help="further flags of `taser compare`, after --")
    options = parser.parse_args(arguments)
    sizes = options.sizes.split(",")
    for name in options.sets.split(","):
        data: Data | None = None
        for size in sizes:
            path = options.out / "cells" / f"{name}-{size}.json"
            if path.exists():
                continue
            data = data or read_set(options.data, name, train=options.train, test=options.test)
            count = None if size == "all" else int(size)
            queries = len(data.queries["train"])
            # "all" of a set with exactly 500 queries is the cell of 500.
            if queries < (count or 0) or (size == "all" and str(queries) in sizes):
                print(f"{name}: {queries} training queries; no cell of {size}")
                continue
            root = options.out / "work" / f"{name}-{size}"
            row = run_cell(data, root, size=count, options=options)
            write_json(path, row)
            shutil.copy(root / "results" / "table.md", path.with_suffix(".md"))
            shutil.copy(root / "results" / "decided.gin", path.with_suffix(".gin"))
            # Models, states and embeddings of a cell take a gigabyte.
            shutil.rmtree(root)
            print(f"{name}-{size}: {100 * row['difference']:+.1f} points", flush=True)
    write_table(options.out)


if __name__ == "__main__":
    main()
