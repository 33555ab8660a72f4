"""Qdrant Edge: a shard in a folder, which Qdrant's servers read too.

pip install qdrant-edge-py sentence-transformers pyarrow
"""

import pathlib

from exported import Exported, Search, main
from qdrant_edge import (
    Distance,
    EdgeConfig,
    EdgeShard,
    EdgeVectorParams,
    Point,
    Query,
    QueryRequest,
    UpdateOperation,
)


def load(exported: Exported, place: str) -> Search:
    """Passages into a shard, numbered by row: Qdrant's ids are numbers; `place` is its folder."""
    folder = pathlib.Path(place) / "qdrant"
    folder.mkdir()
    config = EdgeConfig(vectors=EdgeVectorParams(size=exported.dim, distance=Distance.Dot))
    shard = EdgeShard.create(str(folder), config)
    count = 0
    for block in exported:
        rows = zip(block.ids, block.embeddings.tolist(), block.titles, block.texts, strict=True)
        points = [
            Point(count + row, embedding, {"id": id, "title": title, "text": text})
            for row, (id, embedding, title, text) in enumerate(rows)
        ]
        shard.update(UpdateOperation.upsert_points(points))
        count += len(points)

    def search(embedding, k):
        request = QueryRequest(
            limit=k, query=Query.Nearest(embedding.tolist()), with_payload=["id"]
        )
        return [hit.payload["id"] for hit in shard.query(request)]

    return search


if __name__ == "__main__":
    main(load)
