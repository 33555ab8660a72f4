"""sqlite-vec: a virtual table in an SQLite file, searched exactly.

    pip install sqlite-vec apsw sentence-transformers pyarrow

Python's own sqlite3 is often built without extensions; APSW has them. sqlite-vec
knows no inner products: embeddings of length 1 have the same order by cosine distance, and others
are refused.
"""

import pathlib

import apsw
import sqlite_vec
from exported import Exported, Search, main


def load(exported: Exported, place: str) -> Search:
    """Passages into a table; `place` is the folder of its file."""
    if exported.facts["normalization"] != "l2":
        raise SystemExit("sqlite-vec has no inner products: take embeddings of length 1")
    database = apsw.Connection(str(pathlib.Path(place) / "passages.sqlite"))
    database.enable_load_extension(True)
    database.load_extension(sqlite_vec.loadable_path())
    database.execute(
        "CREATE VIRTUAL TABLE passages USING vec0(id text primary key, "
        f"embedding float[{exported.dim}] distance_metric=cosine, +title text, +text text)"
    )
    for block in exported:
        bits = map(bytes, block.embeddings)
        rows = zip(block.ids, bits, block.titles, block.texts, strict=True)
        with database:
            database.executemany("INSERT INTO passages VALUES (?, ?, ?, ?)", rows)

    def search(embedding, k):
        query = "SELECT id FROM passages WHERE embedding MATCH ? AND k = ? ORDER BY distance"
        return [id for (id,) in database.execute(query, (bytes(embedding), k))]

    return search


if __name__ == "__main__":
    main(load)
