"""Answer checks a second: one question's answers looked for in one passage is one check.

    python benchmarks/answer_matching.py --passages passages.tsv.gz --questions dev.qa.csv.gz

Passages are DPR's TSV, questions its .qa.csv. Each question gets `--depth` random passages. Prints
one JSON line: `cold` includes tokenising each passage once, `warm` finds all of them in the cache.
"""

import argparse
import ast
import csv
import gzip
import time

import numpy as np
from side_by_side import machine, show

from taser_jax.evaluation.metrics import AnswerMatch, AnswerMatcher


def open_text(path: str):
    opener = gzip.open if path.endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8", newline="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", required=True)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--match", choices=[match.value for match in AnswerMatch], default="string")
    parser.add_argument("--depth", type=int, default=100)
    arguments = parser.parse_args()

    with open_text(arguments.passages) as file:
        texts = [line["text"] for line in csv.DictReader(file, delimiter="\t")]
    with open_text(arguments.questions) as file:
        answers = [ast.literal_eval(line.rstrip("\r\n").split("\t")[1]) for line in file]
    shape = (len(answers), arguments.depth)
    rows = np.random.default_rng(0).integers(0, len(texts), shape).astype(np.int32)

    seconds = {}
    matcher = AnswerMatcher(
        lambda asked: [texts[row] for row in asked], match=AnswerMatch(arguments.match)
    )
    for name in ("cold", "warm"):
        start = time.perf_counter()
        hits = matcher.hits(rows, answers)
        seconds[name] = time.perf_counter() - start
    figure = {
        "benchmark": "answer_matching",
        "match": arguments.match,
        "checks": rows.size,
        "distinct_passages": len(np.unique(rows)),
        "mean_characters": round(float(np.mean([len(text) for text in texts]))),
        "hits": int(hits.sum()),
        "checks_per_second_cold": round(rows.size / seconds["cold"]),
        "checks_per_second_warm": round(rows.size / seconds["warm"]),
    }
    show(figure | machine("numpy", "regex"))


if __name__ == "__main__":
    main()
