"""Runs: order and duplicates by hand and by a plain-Python oracle; files that read back equal."""

import gzip

import numpy as np
import pytest

from taser_jax.retrieval import runs
from taser_jax.storage.errors import DataError

IDS = [f"p{row}" for row in range(1000)]
ROW_OF = {id: row for row, id in enumerate(IDS)}.__getitem__


def result(rows, scores):
    return runs.SearchResult(np.array(rows, np.int32), np.array(scores, np.float32))


def ranked(hits, line):
    return list(zip(hits.rows[line].tolist(), hits.scores[line].tolist(), strict=True))


def test_top_k_by_hand():
    nan, inf = np.nan, np.inf
    rows = np.array([[7, 4, 2, 7, -1], [3, 3, -1, -1, 0]])
    scores = np.array([[1.0, 3.0, 3.0, 2.0, 9.0], [nan, -inf, 1.0, 2.0, -1.0]])
    best = runs.top_k(rows, scores, 4)
    assert best.rows.tolist() == [[2, 4, 7, -1], [0, -1, -1, -1]]
    assert best.scores.tolist() == [[3.0, 3.0, 2.0, -inf], [-1.0, -inf, -inf, -inf]]
    assert best.rows.dtype == np.int32
    assert best.scores.dtype == np.float32


def test_merge_equals_plain_python_and_ignores_order_of_lists():
    rng = np.random.default_rng(0)
    results = [result(rng.integers(-1, 12, (20, 9)), rng.integers(0, 4, (20, 9))) for _ in range(3)]
    merged = runs.merge(results, 7)
    for line in range(20):
        best = {}
        for hits in results:
            for row, score in ranked(hits, line):
                best[row] = max(score, best.get(row, -np.inf))
        best.pop(-1, None)
        expected = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:7]
        assert ranked(merged, line) == expected + [(-1, -np.inf)] * (7 - len(expected))
    np.testing.assert_array_equal(merged.rows, runs.merge(results[::-1], 7).rows)


def test_a_query_without_its_own_row_keeps_as_many_results():
    scores = [[3, 2, 1], [3, 2, 1], [1, -np.inf, -np.inf]]
    found = result([[7, 4, 2], [5, 3, 1], [6, -1, -1]], scores)
    hits = runs.without_own(found, np.array([4, -1, 6], np.int32), 2)
    assert hits.rows.tolist() == [[7, 2], [5, 3], [-1, -1]]
    assert hits.scores.tolist() == [[3, 1], [3, 2], [-np.inf, -np.inf]]


@pytest.mark.parametrize("name", ["run.trec", "run.trec.gz"])
def test_scores_read_back_bit_for_bit(tmp_path, name):
    """Also of a file that was compressed since."""
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 2**32, (40, 50), dtype=np.uint32).view(np.float32)
    scores[~np.isfinite(scores)] = 1.0
    rows = np.stack([rng.permutation(1000)[:50] for _ in range(40)])
    run = runs.Run.of([f"q{i}" for i in range(40)], runs.top_k(rows, scores, 50))
    runs.write_trec_run(tmp_path / "run.trec", run, ids=IDS, tag="test")
    with gzip.open(tmp_path / "run.trec.gz", "wb") as file:
        file.write((tmp_path / "run.trec").read_bytes())
    back = runs.read_trec_run(tmp_path / name, ROW_OF)
    assert back.query_ids == run.query_ids
    np.testing.assert_array_equal(back.rows, run.rows)
    np.testing.assert_array_equal(back.scores.view(np.uint32), run.scores.view(np.uint32))


def test_missing_results_are_not_written(tmp_path):
    path = tmp_path / "run"
    run = runs.Run.of(["a", "b"], result([[3, -1], [-1, -1]], [[0.1, -np.inf], [-np.inf, -np.inf]]))
    runs.write_trec_run(path, run, ids=IDS)
    assert path.read_text() == "a Q0 p3 1 0.1 taser\n"
    back = runs.read_trec_run(path, ROW_OF, query_ids=["b", "a"])
    assert (back.query_ids, back.rows.tolist()) == (["b", "a"], [[-1], [3]])
    with pytest.raises(DataError, match="run:1: query 'a'"):
        runs.read_trec_run(path, ROW_OF, query_ids=["b"])
    # BM25 finds nothing for queries in another language.
    nothing = runs.Run.of(["a"], result([[-1]], [[-np.inf]]))
    runs.write_trec_run(path, nothing, ids=IDS)
    assert runs.read_trec_run(path, ROW_OF, query_ids=["b", "a"]).rows.shape == (2, 0)
    with pytest.raises(DataError, match="the file is empty"):
        runs.read_trec_run(path, ROW_OF)


def test_order_is_by_score_then_row_whatever_the_ranks_say(tmp_path):
    (tmp_path / "run").write_text("q Q0 p9 1 1.0 t\nq Q0 p2 2 1.0 t\nq\tQ0\tp5 3 2.5 t\n")
    assert runs.read_trec_run(tmp_path / "run", ROW_OF).rows.tolist() == [[5, 2, 9]]


def test_of_two_ids_of_a_row_the_best_score_counts(tmp_path):
    """Equal passages of another tool's collection, which are one here."""
    (tmp_path / "run").write_text("q Q0 p9 1 1.0 t\nq Q0 p2 2 0.5 t\nq Q0 twin 3 2.5 t\n")
    run = runs.read_trec_run(tmp_path / "run", {"p9": 9, "p2": 2, "twin": 2}.__getitem__)
    assert (run.rows.tolist(), run.scores[0, :2].tolist()) == ([[2, 9, -1]], [2.5, 1.0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 p1 2 1.0", "5 columns"),
        ("q Q0 p1 2 nan t", "score 'nan'"),
        # Beyond float32, in which scores are kept: all of these would tie, or drop out.
        ("q Q0 p1 2 1e39 t", "score '1e39'"),
        ("q Q0 p1 2 -1e39 t", "score '-1e39'"),
        ("q Q0 nowhere 2 1.0 t", "passage 'nowhere' is not in this collection"),
        ("q Q0 p0 2 1.0 t", "passage 'p0' twice for query 'q'"),
    ],
)
def test_malformed_run_line_is_named(tmp_path, line, message):
    path = tmp_path / "run"
    path.write_text(f"q Q0 p0 1 2.0 t\n{line}\n")
    with pytest.raises(DataError, match=rf"run:2: {message}"):
        runs.read_trec_run(path, ROW_OF)
