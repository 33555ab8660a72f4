"""`taser prepare kilt`, and how `taser evaluate` judges by KILT's pages."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from taser_jax.data import prepare_kilt as preparation
from taser_jax.data.collections import QuerySet
from taser_jax.data.kilt_options import KiltOptions
from taser_jax.data.prepare_kilt import gold_path
from taser_jax.data.questions import PrepareOptions
from taser_jax.data.readers.kilt import KiltQuery, Outputs, read_queries
from taser_jax.errors import ConfigError
from taser_jax.evaluation.kilt import (
    evaluate_pages,
    is_page_measure,
    ranked_pages,
    write_predictions,
)
from taser_jax.evaluation.metrics import Evaluation, evaluate_qrels, qrels_of
from taser_jax.pipelines.common import PassageHeads
from taser_jax.pipelines.prepare import reporting
from taser_jax.retrieval.runs import Run

prepare_kilt = reporting(preparation.prepare_kilt)


def judge_kilt(
    run: Run, queries: QuerySet, heads: PassageHeads, measures: Sequence[str]
) -> Evaluation:
    """Page measures by the official gold, others by gold passages; over all queries of the gold.

    A query whose gold names no passage of the collection counts as zero at passage level.

    Raises:
        ConfigError: the task was not prepared from KILT's files.
    """
    gold = {
        query.id: [
            None if output.provenance is None else {p.page_id for p in output.provenance}
            for output in query.outputs
        ]
        for query in _gold(queries)
    }
    values: dict[str, np.ndarray] = {}
    if by_page := [name for name in measures if is_page_measure(name)]:
        pages = ranked_pages(run, heads.pages)
        values |= evaluate_pages(pages, gold, by_page).values
    if by_passage := [name for name in measures if not is_page_measure(name)]:
        found = evaluate_qrels(run, qrels_of(queries), by_passage)
        place = {query_id: number for number, query_id in enumerate(found.query_ids)}
        for name, scores in found.values.items():
            values[name] = np.array([scores[place[id]] if id in place else 0.0 for id in gold])
    return Evaluation(tuple(gold), {name: values[name] for name in measures})


def write_kilt_predictions(
    path: pathlib.Path, run: Run, queries: QuerySet, heads: PassageHeads
) -> None:
    """Writes the run as KILT's own script reads it, beside `kilt.jsonl` as its gold."""
    write_predictions(
        path,
        run,
        inputs={query.id: query.text for query in _gold(queries)},
        pages_of=heads.pages,
        titles_of=heads.titles,
        ids=heads.store.ids,
    )


def _gold(queries: QuerySet) -> list[KiltQuery]:
    path = gold_path(queries)
    if not path.exists():
        raise ConfigError(
            f"task {queries.task!r} was not prepared from KILT's files",
            where=str(path),
            expected="the official gold of its queries",
            fix="prepare it with `taser prepare kilt`, or judge by 'qrels'",
        )
    return list(read_queries(path, outputs=Outputs.OPTIONAL))


CONFIGURABLES = (KiltOptions, PrepareOptions)
