import json
import random

import numpy as np
import pytest

from taser_jax.evaluation.kilt import (
    evaluate_pages,
    page_r_precision,
    page_recall,
    ranked_pages,
    write_predictions,
)
from taser_jax.retrieval.runs import Run
from taser_jax.storage.errors import ConfigError, DataError

# KILT's own test of its ranking measures.
GOLD = [{"1", "2"}, {"5"}, {"7", "9", "11"}]
GUESS = ["2", "5", "7", "33", "1", "9", "44", "88"]


def test_kilts_own_vector():
    assert page_r_precision(GUESS, GOLD) == 0.5
    assert page_recall(GUESS, GOLD, 5) == pytest.approx(2 / 3)
    evaluation = evaluate_pages({"q": GUESS}, {"q": GOLD}, ["PageRprec", "PageRecall@5"])
    assert evaluation.averages() == {"PageRprec": 0.5, "PageRecall@5": pytest.approx(2 / 3)}


def test_places_of_partial_sets_by_hand():
    # 1 waits for 2: places are 9 (no), {1,2} at 2, 8 (no). Complete at place 2.
    pages, gold = ["1", "9", "2", "8"], [{"1", "2"}]
    assert [page_recall(pages, gold, k) for k in (1, 2, 3)] == [0.0, 1.0, 1.0]
    # A set that is never complete holds one place: 7 is at place 2.
    assert [page_recall(["1", "7"], [{"1", "2"}, {"7"}], k) for k in (1, 2)] == [0.0, 0.5]
    # One page that completes two sets is two places.
    assert page_recall(["2", "1"], [{"1", "2"}, {"1"}], 2) == 1.0
    # Evidence that is an empty list counts as a set; an output without the field does not.
    assert page_recall(["1"], [{"1"}, set()], 5) == 0.5
    assert page_recall(["1"], [{"1"}, None], 5) == 1.0
    assert page_recall(["1"], [None], 5) == page_r_precision(["1"], [None, set()]) == 0.0
    assert page_r_precision([], GOLD) == page_recall([], GOLD, 5) == 0.0


def _oracle_places(pages: list[str], gold: list[set[str] | None]) -> tuple[list[bool], int]:
    """The final rank, in closed form: a set stands where its last retrieved page stands."""
    sets = list({frozenset(page_set): None for page_set in gold if page_set is not None})
    events = [
        (i, -1, False) for i, p in enumerate(pages) if not any(p in page_set for page_set in sets)
    ]
    for number, page_set in enumerate(sets):
        if places := [pages.index(p) for p in page_set if p in pages]:
            events.append((max(places), number, len(places) == len(page_set)))
    return [complete for _, _, complete in sorted(events)], len(sets)


def _oracle_r_precision(pages: list[str], gold: list[set[str] | None]) -> float:
    scores = [0.0]
    for page_set in gold:
        if page_set:
            hits = np.isin(np.array(pages[: len(page_set)], str), sorted(page_set))
            scores.append(float(hits.astype(np.float64).sum() / np.float64(len(page_set))))
    return max(scores)


def test_against_closed_forms_on_random_rankings():
    rng = random.Random(0)
    for _ in range(400):
        pages = [str(page) for page in rng.sample(range(9), rng.randrange(10))]
        gold: list[set[str] | None] = [
            set(map(str, rng.sample(range(9), rng.randrange(4)))) if rng.random() < 0.9 else None
            for _ in range(rng.randrange(1, 5))
        ]
        places, sets = _oracle_places(pages, gold)
        assert page_r_precision(pages, gold) == pytest.approx(_oracle_r_precision(pages, gold))
        for k in (1, 2, 5, 20):
            recall = sum(places[:k]) / sets if sets else 0.0
            assert page_recall(pages, gold, k) == pytest.approx(recall), (pages, gold, k)
        shuffled = rng.sample(gold, len(gold))
        assert page_r_precision(pages, shuffled) == page_r_precision(pages, gold)


# Row -> page.
PAGES = ["7", "7", "8", "9", ""]


def _pages_of(rows):
    return [PAGES[row] for row in rows]


def _run(*lines: list[tuple[int, float]]) -> Run:
    depth = max(map(len, lines))
    rows = np.full((len(lines), depth), -1, np.int32)
    scores = np.full((len(lines), depth), -np.inf, np.float32)
    for i, line in enumerate(lines):
        for j, (row, score) in enumerate(line):
            rows[i, j], scores[i, j] = row, score
    return Run([f"q{i}" for i in range(len(lines))], rows, scores)


def test_passages_count_as_their_pages_at_their_best_rank():
    run = _run([(2, 1.0), (1, 3.0), (0, 2.0)], [])
    assert ranked_pages(run, _pages_of) == {"q0": ["7", "8"], "q1": []}
    # More passages of a page change nothing, nor does the order of the columns.
    again = _run([(0, 3.5), (1, 3.0), (2, 1.0)], [])
    assert ranked_pages(again, _pages_of) == ranked_pages(run, _pages_of)
    with pytest.raises(DataError, match="row 4 has no page"):
        ranked_pages(_run([(4, 1.0)]), _pages_of)


def test_queries_without_results_count_as_zero(caplog):
    evaluation = evaluate_pages({"q0": ["7"]}, {"q0": [{"7"}], "q1": [{"8"}], "q2": [None]})
    assert evaluation.query_ids == ("q0", "q1", "q2")
    assert evaluation.values["PageRprec"].tolist() == [1.0, 0.0, 0.0]
    assert "3 of 3 queries have fewer than 5 pages" in caplog.text


def test_what_cannot_be_evaluated():
    with pytest.raises(DataError, match="none of 1 queries has a gold page"):
        evaluate_pages({"q": ["1"]}, {"q": [set(), None]})
    for name in ("PageRprec@3", "PageRecall", "PageRecall@0", "PageMRR@5", "Rprec"):
        with pytest.raises(ConfigError, match=name):
            evaluate_pages({"q": ["1"]}, {"q": [{"1"}]}, [name])


def _write(path, run: Run, inputs: dict[str, str]):
    write_predictions(
        path,
        run,
        inputs=inputs,
        pages_of=_pages_of,
        titles_of=lambda rows: [f"title {row}" for row in rows],
        ids=[f"p{row}" for row in range(5)],
    )
    return path


def test_prediction_files_are_what_kilts_script_accepts(tmp_path):
    run = _run([(2, 1.0), (1, 3.0), (0, 2.0)], [], [(3, 1.0)])
    inputs = {"q2": "two?", "q0": "zero?", "q1": "one?"}
    path = _write(tmp_path / "guess.jsonl", run, inputs)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    # What kilt_utils.validate_datapoint and eval_retrieval.py look at.
    assert [record["id"] for record in records] == list(inputs)
    for record in records:
        assert isinstance(record["input"], str)
        assert len(record["output"]) == 1
        for provenance in record["output"][0]["provenance"]:
            assert isinstance(provenance["wikipedia_id"], str)
            assert isinstance(provenance["title"], str)
    assert records[1]["output"][0]["provenance"] == [
        {"wikipedia_id": "7", "title": "title 1", "passage_id": "p1", "score": 3.0},
        {"wikipedia_id": "8", "title": "title 2", "passage_id": "p2", "score": 1.0},
    ]
    pages = [[p["wikipedia_id"] for p in r["output"][0]["provenance"]] for r in records]
    assert pages == [["9"], ["7", "8"], []]
