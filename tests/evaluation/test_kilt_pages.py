import json
import random

import numpy as np
import pytest

from taser_jax.evaluation import kilt
from taser_jax.retrieval.runs import Run
from taser_jax.storage.errors import ConfigError, DataError

# KILT's own test of its ranking measures.
GOLD = [{"1", "2"}, {"5"}, {"7", "9", "11"}]
GUESS = ["2", "5", "7", "33", "1", "9", "44", "88"]


def test_kilts_own_vector():
    assert kilt.page_r_precision(GUESS, GOLD) == 0.5
    assert kilt.page_recall(GUESS, GOLD, 5) == pytest.approx(2 / 3)
    evaluation = kilt.evaluate_pages({"q": GUESS}, {"q": GOLD}, ["PageRprec", "PageRecall@5"])
    assert evaluation.averages() == {"PageRprec": 0.5, "PageRecall@5": pytest.approx(2 / 3)}


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
        assert kilt.page_r_precision(pages, gold) == pytest.approx(_oracle_r_precision(pages, gold))
        for k in (1, 2, 5, 20):
            recall = sum(places[:k]) / sets if sets else 0.0
            assert kilt.page_recall(pages, gold, k) == pytest.approx(recall), (pages, gold, k)
        shuffled = rng.sample(gold, len(gold))
        assert kilt.page_r_precision(pages, shuffled) == kilt.page_r_precision(pages, gold)


# Row -> page.
PAGES = ["7", "7", "8", "9", ""]


def _pages_of(rows):
    return [PAGES[row] for row in rows]


def _run(rows, scores):
    return Run(["q0", "q1", "q2"], np.array(rows, np.int32), np.array(scores, np.float32))


NONE = -np.inf
RUN = _run([[2, 1, 0], [-1, -1, -1], [3, -1, -1]], [[1, 3, 2], [NONE] * 3, [1, NONE, NONE]])


def test_passages_count_as_their_pages_at_their_best_rank():
    expected = {"q0": ["7", "8"], "q1": [], "q2": ["9"]}
    assert kilt.ranked_pages(RUN, _pages_of) == expected
    # More passages of a page change nothing, nor does the order of the columns.
    again = _run([[0, 1, 2], [-1, -1, -1], [-1, 3, -1]], [[3.5, 3, 1], [NONE] * 3, [NONE, 1, NONE]])
    assert kilt.ranked_pages(again, _pages_of) == expected
    with pytest.raises(DataError, match="row 4 has no page"):
        kilt.ranked_pages(_run([[-1], [4], [-1]], [[NONE], [1], [NONE]]), _pages_of)


def test_queries_without_results_count_as_zero(caplog):
    evaluation = kilt.evaluate_pages({"q0": ["7"]}, {"q0": [{"7"}], "q1": [{"8"}], "q2": [None]})
    assert evaluation.query_ids == ("q0", "q1", "q2")
    assert evaluation.values["PageRprec"].tolist() == [1.0, 0.0, 0.0]
    assert "3 of 3 queries have fewer than 5 pages" in caplog.text


def test_what_cannot_be_evaluated():
    with pytest.raises(DataError, match="none of 1 queries has a gold page"):
        kilt.evaluate_pages({"q": ["1"]}, {"q": [set(), None]})
    for name in ("PageRprec@3", "PageRecall", "PageRecall@0", "PageMRR@5", "Rprec"):
        with pytest.raises(ConfigError, match=name):
            kilt.evaluate_pages({"q": ["1"]}, {"q": [{"1"}]}, [name])


def test_prediction_files_are_what_kilts_script_accepts(tmp_path):
    """kilt_utils.validate_datapoint and eval_retrieval.py look at all of it but for passages."""
    kilt.write_predictions(
        tmp_path / "guess.jsonl",
        RUN,
        inputs={"q2": "two?", "q0": "zero?", "q1": "one?"},
        pages_of=_pages_of,
        titles_of=lambda rows: [f"title {row}" for row in rows],
        ids=[f"p{row}" for row in range(5)],
    )
    seven = {"wikipedia_id": "7", "title": "title 1", "passage_id": "p1", "score": 3.0}
    eight = {"wikipedia_id": "8", "title": "title 2", "passage_id": "p2", "score": 1.0}
    nine = {"wikipedia_id": "9", "title": "title 3", "passage_id": "p3", "score": 1.0}
    lines = (tmp_path / "guess.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "q2", "input": "two?", "output": [{"provenance": [nine]}]},
        {"id": "q0", "input": "zero?", "output": [{"provenance": [seven, eight]}]},
        {"id": "q1", "input": "one?", "output": [{"provenance": []}]},
    ]
