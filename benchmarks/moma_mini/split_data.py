"""The folders that run.sh prepares: the source, the encyclopedia beside it, and the targets.

    python benchmarks/moma_mini/split_data.py SHARED_DATA OUTPUT_DIR

From kilt_mini come source.tsv and {squad,nq_qed}-{train,dev}.jsonl, squad's and nq_qed's
passages and questions; fm2/ and climate_fever/, BEIR folders of these sets' passages and claims;
and wiki.tsv, all other passages. From beir come scifact/ and medquad/ with their test queries only.
Shares, drawn by hash of the ids: QUERIES (0.5) of the training questions, DISTRACTORS (1.0) of
wiki's passages, TARGET_DISTRACTORS (1.0) of the targets' passages that answer no test question.
With SPLIT=validation, a fifth of these training questions are the test questions instead, and no
test question is read.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence, Set

SOURCES = ("squad", "nq_qed")
BEIR_TARGETS = ("scifact", "medquad")
# Target -> its file of claims in kilt_mini.
KILT_TARGETS = {"fm2": "fm2-dev", "climate_fever": "climate_fever-all"}


def main() -> None:
    """Writes the files, and prints how many passages and questions each has."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    shared, output = (pathlib.Path(argument) for argument in sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    share = float(os.environ.get("TARGET_DISTRACTORS", "1.0"))
    _split_kilt_mini(shared / "kilt_mini", output, share)
    for target in BEIR_TARGETS:
        _copy_beir(shared / "beir" / target, output / target, share)


def _split_kilt_mini(kilt_mini: pathlib.Path, output: pathlib.Path, target_share: float) -> None:
    sets_of = {
        line["passage_id"]: set(line["source"].split(","))
        for line in _table(kilt_mini / "passage_sources.tsv.gz")
    }
    lines = list(_table(kilt_mini / "passages.tsv.gz"))
    share = float(os.environ.get("DISTRACTORS", "1.0"))
    source = [line for line in lines if sets_of[line["id"]] & set(SOURCES)]
    own = {*SOURCES, *KILT_TARGETS}
    wiki = [line for line in lines if not sets_of[line["id"]] & own and is_kept(line["id"], share)]
    _write(output / "source.tsv", source, list(lines[0]))
    # A memory that held a target's passages would be there without the target, too.
    _write(output / "wiki.tsv", wiki, ["id", "text", "title"])
    for task in SOURCES:
        share = float(os.environ.get("QUERIES", "0.5"))
        asked = [
            line
            for line in _lines(kilt_mini / f"{task}-train.jsonl.gz")
            if is_kept(json.loads(line)["id"], share)
        ]
        if os.environ.get("SPLIT", "test") == "validation":
            # Of the share that is kept, an evenly drawn part: ids are drawn by one hash.
            tested = [line for line in asked if is_kept(json.loads(line)["id"], share / 5)]
            asked = [line for line in asked if not is_kept(json.loads(line)["id"], share / 5)]
        else:
            tested = list(_lines(kilt_mini / f"{task}-dev.jsonl.gz"))
        for name, questions in ((f"{task}-train", asked), (f"{task}-dev", tested)):
            _write_lines(output / f"{name}.jsonl", questions)
            print(f"{name}: {len(questions):,} questions")
    for target, file in KILT_TARGETS.items():
        claims = list(map(json.loads, _lines(kilt_mini / f"{file}.jsonl.gz")))
        passages = [line for line in lines if target in sets_of[line["id"]]]
        _write_kilt_target(output / target, claims, passages, target_share)


def _write_kilt_target(
    output: pathlib.Path, claims: Sequence[dict], passages: Sequence[dict[str, str]], share: float
) -> None:
    """A BEIR folder of a KILT set: its claims are test queries, their provenance is relevant."""
    relevant = {
        claim["id"]: {
            place["passage_id"]
            for answer in claim["output"]
            for place in answer.get("provenance", ())
        }
        for claim in claims
    }
    queries = [{"_id": claim["id"], "text": claim["input"]} for claim in claims]
    qrels = [f"{claim}\t{passage}\t1" for claim in relevant for passage in sorted(relevant[claim])]
    (output / "qrels").mkdir(parents=True, exist_ok=True)
    _write_lines(output / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *qrels])
    _write_lines(output / "queries.jsonl", map(json.dumps, queries))
    corpus = [
        {"_id": line["id"], "title": line["title"], "text": line["text"]} for line in passages
    ]
    _write_corpus(output, corpus, set().union(*relevant.values()), share)


def _copy_beir(source: pathlib.Path, output: pathlib.Path, share: float) -> None:
    """A BEIR folder whose only judgments are those of the test queries."""
    (output / "qrels").mkdir(parents=True, exist_ok=True)
    qrels = list(_lines(source / "qrels" / "test.tsv.gz"))
    _write_lines(output / "qrels" / "test.tsv", qrels)
    shutil.copyfile(source / "queries.jsonl.gz", output / "queries.jsonl.gz")
    relevant = {line.split("\t")[1] for line in qrels[1:]}
    _write_corpus(output, map(json.loads, _lines(source / "corpus.jsonl.gz")), relevant, share)


def _write_corpus(
    output: pathlib.Path, passages: Iterable[dict[str, str]], relevant: Set[str], share: float
) -> None:
    """The relevant passages, and a share of the others."""
    corpus = [line for line in passages if line["_id"] in relevant or is_kept(line["_id"], share)]
    _write_lines(output / "corpus.jsonl", map(json.dumps, corpus))
    print(f"{output.name}: {len(corpus):,} passages")


def is_kept(id: str, share: float) -> bool:
    """Whether an id is among a share of all."""
    digest = hashlib.sha256(id.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _write_lines(path: pathlib.Path, lines: Iterable[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(path: pathlib.Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file)


def _table(path: pathlib.Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t")


def _write(path: pathlib.Path, rows: Sequence[dict[str, str]], columns: Sequence[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, dialect=csv.excel_tab, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{path.stem}: {len(rows):,} passages")


if __name__ == "__main__":
    main()
