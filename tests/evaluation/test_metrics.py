"""Metrics on hand-made runs, against float64 formulas, and under changes that must not matter."""

import numpy as np
import pytest

from taser_jax.evaluation import metrics
from taser_jax.retrieval.runs import Run
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Query

ALL = ("R@1", "R@2", "Recall@2", "MRR@2", "MRR", "nDCG@2", "P@2", "MAP")


def make_run(query_ids, rows, scores):
    return Run(query_ids, np.array(rows, np.int32), np.array(scores, np.float32))


ONE = make_run(["a"], [[1]], [[1]])


def test_golden():
    # a ranks 3, 1, 2 (grades 0, 2, 1); b finds nothing; c is not in the run; x is not judged.
    run = make_run(
        ["x", "b", "a"],
        [[9, 1, 2], [-1, -1, -1], [2, 3, 1]],
        [[3, 2, 1], [-np.inf] * 3, [0.1, 0.9, 0.5]],
    )
    qrels = {"a": {1: 2, 2: 1, 3: 0}, "b": {1: 1}, "c": {5: 1}}
    evaluation = metrics.evaluate_qrels(run, qrels, ALL)
    assert evaluation.query_ids == ("a", "b", "c")
    ndcg = (2 / np.log2(3)) / (2 + 1 / np.log2(3))
    expected = [0, 1, 1 / 2, 1 / 2, 1 / 2, ndcg, 1 / 2, (1 / 2 + 2 / 3) / 2]
    for name, value in zip(ALL, expected, strict=True):
        np.testing.assert_allclose(evaluation.values[name], [value, 0, 0], atol=1e-12)
        assert evaluation.averages()[name] == pytest.approx(value / 3)


def oracle(rows, scores, grades, cutoff):
    """R, Recall, MRR, nDCG at a cutoff and MAP of one query, straight from the formulas."""
    order = sorted((row for row in rows if row >= 0), key=lambda r: (-scores[rows.index(r)], r))
    gains = np.array([grades.get(row, 0) for row in order], float)
    top = gains[:cutoff]
    relevant = sum(grade > 0 for grade in grades.values())
    discount = np.log2(np.arange(2, 2 + max(len(order), len(grades), cutoff)))
    ideal = np.sort(list(grades.values()))[::-1][:cutoff]
    best = (ideal / discount[: len(ideal)]).sum()
    ranks = np.flatnonzero(gains > 0) + 1
    precisions = [(ranks <= rank).sum() / rank for rank in ranks]
    return {
        f"R@{cutoff}": float((top > 0).any()),
        f"Recall@{cutoff}": (top > 0).sum() / relevant,
        f"MRR@{cutoff}": 1 / ranks[0] if len(ranks) and ranks[0] <= cutoff else 0.0,
        f"nDCG@{cutoff}": (top / discount[: len(top)]).sum() / best,
        "MAP": sum(precisions) / relevant,
    }


def random_case(seed, queries=40, depth=12):
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(30)[:depth] for _ in range(queries)]).astype(np.int32)
    # Few distinct scores, so that most lists have ties; some lists are short.
    scores = rng.integers(0, 5, rows.shape).astype(np.float32)
    missing = np.arange(depth) >= rng.integers(0, depth + 1, (queries, 1))
    rows[missing], scores[missing] = -1, -np.inf
    qrels = {
        f"q{query}": {
            int(row): int(grade)
            for row, grade in zip(rng.permutation(30)[:4], [*rng.integers(0, 4, 3), 1], strict=True)
        }
        for query in range(queries)
    }
    return Run([f"q{query}" for query in range(queries)], rows, scores), qrels


@pytest.mark.parametrize("cutoff", [1, 5, 10])
def test_equals_the_formulas(cutoff):
    run, qrels = random_case(seed=cutoff)
    measures = [f"{family}@{cutoff}" for family in ("R", "Recall", "MRR", "nDCG")] + ["MAP"]
    evaluation = metrics.evaluate_qrels(run, qrels, measures)
    for index, query_id in enumerate(run.query_ids):
        found = (run.rows[index].tolist(), run.scores[index].tolist())
        values = {name: values[index] for name, values in evaluation.values.items()}
        assert values == pytest.approx(oracle(*found, qrels[query_id], cutoff)), query_id
    assert 0 < evaluation.averages()[f"R@{cutoff}"] < 1


