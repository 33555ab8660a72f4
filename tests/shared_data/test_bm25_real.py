"""BM25 on SciFact: nDCG@10 beside Anserini's published 0.679 (flat, k1 0.9, b 0.4)."""

import gzip
import json
import math

from taser_jax.retrieval.bm25 import Bm25Index


def test_scifact_ndcg(shared_data, tmp_path):
    def lines(name):
        with gzip.open(shared_data / "beir" / "scifact" / name, "rt", encoding="utf-8") as file:
            return file.readlines()

    corpus = [json.loads(line) for line in lines("corpus.jsonl.gz")]
    queries = {
        record["_id"]: record["text"] for record in map(json.loads, lines("queries.jsonl.gz"))
    }
    relevant: dict[str, set[str]] = {}
    for line in lines("qrels/test.tsv.gz")[1:]:
        query_id, passage_id, _ = line.split()
        relevant.setdefault(query_id, set()).add(passage_id)
    index = Bm25Index.build(
        (f"{record['title']} {record['text']}" for record in corpus), tmp_path / "index"
    )
    results = index.search([queries[query_id] for query_id in relevant], 10)

    def ndcg(rows, gold):
        gain = sum(
            1 / math.log2(rank + 2)
            for rank, row in enumerate(rows)
            if row >= 0 and corpus[row]["_id"] in gold
        )
        return gain / sum(1 / math.log2(rank + 2) for rank in range(min(len(gold), 10)))

    scores = [
        ndcg(rows, gold)
        for rows, gold in zip(results.rows.tolist(), relevant.values(), strict=True)
    ]
    assert len(scores) == 300
    assert abs(sum(scores) / 300 - 0.679) < 0.005
