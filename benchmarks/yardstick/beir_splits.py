"""A BEIR directory with a validation split: a tenth of the training queries, by hash of their ids.

    python benchmarks/yardstick/beir_splits.py BEIR_DIR OUTPUT_DIR

OUTPUT_DIR gets qrels/{train,dev,test}.tsv, and links to corpus and queries. Files may be .gz.
"""

from __future__ import annotations

import gzip
import hashlib
import pathlib
import sys


def main() -> None:
    """Writes the directory; one that is there is written again, equally."""
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    source, output = (pathlib.Path(argument) for argument in sys.argv[1:])
    (output / "qrels").mkdir(parents=True, exist_ok=True)
    for name in ("corpus.jsonl", "queries.jsonl"):
        path = _existing(source / name)
        link = output / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    header, *lines = _lines(_existing(source / "qrels" / "train.tsv"))
    splits = {"train": [header], "dev": [header]}
    for line in lines:
        splits["dev" if is_held_out(line.split("\t")[0]) else "train"].append(line)
    splits["test"] = _lines(_existing(source / "qrels" / "test.tsv"))
    for split, qrels in splits.items():
        (output / "qrels" / f"{split}.tsv").write_text("\n".join(qrels) + "\n", encoding="utf-8")


def is_held_out(query_id: str) -> bool:
    """Whether a training query is used for validation instead."""
    digest = hashlib.sha256(query_id.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The file, or its .gz."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def _lines(path: pathlib.Path) -> list[str]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return text.decode("utf-8").splitlines()


if __name__ == "__main__":
    main()
