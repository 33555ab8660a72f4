"""What every script of this folder reads: an export's passages, and queries by its model.

taser export sentence_transformers --gin.MODEL_DIR=model --gin.EXPORT_DIR=exports
taser export embeddings --gin.MODEL_DIR=model --gin.EXPORT_DIR=exports ...
python examples/stores/qdrant_store.py exports "does aspirin prevent stroke?"
python examples/stores/qdrant_store.py exports --check=runs/scifact.test.trec
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow.parquet

Search = Callable[[np.ndarray, int], list[str]]
"""(a query's embedding, k) -> ids of the best k passages, best first."""

_BLOCK = 1024
_QUERIES, _K = 100, 20


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive passages: ids, embeddings [passages, dim] float32, titles and texts."""

    ids: list[str]
    embeddings: np.ndarray
    titles: list[str]
    texts: list[str]


class Exported:
    """The directory `embeddings` of an export.

    Args:
        directory: EXPORT_DIR of `taser export`.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory / "embeddings"
        self.facts = json.loads((self.directory / "metadata.json").read_text())
        self.dim: int = self.facts["dim"]
        if self.facts["dtype"] != "float32":
            raise SystemExit(f"{self.directory} holds {self.facts['dtype']} codes: export float32")

    def __iter__(self) -> Iterator[Block]:
        for path in sorted((self.directory / "passages").glob("*.parquet")):
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_BLOCK):
                numbers = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
                yield Block(
                    batch["id"].to_pylist(),
                    numbers.reshape(-1, self.dim),
                    batch["title"].to_pylist(),
                    batch["text"].to_pylist(),
                )

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Embeddings of queries, [queries, dim], by the sentence-transformers export."""
        from sentence_transformers import SentenceTransformer

        encoders = self.facts["query_encoders"]
        if "sentence_transformers" not in encoders:
            raise SystemExit("run `taser export sentence_transformers`, then export again")
        model = SentenceTransformer(str(self.directory / encoders["sentence_transformers"]))
        return model.encode_query(list(queries))

    def texts_of(self, query_ids: Sequence[str], split: str) -> list[str]:
        """Texts of the queries of `<task>.<split>`."""
        table = pyarrow.parquet.read_table(self.directory / "queries" / f"{split}.parquet")
        texts = dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
        return [texts[id] for id in query_ids]


def compare(exported: Exported, search: Search, run: pathlib.Path) -> None:
    """Prints for how many queries a store finds the same passages as a run of `taser search`."""
    exact: dict[str, list[str]] = collections.defaultdict(list)
    for line in run.read_text().splitlines():
        query, _, passage, *_ = line.split()
        exact[query].append(passage)
    ids = list(exact)[:_QUERIES]
    embeddings = exported.encode(exported.texts_of(ids, run.name.removesuffix(".trec")))
    pairs = [
        (search(embedding, _K), exact[id][:_K])
        for id, embedding in zip(ids, embeddings, strict=True)
    ]
    same = sum(set(stores) == set(exacts) for stores, exacts in pairs)
    ordered = sum(stores == exacts for stores, exacts in pairs)
    print(f"top {_K} as in exact search: {same} of {len(ids)} queries, {ordered} in its order")


@contextlib.contextmanager
def refusals(place: object) -> Iterator[None]:
    """Ends the program with what a store says: each engine has exceptions of its own."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise SystemExit(
            f"{place}: the store refused: {type(error).__name__}: {reason}\n"
            "  expected: a store that runs, has room, and has no `passages` yet\n"
            "  fix: start it, make room, or name another: --place=..."
        ) from error


def main(load: Callable[[Exported, pathlib.Path], Search]) -> None:
    """Loads an export into a store and answers a question, or compares 100 queries with a run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("export_dir", type=pathlib.Path)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--check", type=pathlib.Path, metavar="RUN", help="run of `taser search`")
    parser.add_argument("--place", help="folder or address of the store; a temporary folder")
    arguments = parser.parse_args()
    exported = Exported(arguments.export_dir)
    with tempfile.TemporaryDirectory() as folder:
        began, place = time.monotonic(), arguments.place or pathlib.Path(folder)
        with refusals(place):
            of_store = load(exported, place)

        def search(embedding: np.ndarray, k: int) -> list[str]:
            with refusals(place):
                return of_store(embedding, k)

        print(f"loaded {exported.facts['num_rows']:,} passages in {time.monotonic() - began:.1f} s")
        if arguments.check:
            compare(exported, search, arguments.check)
        if arguments.question:
            print("\n".join(search(exported.encode([arguments.question])[0], 5)))
