"""KILT's page-level measures, and prediction files that KILT's own script accepts.

A query has evidence sets, one for each correct output: the set of pages that the output needs.
Passages are mapped to their pages; each page counts once, at its best rank.

    PageRprec      R = size of a set; share of the set among the first R pages; the best over the
                   sets; mean over the queries.
    PageRecall@k   each distinct set occupies one rank, that of its last page; an incomplete set
                   occupies one rank too, below, as a miss, and so does a page of no set. Number of
                   sets complete within k, over the number of distinct sets.

Source: Petroni et al., 2021, and its eval_retrieval.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.retrieval.runs import NO_ROW, Run, top_k
from taser_jax.storage.artifacts import FilePath, replacing
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger

PAGE_MEASURES = ("PageRprec", "PageRecall@5")

# The pages that each correct output needs; None for an output without evidence.
EvidenceSets = Sequence[Collection[str] | None]


def page_r_precision(pages: Sequence[str], evidence: EvidenceSets) -> float:
    """R-precision of ranked pages: the best over the evidence sets.

    Example:
        >>> page_r_precision(["2", "5", "7"], [{"1", "2"}, {"5"}])
        0.5

    Args:
        pages: best first, each once.
        evidence: one set per correct output.
    """
    sets = [frozenset(needed) for needed in evidence if needed]
    scores = [len(needed.intersection(pages[: len(needed)])) / len(needed) for needed in sets]
    return max(scores, default=0.0)


def page_recall(pages: Sequence[str], evidence: EvidenceSets, k: int) -> float:
    """Share of the distinct evidence sets that are complete within the first k ranks.

    Example:
        >>> page_recall(["2", "5", "7", "1"], [{"1", "2"}, {"5"}], 2)
        0.5

    Args:
        pages: best first, each once.
        evidence: one set per correct output.
        k: cut-off rank.
    """
    hits, sets = _rank(pages, evidence)
    return sum(hits[:k]) / sets if sets else 0.0


def ranked_pages(run: Run, pages_of: Callable[[Sequence[int]], Sequence[str]]) -> dict[str, list]:
    """Query id -> pages of its passages, best first, each once.

    Args:
        run: retrieved rows; their order comes from scores, then rows.
        pages_of: pages of rows, in their order.

    Raises:
        DataError: a passage without a page.
    """
    return {
        query_id: list(passages) for query_id, passages in _best_passages(run, pages_of).items()
    }


def evaluate_pages(
    pages: Mapping[str, Sequence[str]],
    gold: Mapping[str, EvidenceSets],
    measures: Sequence[str] = PAGE_MEASURES,
) -> Evaluation:
    """Page-level measures over all queries of the gold; a query without pages counts as zero.

    Args:
        pages: query id -> pages, best first, each once.
        gold: query id -> evidence sets.
        measures: PageRprec, PageRecall@k.

    Raises:
        ConfigError: an unknown measure.
        DataError: no gold, or no evidence.
    """
    functions = {name: _measure(name) for name in measures}
    if not any(evidence for sets in gold.values() for evidence in sets):
        problem = f"none of {len(gold)} queries has a gold page"
        fix = "evaluate a split with outputs; KILT's test sets are scored by its server"
        raise DataError(problem, where="evaluation by KILT's pages", fix=fix)
    deepest = max((int(name.partition("@")[2] or 0) for name in measures), default=0)
    if short := sum(len(pages.get(query_id, ())) < deepest for query_id in gold):
        counts = f"{short} of {len(gold)} queries have fewer than {deepest} pages"
        logger.warning("%s: retrieve more passages for a comparable recall", counts)
    values = {
        name: np.array([function(pages.get(id, ()), gold[id]) for id in gold], np.float64)
        for name, function in functions.items()
    }
    return Evaluation(tuple(gold), values)


def is_page_measure(name: str) -> bool:
    """Whether the name is that of one of this module's measures."""
    return name.startswith("Page")


def write_predictions(
    path: FilePath,
    run: Run,
    *,
    inputs: Mapping[str, str],
    pages_of: Callable[[Sequence[int]], Sequence[str]],
    titles_of: Callable[[Sequence[int]], Sequence[str]],
    ids: Sequence[str],
) -> None:
    """Writes a KILT prediction file: one line per query, in the order of `inputs`, best page first.

    A line is {id, input, output: [{provenance: [{wikipedia_id, title, passage_id, score}]}]}, with
    each page once, by its best passage. A query without results has no provenance.

    Args:
        path: the file.
        run: retrieved rows.
        inputs: query id -> text of all queries, in the order of the gold file.
        pages_of: pages of rows, in their order.
        titles_of: titles of rows, in their order.
        ids: passage id of each row.

    Raises:
        DataError: a passage without a page.
        StorageError: the file cannot be written.
    """
    best = _best_passages(run, pages_of)
    with replacing(path) as scratch, open(scratch, "w", encoding="utf-8") as file:
        for query_id, text in inputs.items():
            passages = best.get(query_id, {})
            titles = titles_of([row for row, _ in passages.values()])
            provenance = [
                {"wikipedia_id": page, "title": title, "passage_id": ids[row], "score": score}
                for (page, (row, score)), title in zip(passages.items(), titles, strict=True)
            ]
            record = {"id": query_id, "input": text, "output": [{"provenance": provenance}]}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _rank(pages: Sequence[str], evidence: EvidenceSets) -> tuple[list[bool], int]:
    """Each rank, True where an evidence set is complete, and the number of sets."""
    sets = dict.fromkeys(frozenset(needed) for needed in evidence if needed is not None)
    missing = [set(needed) for needed in sets]
    # A rank is True, False, or the number of an evidence set that is not complete yet.
    places: list[tuple[bool, int | None]] = []
    for page in pages:
        touched = [number for number, needed in enumerate(missing) if page in needed]
        for number in touched:
            if (False, number) in places:
                places.remove((False, number))
            missing[number].discard(page)
            places.append((False, number) if missing[number] else (True, None))
        if not touched:
            places.append((False, None))
    return [complete for complete, _ in places], len(sets)


def _best_passages(
    run: Run, pages_of: Callable[[Sequence[int]], Sequence[str]]
) -> dict[str, dict[str, tuple[int, float]]]:
    """Query id -> page -> its best passage's row and score, best first."""
    ranked = top_k(run.rows, run.scores, run.rows.shape[1])
    unique = np.unique(ranked.rows[ranked.rows != NO_ROW])
    page_of = dict(zip(unique.tolist(), pages_of(unique.tolist()), strict=True))
    if without := [row for row, page in page_of.items() if not page]:
        fix = "prepare the collection from files with page ids, such as KILT's"
        raise DataError(f"passage row {without[0]} has no page", where="collection", fix=fix)
    best: dict[str, dict[str, tuple[int, float]]] = {}
    for query_id, rows, scores in zip(
        run.query_ids, ranked.rows.tolist(), ranked.scores.tolist(), strict=True
    ):
        by_page = best.setdefault(query_id, {})
        for row, score in zip(rows, scores, strict=True):
            if row != NO_ROW:
                by_page.setdefault(page_of[row], (row, score))
    return best


def _measure(name: str) -> Callable[[Sequence[str], EvidenceSets], float]:
    family, at, cutoff = name.partition("@")
    if family == "PageRprec" and not at:
        return page_r_precision
    if family != "PageRecall" or not cutoff.isdecimal() or int(cutoff) < 1:
        fix = "take PageRprec or PageRecall@k"
        raise ConfigError(f"unknown measure {name!r}", where="measures", fix=fix)
    return lambda pages, evidence: page_recall(pages, evidence, int(cutoff))
