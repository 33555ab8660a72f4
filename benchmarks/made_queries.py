"""Queries made of a corpus alone, judged by its real ones: `taser compare --queries=make`.

    python benchmarks/made_queries.py --beir=DIR --out=DIR [--pretrained=minilm] [--passages=5000]
        [-- flags of taser compare]

DIR is a BEIR folder with training and test queries, such as scifact's. OUT/made is the comparison
on its passages alone, OUT/labelled that with its training queries. What each
recommends answers the test queries; prints nDCG@10 beside BM25's and the untrained model's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import never_worse
import numpy as np

from taser_jax import Retriever
from taser_jax.evaluation.reports import markdown_table
from taser_jax.storage.artifacts import write_text


def compare(folder: pathlib.Path, output: pathlib.Path, *flags: str) -> float:
    """Runs `taser compare`; returns its minutes."""
    start = time.monotonic()
    command = [sys.executable, "-m", "taser_jax.cli.main", "compare", str(folder)]
    subprocess.run([*command, f"--out={output}", *flags], check=True)
    return (time.monotonic() - start) / 60


def ndcg(output: pathlib.Path, data: never_worse.Data) -> float:
    """nDCG@10, in points, of what a comparison left, on the real test queries.

    nDCG@10 = Σ_r [passage r is relevant] / log2(r + 1), over that of the best order.
    """
    retriever = Retriever.load(output)
    queries = list(data.queries["test"].values())
    questions = [text for text, _ in queries]
    hit_lists = retriever.search(questions, k=10, hybrid=retriever.has_hybrid)
    discounts = 1 / np.log2(np.arange(2, 12))
    values = [
        sum(discounts[place] for place, hit in enumerate(hits) if hit.passage.id in positives)
        / discounts[: len(positives)].sum()
        for hits, (_, positives) in zip(hit_lists, queries, strict=True)
    ]
    return 100 * float(np.mean(values))


def rows_of(output: pathlib.Path) -> dict[str, float]:
    """System -> nDCG@10, in points, of a comparison's table."""
    results = (json.loads(path.read_text()) for path in output.glob("results/*.json"))
    return {
        system_result["system"]: 100
        * next(iter(system_result["tasks"].values()))["metrics"][never_worse.MEASURE]
        for system_result in results
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both comparisons, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beir", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pretrained", default="minilm")
    parser.add_argument("--passages", type=int, default=5000, help="beside all positives")
    parser.add_argument("flags", nargs="*", help="further flags of `taser compare`, after --")
    options = parser.parse_args(arguments)
    data = never_worse.read_beir(options.beir)
    labelled, text = options.out / "beir", options.out / "text"
    never_worse.write_cell(data, labelled, size=None, passages=options.passages)
    text.mkdir(parents=True, exist_ok=True)
    (text / "corpus.jsonl").write_bytes((labelled / "corpus.jsonl").read_bytes())
    flags = [f"--pretrained={options.pretrained}", *options.flags]
    places = {"made": text, "labelled": labelled}
    extra = {"made": ["--queries=make"], "labelled": []}
    minutes = {
        name: compare(folder, options.out / name, *flags, *extra[name])
        for name, folder in places.items()
    }
    lines = [[row, f"{value:.1f}", ""] for row, value in rows_of(options.out / "labelled").items()]
    for name, queries in (("made", "made of the passages"), ("labelled", "real")):
        row = json.loads((options.out / name / "recommended.json").read_text())["row"]
        value = f"{ndcg(options.out / name, data):.1f}"
        lines.append([f"recommended: {row}; queries {queries}", value, f"{minutes[name]:.0f}"])
    table = markdown_table(["row", "nDCG@10, real test queries", "minutes"], lines)
    write_text(options.out / "table.md", table + "\n")
    print(table)


if __name__ == "__main__":
    main()
