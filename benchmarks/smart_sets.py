"""Writes Cranfield, CISI, Medline and CACM as folders for `taser compare`.

    python benchmarks/smart_sets.py --source=DIR --out=DIR
    taser compare DIR/cisi --pretrained=minilm --out=results --minutes=10

None of them has chosen a setting of this code. Their files, in the format of Salton's SMART, are
not part of the repository: DIR holds those of `SETS`. The judged queries are divided into halves,
for training and for the test, by a checksum of their ids.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple


class SmartSet(NamedTuple):
    """The files of a set.

    Attributes:
        documents: `.I` id, `.T` title, `.W` text.
        queries: `.I` id, `.W` text.
        judgements: query and document, in these columns.
        document_column: of the document.
        grade_column: of the grade, which is relevant above 0; None: all are.
        is_numbered: whether judgements have the queries' places, counted from 1, for their ids.
    """

    documents: str
    queries: str
    judgements: str
    document_column: int = 1
    grade_column: int | None = None
    is_numbered: bool = False


SETS = {
    "cran": SmartSet("cran.all.1400", "cran.qry", "cranqrel", grade_column=2, is_numbered=True),
    "cisi": SmartSet("CISI.ALL", "CISI.QRY", "CISI.REL"),
    "med": SmartSet("MED.ALL", "MED.QRY", "MED.REL", document_column=2),
    "cacm": SmartSet("cacm.all", "query.text", "qrels.text"),
}


def read_smart(path: pathlib.Path) -> dict[str, dict[str, str]]:
    """Id -> field -> text, of one line; what is there twice is joined."""
    texts: dict[str, dict[str, str]] = {}
    for entry in re.split(r"(?m)^\.I\s+", path.read_text("utf-8-sig", "replace"))[1:]:
        id, *parts = re.split(r"(?m)^\.([A-Z])\s*$", entry)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            fields = texts.setdefault(id.strip().lstrip("0"), {})
            fields[name] = " ".join([fields.get(name, ""), *text.split()]).strip()
    return texts


def write_set(files: SmartSet, source: pathlib.Path, folder: pathlib.Path) -> Mapping[str, int]:
    """Writes passages, and queries with judgements of both splits; counts what it writes."""
    documents = read_smart(source / files.documents)
    queries = read_smart(source / files.queries)
    if files.is_numbered:
        queries = {str(place): query for place, query in enumerate(queries.values(), start=1)}
    judged: dict[str, list[str]] = {}
    for line in (source / files.judgements).read_text().splitlines():
        columns = line.split()
        is_relevant = files.grade_column is None or int(columns[files.grade_column]) > 0
        query, document = columns[0].lstrip("0"), columns[files.document_column].lstrip("0")
        judged.setdefault(query, []).append(f"{query}\t0\t{document}\t{int(is_relevant)}")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"{id}\t{text.get('T', '')}\t{text.get('W', '')}" for id, text in documents.items()]
    # A double quote would begin a quoted column.
    _write(folder / "passages.tsv", ["id\ttitle\ttext", *(row.replace('"', "'") for row in rows)])
    counts = {"passages": len(documents)}
    for split in ("test", "train"):
        ids = [id for id in queries if id in judged and _split(id) == split]
        name = f"{folder.name}.{split}"
        _write(folder / f"{name}.queries.tsv", [f"{id}\t{queries[id]['W']}" for id in ids])
        _write(folder / f"{name}.qrels.tsv", [line for id in ids for line in judged[id]])
        counts[split] = len(ids)
    return counts


def _split(id: str) -> str:
    return "train" if zlib.crc32(id.encode()) % 2 else "test"


def _write(path: pathlib.Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Writes all sets whose files are there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    for name, files in SETS.items():
        if (options.source / files.documents).exists():
            print(name, write_set(files, options.source, options.out / name))


if __name__ == "__main__":
    main()
