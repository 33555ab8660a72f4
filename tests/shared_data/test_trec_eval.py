"""Metrics equal the outputs that trec_eval ships for its own test runs, to all four digits."""

import pytest
from read_by_hand import lines

from taser_jax.data.readers.questions import read_qrels
from taser_jax.evaluation.metrics import evaluate_qrels
from taser_jax.retrieval.runs import Run, read_trec_run

CUTOFFS = (5, 10, 20, 100, 1000)
# Our name -> trec_eval's.
MEASURES = (
    {"MAP": "map", "MRR": "recip_rank", "nDCG": "ndcg"}
    | {f"P@{k}": f"P_{k}" for k in CUTOFFS}
    | {f"Recall@{k}": f"recall_{k}" for k in CUTOFFS}
    | {f"MAP@{k}": f"map_cut_{k}" for k in CUTOFFS}
    | {f"nDCG@{k}": f"ndcg_cut_{k}" for k in CUTOFFS}
    | {f"R@{k}": f"success_{k}" for k in (1, 5, 10)}
)


# nDCG counts grades whatever the level of relevance that trec_eval -l sets for the others.
GRADED = {ours: theirs for ours, theirs in MEASURES.items() if ours.startswith("nDCG")}
OFFICIAL = {
    ours: theirs
    for ours, theirs in MEASURES.items()
    if theirs in ("map", "recip_rank") or theirs.startswith("P_")
}


def rows(path):
    return [line.split() for line in lines(path)]


def evaluate(directory, scratch, *, run, qrels, depth, measures):
    """trec_eval breaks ties by passage id, last first: rows in that order make it our rule too."""
    ids = {line[2] for line in rows(directory / run) + rows(directory / qrels)}
    row_of = {id: row for row, id in enumerate(sorted(ids, reverse=True))}.__getitem__
    # results.trunc carries columns of another program behind the six.
    six_columns = scratch / "run.trec"
    six_columns.write_text("".join(" ".join(line[:6]) + "\n" for line in rows(directory / run)))
    retrieved = read_trec_run(six_columns, row_of)
    retrieved = Run(retrieved.query_ids, retrieved.rows[:, :depth], retrieved.scores[:, :depth])
    judged = {}
    for judgement in read_qrels(directory / qrels):
        row = row_of(judgement.passage_id)
        judged.setdefault(judgement.query_id, {})[row] = judgement.relevance
    return evaluate_qrels(retrieved, judged, tuple(measures))


@pytest.mark.parametrize(
    ("run", "qrels", "depth", "output", "measures"),
    [
        ("results.test.gz", "qrels.test.gz", 1000, "out.test.gz", OFFICIAL),
        ("results.test.gz", "qrels.test.gz", 1000, "out.test.a.gz", MEASURES),
        ("results.test.gz", "qrels.test.gz", 1000, "out.test.aq.gz", MEASURES),
        # -c: query 302 is missing from the run and counts as zero. -M100: the first 100 only.
        ("results.trunc.gz", "qrels.test.gz", 1000, "out.test.aqc.gz", MEASURES),
        ("results.trunc.gz", "qrels.test.gz", 100, "out.test.aqcM.gz", MEASURES),
        # Grades from -1 to 4.
        ("results.test.gz", "qrels.rel_level.gz", 1000, "out.test.aql.gz", GRADED),
    ],
)
def test_equals_trec_eval(shared_data, tmp_path, run, qrels, depth, output, measures):
    directory = shared_data / "metrics" / "trec_eval_tests"
    evaluation = evaluate(directory, tmp_path, run=run, qrels=qrels, depth=depth, measures=measures)
    expected = {(line[0], line[1]): line[2] for line in rows(directory / output) if len(line) == 3}
    compared = set()
    for ours, theirs in measures.items():
        per_query = zip(evaluation.query_ids, evaluation.values[ours], strict=True)
        for query_id, value in [*per_query, ("all", evaluation.averages()[ours])]:
            if (theirs, query_id) in expected:
                assert f"{value:.4f}" == expected[theirs, query_id], (theirs, query_id)
                compared.add(theirs)
    assert compared == set(measures.values())
