"""`taser prepare`: foreign files, or the built-in collection, into a collection with query sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taser_jax.data import prepare
from taser_jax.data.collections import write_collection, write_queries
from taser_jax.data.prepare import PreparedCollection, PrepareOptions
from taser_jax.data.pydocs.build import build_pydocs
from taser_jax.data.questions import QuestionFiles
from taser_jax.progress import logger, phase


def prepare_pydocs(
    *,
    data_dir: str,
    collection: str = "pydocs",
    packages: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
) -> str:
    """Builds the built-in collection: docstrings of Python and of four packages, in six tasks.

    The text depends on the versions installed; they are printed with the checksum.

    Args:
        data_dir: where collections lie.
        collection: its name there.
        packages: modules to walk, for a smaller collection; None means all.
        tasks: tasks to write; None means all six.

    Returns:
        The fingerprint of the passages.
    """
    with phase("build pydocs"):
        built = build_pydocs(packages)
    store = write_collection(data_dir, collection, built.passages)
    for task, splits in built.queries.items():
        if tasks is not None and task not in tasks:
            continue
        for split, queries in splits.items():
            if queries:
                write_queries(data_dir, collection, task, split, queries)
    versions = ", ".join(f"{name} {version}" for name, version in built.versions.items())
    logger.info("pydocs: %s passages, checksum %s", f"{len(store):,}", built.checksum)
    logger.info("pydocs: text of %s", versions)
    for task, splits in built.queries.items():
        counts = ", ".join(f"{split} {len(queries):,}" for split, queries in splits.items())
        logger.info("pydocs: task %s: %s", task, counts)
    return store.fingerprint


def prepare_dpr(
    *,
    data_dir: str,
    collection: str,
    passages: str | Sequence[str] | Mapping[str, str],
    tasks: Mapping[str, Mapping[str, str | QuestionFiles]],
    options: PrepareOptions = PrepareOptions(),
) -> PreparedCollection:
    """Prepares DPR's files: passages TSV with a header, training JSON or JSONL, `.qa.csv`.

    Args:
        data_dir: where collections lie.
        collection: name of the one to write.
        passages: one TSV; several, merged with duplicates written once; or {label: path}.
        tasks: {task: {split: path or QuestionFiles}}; splits are train, validation and test.
        options: how strictly to take the input.
    """
    return _report(
        prepare.prepare_dpr(
            data_dir=data_dir,
            collection=collection,
            passages=passages,
            tasks=tasks,
            options=options,
        )
    )


def prepare_tsv(
    *,
    data_dir: str,
    collection: str,
    passages: str | Sequence[str] | Mapping[str, str],
    tasks: Mapping[str, Mapping[str, str | QuestionFiles]],
    options: PrepareOptions = PrepareOptions(),
) -> PreparedCollection:
    """Prepares plain TSV: passages (id, text, perhaps title), queries (id, text) and qrels.

    Args:
        data_dir: where collections lie.
        collection: name of the one to write.
        passages: one file, several, or {label: path}.
        tasks: {task: {split: QuestionFiles(questions, qrels=...)}}.
        options: how strictly to take the input.
    """
    return _report(
        prepare.prepare_tsv(
            data_dir=data_dir,
            collection=collection,
            passages=passages,
            tasks=tasks,
            options=options,
        )
    )


def prepare_beir(
    *,
    data_dir: str,
    collection: str,
    directories: Mapping[str, str],
    options: PrepareOptions = PrepareOptions(),
) -> PreparedCollection:
    """Prepares BEIR directories, one a task: corpus.jsonl, queries.jsonl, qrels/*.tsv.

    Args:
        data_dir: where collections lie.
        collection: name of the one to write.
        directories: {task: directory}.
        options: how strictly to take the input.
    """
    return _report(
        prepare.prepare_beir(
            data_dir=data_dir, collection=collection, directories=directories, options=options
        )
    )


def _report(prepared: PreparedCollection) -> PreparedCollection:
    logger.info(
        "%s: %s passages (%s duplicates merged, %s renamed), fingerprint %s%s",
        prepared.collection,
        f"{prepared.passages:,}",
        f"{prepared.merged:,}",
        f"{prepared.renamed:,}",
        prepared.fingerprint,
        ", reused" if prepared.reused else "",
    )
    for split in prepared.splits:
        logger.info(
            "%s: task %s, %s: %s queries (%s without a positive; %s positives and %s hard "
            "negatives not in the collection)",
            prepared.collection,
            split.task,
            split.split,
            f"{split.queries:,}",
            f"{split.without_positive:,}",
            f"{split.missing_positives:,}",
            f"{split.missing_hard_negatives:,}",
        )
    return prepared


CONFIGURABLES = (PrepareOptions, QuestionFiles)
