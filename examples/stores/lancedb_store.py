"""LanceDB: a table made from the Parquet as it is, in a folder.

pip install lancedb sentence-transformers pyarrow
"""

import lancedb
import pyarrow.parquet
from exported import Exported, Search, main


def load(exported: Exported, place: str) -> Search:
    """Passages into a table of LanceDB's; `place` is its folder or bucket."""
    first, *others = sorted((exported.directory / "passages").glob("*.parquet"))
    database = lancedb.connect(str(place))
    table = database.create_table("passages", pyarrow.parquet.read_table(first))
    for path in others:
        table.add(pyarrow.parquet.read_table(path))

    def search(embedding, k):
        query = table.search(embedding, vector_column_name="embedding").distance_type("dot")
        return query.select(["id", "_distance"]).limit(k).to_arrow()["id"].to_pylist()

    return search


if __name__ == "__main__":
    main(load)
