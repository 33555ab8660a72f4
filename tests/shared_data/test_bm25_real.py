"""BM25 on SciFact: nDCG@10 beside Anserini's published 0.679 (flat, k1 0.9, b 0.4)."""

import json
import math

import pytest
from read_by_hand import lines

from taser_jax.retrieval.bm25 import Bm25Index


def test_scifact_ndcg(shared_data, tmp_path):
    folder = shared_data / "beir" / "scifact"
    corpus = [json.loads(line) for line in lines(folder / "corpus.jsonl.gz")]
    queries = map(json.loads, lines(folder / "queries.jsonl.gz"))
    texts = {record["_id"]: record["text"] for record in queries}
    relevant: dict[str, set[str]] = {}
    for line in lines(folder / "qrels/test.tsv.gz")[1:]:
        query_id, passage_id, _ = line.split()
        relevant.setdefault(query_id, set()).add(passage_id)
    passages = (f"{record['title']} {record['text']}" for record in corpus)
    index = Bm25Index.build(passages, tmp_path / "index")
    results = index.search([texts[query_id] for query_id in relevant], 10)

    def ndcg(rows, gold):
        gain = sum(
            1 / math.log2(rank + 2)
            for rank, row in enumerate(rows)
            if row >= 0 and corpus[row]["_id"] in gold
        )
        return gain / sum(1 / math.log2(rank + 2) for rank in range(min(len(gold), 10)))

    scores = list(map(ndcg, results.rows.tolist(), relevant.values()))
    assert len(scores) == 300
    assert sum(scores) / 300 == pytest.approx(0.679, abs=0.005)