def test_order_of_candidates_and_queries_blocks_and_padding_do_not_matter(monkeypatch):
    run, qrels = random_case(seed=0)
    expected = metrics.evaluate_qrels(run, qrels).averages()
    rng = np.random.default_rng(1)
    queries, columns = rng.permutation(40), rng.permutation(12)
    shuffled = Run(
        [run.query_ids[query] for query in queries],
        np.pad(run.rows[queries][:, columns], ((0, 0), (3, 0)), constant_values=-1),
        np.pad(run.scores[queries][:, columns], ((0, 0), (3, 0)), constant_values=-np.inf),
    )
    monkeypatch.setattr("taser_jax.evaluation.metrics._BLOCK", 7)
    assert metrics.evaluate_qrels(shuffled, qrels).averages() == pytest.approx(expected)


def test_answers_golden():
    texts = ["Paris is big", "London", "Rome and Paris", "Bern"]
    matcher = metrics.AnswerMatcher(lambda rows: [texts[row] for row in rows])
    # a: rows ranked 1, 2, 0, so the first hit is at 2; b: none; d: absent from the run.
    run = make_run(["b", "a"], [[0, 1, 3], [0, 1, 2]], [[3, 2, 1], [1, 3, 2]])
    answers = {"a": ("Paris",), "b": ("Oslo", "Kiev"), "d": ("Bern",), "e": ()}
    evaluation = metrics.evaluate_answers(run, answers, matcher, ("R@1", "R@2", "MRR@3"))
    assert evaluation.query_ids == ("a", "b", "d", "e")
    assert evaluation.averages() == {"R@1": 0, "R@2": 1 / 4, "MRR@3": 1 / 8}


def test_hits_deeper_than_the_run(caplog):
    values = metrics.hit_measures(np.array([[False, True]]), ["R@1", "R@5", "MRR@5", "MRR@1"])
    assert {name: value.item() for name, value in values.items()} == {
        "R@1": 0, "R@5": 1, "MRR@5": 0.5, "MRR@1": 0,
    }  # fmt: skip
    assert metrics.hit_measures(np.zeros((2, 0), bool), ["R@1"])["R@1"].tolist() == [0, 0]
    metrics.evaluate_qrels(ONE, {"a": {1: 1}}, ["R@5"])
    assert "needs 5 results, but the run has 1 per query" in caplog.text


def test_macro_and_micro():
    groups = [
        metrics.Evaluation(("a", "b", "c"), {"R@20": np.array([1.0, 1.0, 0.0])}),
        metrics.Evaluation(("d",), {"R@20": np.array([0.0])}),
        metrics.Evaluation(("e",), {"R@5": np.array([1.0])}),
    ]
    assert metrics.group_averages(groups, "R@20") == (pytest.approx(1 / 3), pytest.approx(1 / 2))


def test_qrels_of_queries():
    queries = [
        Query("a", "?", "t", positives=(3, 1)),
        Query("b", "?", "t"),
        Query("c", "?", "t", positives=(2, 4), relevance=(2, 1)),
    ]
    assert metrics.qrels_of(queries) == {"a": {3: 1, 1: 1}, "c": {2: 2, 4: 1}}
    with pytest.raises(DataError, match=r"task 't': no query has a positive"):
        metrics.qrels_of([queries[1]])


@pytest.mark.parametrize(
    "name", ["R", "R@0", "R@", "R@x", "R@05", "recall_5", "NDCG@10", "R@-1", "P", "Rprec@5"]
)
def test_unknown_measures_are_refused(name):
    with pytest.raises(ConfigError, match=f"measure '{name}'"):
        metrics.evaluate_qrels(ONE, {"a": {1: 1}}, [name])


def test_what_cannot_be_evaluated_is_refused():
    matcher = metrics.AnswerMatcher(lambda rows: ["text" for _ in rows])
    with pytest.raises(DataError, match="none of the 1 queries"):
        metrics.evaluate_qrels(ONE, {"b": {1: 1}})
    with pytest.raises(DataError, match="none of the 0 queries"):
        metrics.evaluate_qrels(ONE, {})
    with pytest.raises(DataError, match="no question has an answer"):
        metrics.evaluate_answers(ONE, {"a": ()}, matcher)
    with pytest.raises(ConfigError, match="measure 'nDCG@10'"):
        metrics.evaluate_answers(ONE, {"a": ("text",)}, matcher, ["nDCG@10"])
