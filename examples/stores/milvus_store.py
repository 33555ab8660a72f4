"""Milvus: a collection with a flat index of inner products; milvus-lite in a file, or a server.

pip install pymilvus milvus-lite sentence-transformers pyarrow
"""

import pathlib

from exported import Exported, Search, main
from pymilvus import DataType, MilvusClient


def load(exported: Exported, place: str) -> Search:
    """Passages into a collection of Milvus'; `place` is a folder, or a server's address."""
    where = place if "://" in str(place) else str(pathlib.Path(place) / "milvus.db")
    client = MilvusClient(where)
    schema = client.create_schema()
    schema.add_field("id", DataType.VARCHAR, max_length=512, is_primary=True)
    schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=exported.dim)
    schema.add_field("title", DataType.VARCHAR, max_length=4096)
    schema.add_field("text", DataType.VARCHAR, max_length=65535)
    index = client.prepare_index_params()
    index.add_index("embedding", index_type="FLAT", metric_type="IP")
    client.create_collection("passages", schema=schema, index_params=index)
    for block in exported:
        rows = zip(block.ids, block.embeddings, block.titles, block.texts, strict=True)
        names = ("id", "embedding", "title", "text")
        client.insert("passages", [dict(zip(names, row, strict=True)) for row in rows])

    def search(embedding, k):
        (hits,) = client.search("passages", data=[embedding.tolist()], limit=k)
        return [hit["id"] for hit in hits]

    return search


if __name__ == "__main__":
    main(load)
