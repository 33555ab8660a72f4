"""Sets validation questions apart from DPR training files, the same ones on every machine.

    python benchmarks/open_qa/split_questions.py squad_train.jsonl.gz nq_train.jsonl.gz OUTPUT_DIR

writes OUTPUT_DIR/<name>.train.jsonl and OUTPUT_DIR/<name>.validation.jsonl for each file, <name>
being the file's name up to its first dot. A question goes by a hash of its first positive passage,
so no passage that is trained on as a positive is a validation question's; one passage in `--one_in`
is kept for validation. The test questions are other files and play no part.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

SPLITS = ("train", "validation")


def split_of(question: Mapping[str, Any], *, one_in: int) -> str:
    """The split of a question, by title and text of its first positive.

    Args:
        question: a record of DPR's training format.
        one_in: one passage in this many is kept for validation.
    """
    passage = (question.get("positive_ctxs") or [{"title": "", "text": question["question"]}])[0]
    text = f"{passage.get('title', '')}\n{passage['text']}"
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return SPLITS[int.from_bytes(digest[:8], "big") % one_in == 0]


def split_file(
    path: pathlib.Path, output_dir: pathlib.Path, *, one_in: int
) -> dict[str, pathlib.Path]:
    """Splits one JSON-lines file; the lines themselves are not changed.

    Args:
        path: DPR's training format, one question a line, gzipped or not.
        output_dir: where the two files go.
        one_in: see `split_of`.

    Returns:
        Split -> its file.
    """
    name = path.name.partition(".")[0]
    paths = {split: output_dir / f"{name}.{split}.jsonl" for split in SPLITS}
    lines: dict[str, list[str]] = {split: [] for split in SPLITS}
    reader = gzip.open if path.suffix == ".gz" else open
    with reader(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                lines[split_of(json.loads(line), one_in=one_in)].append(line.rstrip("\n") + "\n")
    output_dir.mkdir(parents=True, exist_ok=True)
    for split, written in paths.items():
        written.write_text("".join(lines[split]), encoding="utf-8")
    print(f"{name}: {len(lines['train']):,} train, {len(lines['validation']):,} validation")
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("output_dir", type=pathlib.Path)
    parser.add_argument("--one_in", type=int, default=16)
    options = parser.parse_args(arguments)
    for path in options.files:
        split_file(path, options.output_dir, one_in=options.one_in)


if __name__ == "__main__":
    main()
