"""`taser quickstart`: from nothing to a table, on the built-in collection."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.commands.pipelines.retrieval_stages import BM25, Setting, System, row_name
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.commands.pipelines.taser import answer, pipeline_taser
from taser_jax.commands.prepare import prepare_pydocs
from taser_jax.commands.tokenize import make_vocabulary, tokenize
from taser_jax.devices.hosts import writes
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.interop.hub import fetch
from taser_jax.storage.artifacts import file_name

COLLECTION = "pydocs"


@writes("{setting.output_dir}", kinds=[])
def quickstart(
    *,
    setting: Setting,
    systems: Mapping[str, System],
    hybrid_systems: Sequence[str],
    questions: Sequence[str],
    untrained_systems: Mapping[str, System] | None = None,
    first_negatives: Sequence[str] = (BM25,),
    rounds: int = 2,
    vocabulary: str | None = None,
    vocabulary_size: int = 8192,
    query_length: int = 32,
    passage_length: int = 64,
    train_queries: int | None = None,
    config_text: str = "",
) -> ResultsTable:
    """Builds pydocs, trains and compares systems on all its tasks, and answers three questions.

    Args:
        setting: what the stages share; data and tokens are made where it says.
        systems: row name -> model.
        hybrid_systems: systems also shown with BM25 added.
        questions: questions that the best dense row answers at the end.
        untrained_systems: row name -> model shown as its pretrained weights left it.
        first_negatives: rows that round 1's hard negatives are mined with.
        rounds: 2 mines with the model and trains again.
        vocabulary: pretrained weights whose vocabulary is used; None trains one on the collection.
        vocabulary_size: entries of the WordPiece vocabulary that is trained.
        query_length: tokens per query.
        passage_length: tokens per passage.
        train_queries: maximum number of training queries per task; None means all.
        config_text: written to config.gin.

    Returns:
        The table that was printed.
    """
    root = pathlib.Path(setting.output_dir)
    stages = Stages(root)
    if vocabulary is not None:
        vocabulary = str(fetch(vocabulary))
    stages.run(
        "prepare",
        prepare_pydocs,
        data_dir=setting.data_dir,
        collection=COLLECTION,
        train_queries=train_queries,
    )
    if vocabulary is None:
        vocabulary = str(root / "vocabulary")
        stages.run(
            "vocab",
            make_vocabulary,
            data_dir=setting.data_dir,
            collection=COLLECTION,
            output_dir=vocabulary,
            size=vocabulary_size,
        )
    stages.run(
        "tokenize",
        tokenize,
        data_dir=setting.data_dir,
        mixture_or_task=COLLECTION,
        module="taser_jax.tasks.pydocs",
        vocabulary=vocabulary,
        feature_lengths={"query": query_length, "passage": passage_length},
        output_dir=setting.token_store,
    )
    table = pipeline_taser(
        setting=setting,
        systems=systems,
        hybrid_systems=hybrid_systems,
        untrained_systems=untrained_systems,
        first_negatives=first_negatives,
        rounds=rounds,
        config_text=config_text,
    )
    # The best encoder by the table's last measure.
    folders = {name: file_name(name) for name in untrained_systems or ()} | {
        row_name(name, number, first_negatives): f"{file_name(name)}-{number}"
        for name in systems
        for number in range(1, rounds + 1)
    }
    dense = [row for row in table.results if row.system in folders]
    best = max(dense, key=lambda row: table.mean(row, table.measures[-1]) or 0.0).system
    folder = root / folders[best]
    print(f"\nThree questions, answered by {best}:")
    answer(questions, root=root, folder=folder, data_dir=setting.data_dir, collection=COLLECTION)
    print(f"\nAll of it is under {root}: table.md, table.csv, table.png, runs, models, stages.")
    print(f"In Python: taser_jax.Retriever.load({str(root)!r}).search(['your question'])")
    return table
