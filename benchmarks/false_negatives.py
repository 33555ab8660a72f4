"""How many mined negatives are positives that nobody labelled, and what margins leave of them.

MiniLM, untrained, retrieves for training questions of SQuAD and NQ among the first passages of both
sets; negatives are mined from its top 100 under several options:

    python benchmarks/false_negatives.py SOURCE_DIR OUTPUT_DIR PRETRAINED

SOURCE_DIR has squad/ and nq_qed/ (DPR's formats). Printed for each option: negatives, what was left
out and why, and the share of negatives that contain an answer, which a string decides. OUTPUT_DIR
gets a sample of 50 pairs for each option, for a person to judge.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from taser_jax.evaluation.metrics import AnswerMatcher
from taser_jax.retrieval.mining import (
    AnswerContaining,
    Excluded,
    MinedNegatives,
    MiningConfig,
    mine_negatives,
)
from taser_jax.retrieval.runs import SearchResult, top_k
from taser_jax.retriever import Retriever
from taser_jax.storage.records import Passage, Query

# Makes the draw of the sample independent of other draws with the same seed.
_PURPOSE = 0x5A3D
_SAMPLE_HEAD = (
    "query_id\tquery\tanswers\tpositive_score\tpositive\tnegative_score\tnegative\t"
    "is_answered_by_negative"
)
SETS = {
    "squad": ("squad/psgs_squad_dev.tsv.gz", "squad/squad_split_train.dpr.jsonl.gz"),
    "nq": ("nq_qed/psgs_nq_qed.tsv.gz", "nq_qed/nq_qed_train.dpr.jsonl.gz"),
}
# Five of the best ranked: the hardest negatives, which training sees most.
COMMON = {"depth": 100, "count": 5, "excluded": Excluded.POSITIVES}
OPTIONS = {
    "top 5": MiningConfig(**COMMON),
    "at most 95% of the positive's score": MiningConfig(**COMMON, relative_margin=0.05),
    "at most 90%": MiningConfig(**COMMON, relative_margin=0.1),
    "without an answer": MiningConfig(**COMMON, answer_containing=AnswerContaining.DROP),
    "without an answer, at most 95%": MiningConfig(
        **COMMON, answer_containing=AnswerContaining.DROP, relative_margin=0.05
    ),
}


def read(source: pathlib.Path, *, passages: int, queries: int) -> tuple[list[Passage], list[Query]]:
    """The first passages of each set, and questions spread over those whose positives they hold."""
    store: list[Passage] = []
    asked: list[Query] = []
    for name, (passage_file, question_file) in SETS.items():
        rows: dict[str, int] = {}
        with gzip.open(source / passage_file, "rt", encoding="utf-8", newline="") as file:
            for record in csv.DictReader(file, delimiter="\t"):
                if len(rows) == passages:
                    break
                rows[record["id"]] = len(store)
                store.append(
                    Passage(id=f"{name}-{record['id']}", text=record["text"], title=record["title"])
                )
        candidates: list[Query] = []
        with gzip.open(source / question_file, "rt", encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                ids = [context["passage_id"] for context in record["positive_ctxs"]]
                if ids and all(id in rows for id in ids):
                    candidates.append(
                        Query(
                            id=str(record["qid"]),
                            text=record["question"],
                            task=name,
                            positives=tuple(rows[id] for id in ids),
                            answers=tuple(record["answers"]),
                        )
                    )
        # Neighbours ask about one article.
        places = np.linspace(0, len(candidates), min(queries, len(candidates)), endpoint=False)
        asked += [candidates[int(place)] for place in places]
    return store, asked


def retrieve(
    pretrained: str, store: Sequence[Passage], queries: Sequence[Query], *, length: int
) -> SearchResult:
    """The model's top 100."""
    retriever = Retriever.from_pretrained(pretrained, passage_length=length)
    scores = (
        retriever.encode_queries([query.text for query in queries])
        @ retriever.encode_passages(store).T
    )
    rows = np.broadcast_to(np.arange(len(store)), scores.shape)
    return top_k(rows, scores, 100)


def write_sample(
    path: pathlib.Path,
    mined: MinedNegatives,
    queries: Sequence[Query],
    passage_of: Callable[[int], Passage],
    *,
    size: int,
    seed: int,
) -> None:
    """Writes pairs of query and negative, drawn uniformly from all pairs, as TSV.

    Args:
        path: the file.
        mined: the queries' negatives.
        queries: the queries, in the same order.
        passage_of: row -> passage.
        size: number of pairs; all where there are fewer.
        seed: seed of the draw.
    """
    ends = np.cumsum([len(rows) for rows in mined.rows])
    total = int(ends[-1]) if len(ends) else 0
    rng = np.random.default_rng([_PURPOSE, seed])
    lines = [_SAMPLE_HEAD]
    for pair in np.sort(rng.choice(total, min(size, total), replace=False)).tolist():
        line = int(np.searchsorted(ends, pair, side="right"))
        place = pair - int(ends[line])
        query = queries[line]
        gold = _one_line(passage_of(query.positives[0])) if query.positives else ""
        fields = (
            query.id,
            query.text,
            " | ".join(query.answers),
            f"{mined.positive_scores[line]:.6g}",
            gold,
            f"{mined.scores[line][place]:.6g}",
            _one_line(passage_of(mined.rows[line][place])),
            "",
        )
        lines.append("\t".join(" ".join(field.split()) for field in fields))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _one_line(passage: Passage) -> str:
    return f"{passage.title}: {passage.text}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source_dir", type=pathlib.Path)
    parser.add_argument("output_dir", type=pathlib.Path)
    parser.add_argument("pretrained", help="all-MiniLM-L6-v2 in Hugging Face's layout")
    parser.add_argument("--passages", type=int, default=1500, help="of each set")
    parser.add_argument("--queries", type=int, default=300, help="of each set")
    parser.add_argument("--length", type=int, default=128, help="tokens of a passage")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    store, queries = read(options.source_dir, passages=options.passages, queries=options.queries)
    result = retrieve(options.pretrained, store, queries, length=options.length)
    answers = [query.answers for query in queries]
    matcher = AnswerMatcher(lambda rows: [store[row].text for row in rows])
    for number, (name, config) in enumerate(OPTIONS.items()):
        mined = mine_negatives(
            result,
            [query.positives for query in queries],
            config=config,
            contains_answer=lambda asked, rows: matcher.hits(
                rows, [answers[query] for query in asked]
            ),
        )
        padded = np.full((len(queries), config.count), -1)
        for query, rows in enumerate(mined.rows):
            padded[query, : len(rows)] = rows
        hits = matcher.hits(padded, answers)
        answered = hits.sum() / max(mined.statistics.negatives, 1)
        print(f"{name}: {100 * answered:.1f}% contain an answer; {mined.statistics}")
        path = options.output_dir / f"sample-{number}.tsv"
        write_sample(path, mined, queries, store.__getitem__, size=50, seed=0)
    print(
        f"{len(store):,} passages, {len(queries):,} questions, {time.monotonic() - began:.0f} s; "
        f"samples of 50 in {options.output_dir}/sample-*.tsv, in this order"
    )


if __name__ == "__main__":
    main()
