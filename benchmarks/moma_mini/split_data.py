"""The folders that run.sh prepares: the source, the encyclopedia beside it, and the targets.

    python benchmarks/moma_mini/split_data.py SHARED_DATA OUTPUT_DIR

From kilt_mini come source.tsv and {squad,nq_qed}-{train,dev}.jsonl, squad's and nq_qed's
passages and questions, and wiki.tsv, all other passages. From beir come scifact/, medquad/ and
pubmedqa/ with their test queries alone. Shares, drawn by hash of the ids: QUERIES (0.5) of the
training questions, DISTRACTORS (1.0) of wiki's passages, TARGET_DISTRACTORS (0.25) of the passages
of MedQuAD that answer no test question.
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
from collections.abc import Iterator, Sequence

SOURCES = ("squad", "nq_qed")
TARGETS = ("scifact", "medquad", "pubmedqa")


class _Plain(csv.excel_tab):
    """What `taser prepare tsv` reads: without quotes."""

    quoting = csv.QUOTE_NONE
    quotechar = None


def main() -> None:
    """Writes the files, and prints how many passages and questions each has."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    shared, output = (pathlib.Path(argument) for argument in sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    _split_kilt_mini(shared / "kilt_mini", output)
    for target in TARGETS:
        thinned = target == "medquad"
        share = float(os.environ.get("TARGET_DISTRACTORS", "0.25")) if thinned else 1.0
        _copy_target(shared / "beir" / target, output / target, share)


def _split_kilt_mini(kilt_mini: pathlib.Path, output: pathlib.Path) -> None:
    own = {
        line["passage_id"]
        for line in _table(kilt_mini / "passage_sources.tsv.gz")
        if set(line["source"].split(",")) & set(SOURCES)
    }
    lines = list(_table(kilt_mini / "passages.tsv.gz"))
    share = float(os.environ.get("DISTRACTORS", "1.0"))
    others = [line for line in lines if line["id"] not in own and is_kept(line["id"], share)]
    _write(output / "source.tsv", [line for line in lines if line["id"] in own], list(lines[0]))
    _write(output / "wiki.tsv", others, ["id", "text", "title"], dialect=_Plain)
    for task in SOURCES:
        for split, kept in (("train", float(os.environ.get("QUERIES", "0.5"))), ("dev", 1.0)):
            path = output / f"{task}-{split}.jsonl"
            asked = [
                line
                for line in _lines(kilt_mini / f"{path.name}.gz")
                if is_kept(json.loads(line)["id"], kept)
            ]
            path.write_text("\n".join(asked) + "\n", encoding="utf-8")
            print(f"{path.stem}: {len(asked):,} questions")


def _copy_target(source: pathlib.Path, output: pathlib.Path, share: float) -> None:
    """A BEIR folder whose only judgments are those of the test queries."""
    (output / "qrels").mkdir(parents=True, exist_ok=True)
    qrels = list(_lines(source / "qrels" / "test.tsv.gz"))
    (output / "qrels" / "test.tsv").write_text("\n".join(qrels) + "\n", encoding="utf-8")
    shutil.copyfile(source / "queries.jsonl.gz", output / "queries.jsonl.gz")
    relevant = {line.split("\t")[1] for line in qrels[1:]}
    corpus = [
        line
        for line in _lines(source / "corpus.jsonl.gz")
        if (id := json.loads(line)["_id"]) in relevant or is_kept(id, share)
    ]
    (output / "corpus.jsonl").write_text("\n".join(corpus) + "\n", encoding="utf-8")
    print(f"{output.name}: {len(corpus):,} passages")


def is_kept(id: str, share: float) -> bool:
    """Whether an id is among a share of all."""
    digest = hashlib.sha256(id.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _lines(path: pathlib.Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from (line.rstrip("\n") for line in file)


def _table(path: pathlib.Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t")


def _write(
    path: pathlib.Path,
    rows: Sequence[dict[str, str]],
    columns: Sequence[str],
    *,
    dialect: type[csv.Dialect] = csv.excel_tab,
) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, dialect=dialect, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{path.stem}: {len(rows):,} passages")


if __name__ == "__main__":
    main()
