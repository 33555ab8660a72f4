"""Chroma: a collection with inner products, in a folder.

pip install chromadb sentence-transformers pyarrow
"""

import chromadb
from exported import Exported, Search, main


def load(exported: Exported, place: str) -> Search:
    """Passages into a collection of Chroma's; `place` is its folder."""
    client = chromadb.PersistentClient(path=str(place))
    # The index is approximate: a wide search, for the sake of the comparison.
    settings = {"hnsw": {"space": "ip", "ef_construction": 400, "ef_search": 1000}}
    passages = client.create_collection("passages", configuration=settings, embedding_function=None)
    for block in exported:
        titles = [{"title": title} for title in block.titles]
        passages.add(
            block.ids, embeddings=block.embeddings, documents=block.texts, metadatas=titles
        )

    def search(embedding, k):
        return passages.query(query_embeddings=[embedding], n_results=k, include=[])["ids"][0]

    return search


if __name__ == "__main__":
    main(load)
