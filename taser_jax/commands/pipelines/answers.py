"""Questions answered by the best dense row of a finished comparison."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

from taser_jax.assembly.retriever_parts import RetrieverParts, write_parts
from taser_jax.commands.ask import ask
from taser_jax.commands.pipelines.setting import BM25, row_name
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.storage.artifacts import file_name


def best_dense_row(
    table: ResultsTable,
    root: pathlib.Path,
    *,
    systems: Iterable[str],
    untrained: Iterable[str],
    first_negatives: Sequence[str] = (BM25,),
    rounds: int,
) -> tuple[str, pathlib.Path]:
    """The row of one encoder with the highest mean over tasks, by the table's last measure.

    Args:
        table: the table of `pipeline_taser`.
        root: the pipeline's folder.
        systems: names of the trained systems.
        untrained: names of the untrained ones.
        first_negatives: rows that round 1's hard negatives were mined with.
        rounds: number of rounds.

    Returns:
        The row's name and its folder.
    """
    folders = {name: file_name(name) for name in untrained} | {
        row_name(name, number, first_negatives): f"{file_name(name)}-{number}"
        for name in systems
        for number in range(1, rounds + 1)
    }
    means = {
        row.system: table.mean(row, table.measures[-1])
        for row in table.results
        if row.system in folders
    }
    best = max(means, key=lambda row: means[row] or 0.0)
    return best, root / folders[best]


def answer(
    questions: Sequence[str],
    *,
    root: pathlib.Path,
    folder: pathlib.Path,
    data_dir: str,
    collection: str,
    task: str | None = None,
) -> RetrieverParts:
    """Prints what a row's model finds, and leaves a retriever.json for `Retriever.load`.

    Args:
        questions: questions as typed.
        root: where retriever.json goes.
        folder: the row's folder.
        data_dir: folder of collections.
        collection: the collection.
        task: task whose prompt and length are used; None where tasks do not differ.
    """
    parts = RetrieverParts(
        model_dir=str(folder / "model"),
        index_dir=str(folder / "index"),
        data_dir=data_dir,
        collection=collection,
    )
    ask(questions=questions, task=task, **dataclasses.asdict(parts))
    write_parts(root, parts)
    return parts
