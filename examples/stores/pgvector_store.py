"""PostgreSQL with pgvector: a table, sorted by negative inner products.

    pip install 'psycopg[binary]' pgvector sentence-transformers pyarrow
    python examples/stores/pgvector_store.py exports "..." --place=postgresql://localhost/postgres

An index (`CREATE INDEX ON passages USING hnsw (embedding vector_ip_ops)`) makes it approximate.
"""

import psycopg
from exported import Exported, Search, main
from pgvector.psycopg import register_vector


def load(exported: Exported, place: str) -> Search:
    """Passages into a new table; `place` is the database's address."""
    connection = psycopg.connect(str(place), autocommit=True)
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(connection)
    connection.execute(
        "CREATE TABLE passages (id text PRIMARY KEY, title text, text text, "
        f"embedding vector({exported.dim}))"
    )
    with (
        connection.cursor() as cursor,
        cursor.copy("COPY passages FROM STDIN WITH (FORMAT BINARY)") as copy,
    ):
        copy.set_types(["text", "text", "text", "vector"])
        for block in exported:
            rows = zip(block.ids, block.titles, block.texts, block.embeddings, strict=True)
            for row in rows:
                copy.write_row(row)

    def search(embedding, k):
        query = "SELECT id FROM passages ORDER BY embedding <#> %s LIMIT %s"
        return [id for (id,) in connection.execute(query, (embedding, k))]

    return search


if __name__ == "__main__":
    main(load)
