"""Turns KILT's files into a collection with query sets and their official gold."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO

from etils import epath

from taser_jax.data.collections.store import QuerySet, write_collection, write_queries
from taser_jax.data.files import file_digest
from taser_jax.data.prepare import query_splits
from taser_jax.data.prepare.kilt_gold import ProvenanceIndex
from taser_jax.data.prepare.kilt_options import VALIDATION, KiltOptions
from taser_jax.data.prepare.kilt_queries import KiltQueryMapper
from taser_jax.data.prepare.patterns import below, by_task_and_split
from taser_jax.data.prepare.receipts import (
    PreparedCollection,
    PreparedSplit,
    already_prepared,
    write_receipt,
    write_without_positive,
)
from taser_jax.data.readers import kilt
from taser_jax.data.readers.kilt import KiltPassage, KiltQuery
from taser_jax.data.readers.kilt_chunking import chunk_page
from taser_jax.storage.artifacts import FilePath, fingerprint_json, storage_errors
from taser_jax.storage.errors import ConfigError, DataError, TaserError
from taser_jax.storage.records import EmptyPassages, Query
from taser_jax.storage.settings import to_plain

GOLD_FILE = "kilt.jsonl"
ALL_SPLITS = "train+validation+test"
# Version of the output for the same files and options; a new one prepares them again.
_VERSION = 2

logger = logging.getLogger("taser")


_DEFAULTS = KiltOptions()
QueryFiles = FilePath | Mapping[str, FilePath | Mapping[str, FilePath]]


def prepare_kilt(
    *,
    data_dir: FilePath,
    collection: str,
    queries: QueryFiles,
    passages: FilePath | None = None,
    knowledge_source: FilePath | None = None,
    directory: FilePath | None = None,
    options: KiltOptions = _DEFAULTS,
) -> PreparedCollection:
    """Prepares KILT's files: a passage TSV or a knowledge source, and query JSONL of each task.

    The official gold is copied as `kilt.jsonl` beside each query set, line by line as in the
    source, for `taser evaluate` with judge 'kilt' and for KILT's own script.

    Example:
        >>> prepare_kilt(  # doctest: +SKIP
        ...     data_dir="data", collection="kilt", passages="psgs_w100.tsv",
        ...     queries={"nq": {"train+validation": "nq-train-kilt.jsonl",
        ...                     "test": "nq-dev-kilt.jsonl"}, "selqa": "selqa.jsonl"})

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        queries: task -> split -> file; a split such as "train+validation" is divided by a hash
            of the ids. A file without a split is divided into all three. Or a pattern of these
            files, such as "{task}.{split}.jsonl" or "{task}.jsonl" (`by_task_and_split`).
        passages: TSV with page ids: Maillard's six columns, or id, text, title, wikipedia_id and
            optionally paragraph_id.
        knowledge_source: KILT's JSONL of pages, to be cut into passages; replaces `passages`.
        directory: base of relative paths; None is the current directory.
        options: how the files are read.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        ConfigError: both or neither of `passages` and `knowledge_source`; options for other
            tasks than those of the queries.
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    base = "" if directory is None else os.fspath(directory)
    files = _checked_files(queries, base, options)
    source = os.path.join(base, _checked_source(passages, knowledge_source))
    inputs = _inputs_fingerprint(source, files, options, chunked=passages is None)
    done = already_prepared(data_dir, collection, inputs)
    if done is not None and _gold_is_there(data_dir, done):
        return done
    index = ProvenanceIndex()
    read = _passages(source, options, chunked=passages is None)
    store = write_collection(data_dir, collection, index.watch(read), empty=EmptyPassages.KEEP)
    index.close(store)
    splits = [
        _write_split(data_dir, collection, task, split, sharing, path, index, options)
        for (task, split), (sharing, path) in files.items()
    ]
    return write_receipt(data_dir, store, splits, inputs=inputs)


def gold_path(queries: QuerySet) -> epath.Path:
    """The official gold of a query set that was prepared from KILT's files."""
    return queries.directory / GOLD_FILE


def _write_split(
    data_dir: FilePath,
    collection: str,
    task: str,
    split: str,
    sharing: tuple[str, ...],
    path: FilePath,
    index: ProvenanceIndex,
    options: KiltOptions,
) -> PreparedSplit:
    mapper = KiltQueryMapper(task, split, index, options)
    scratch = epath.Path(data_dir) / collection / f"{task}.{split}.kilt.partial"
    try:
        with storage_errors(scratch), scratch.open("w") as file:
            chosen = _of_split(task, split, sharing, path, options)
            mapped = _mapped(chosen, mapper, file, f"{os.fspath(path)}, {split}")
            queries = write_queries(data_dir, collection, task, split, mapped)
        with storage_errors(scratch):
            scratch.replace(gold_path(queries))
    except Exception:
        scratch.unlink(missing_ok=True)
        raise
    if mapper.counts["whole_page"]:
        logger.info(
            "%s %s: %s provenances are known by page only, all of whose passages are gold",
            task,
            split,
            f"{mapper.counts['whole_page']:,}",
        )
    write_without_positive(data_dir, collection, task, split, mapper.without_positive)
    return PreparedSplit.of(queries, mapper.counts)


def _mapped(
    queries: Iterator[KiltQuery], mapper: KiltQueryMapper, gold: IO[str], where: str
) -> Iterator[Query]:
    count = 0
    for query in queries:
        mapped = mapper.query(query)
        if mapped is not None:
            record = {**query.record, "id": query.id}
            gold.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += 1
            yield mapped
    if not count:
        raise DataError(
            "not one query is left for this split",
            where=where,
            expected="one or more",
            fix="give a larger file, another share, or fewer splits; see also the options of "
            "queries without positives",
        )


def _of_split(
    task: str, split: str, sharing: tuple[str, ...], path: FilePath, options: KiltOptions
) -> Iterator[KiltQuery]:
    def whole_file() -> Iterator[KiltQuery]:
        return kilt.read_queries(path, outputs=options.outputs)

    count = options.train_samples.get(task) if "train" in sharing else None
    if options.validation_last and len(sharing) > 1 and VALIDATION in sharing:
        queries = _sampled(whole_file, task, count)
        if split == VALIDATION:
            yield from query_splits.last(queries, options.validation_last)
            return
        queries = query_splits.without_last(queries, options.validation_last)
        others = tuple(one for one in sharing if one != VALIDATION)
        yield from _shared(queries, task, split, others, options)
        return

    def all_of_split() -> Iterator[KiltQuery]:
        return _shared(whole_file(), task, split, sharing, options)

    yield from _sampled(all_of_split, task, count if split == "train" else None)


def _shared(
    queries: Iterator[KiltQuery],
    task: str,
    split: str,
    splits: tuple[str, ...],
    options: KiltOptions,
) -> Iterator[KiltQuery]:
    """The queries whose hash falls into the split."""
    pattern = options.split_groups.get(task)
    shares = options.task_shares.get(task, options.shares)
    for query in queries:
        group = query_splits.group_of(query.id, pattern, query.where)
        if query_splits.split_of(group, task=task, splits=splits, shares=shares) == split:
            yield query


def _sampled(
    read: Callable[[], Iterator[KiltQuery]], task: str, count: int | None
) -> Iterator[KiltQuery]:
    """A sample of the queries; reads them twice, for the ids and for the sample."""
    if count is None:
        return read()
    kept = query_splits.sampled((query.id for query in read()), task=task, count=count)
    return (query for query in read() if query.id in kept)


def _passages(source: FilePath, options: KiltOptions, *, chunked: bool) -> Iterator[KiltPassage]:
    if not chunked:
        yield from kilt.read_passages(source, empty=options.strictness.empty)
        return
    for page in kilt.read_pages(source):
        yield from chunk_page(page, max_tokens=options.max_tokens)


def _checked_files(
    queries: QueryFiles, base: str, options: KiltOptions
) -> dict[tuple[str, str], tuple[tuple[str, ...], FilePath]]:
    """(task, split) -> (splits that share the file, file)."""
    files: dict[tuple[str, str], tuple[tuple[str, ...], FilePath]] = {}
    tasks = by_task_and_split(below(base, queries), whole=ALL_SPLITS)
    for task, splits in tasks.items():
        for name, given in splits.items():
            sharing = query_splits.named_splits(name, f"task {task!r}")
            for split in sharing:
                if (task, split) in files:
                    raise ConfigError(
                        f"split {split!r} twice", where=f"task {task!r}", expected="each split once"
                    )
                files[task, split] = (sharing, given.questions)
    if not files:
        raise ConfigError("no query file is given", where="queries")
    if unknown := sorted(options.tasks() - set(tasks)):
        raise ConfigError(
            f"options for {', '.join(unknown)}",
            where="KiltOptions",
            expected=f"tasks of the query files: {', '.join(tasks)}",
            fix="correct the name, or leave the option out",
        )
    return files


def _checked_source(passages: FilePath | None, knowledge_source: FilePath | None) -> FilePath:
    given = [path for path in (passages, knowledge_source) if path is not None]
    if len(given) != 1:
        raise ConfigError(
            "both are given" if given else "neither is given",
            where="passages and knowledge_source",
            expected="a passage TSV, or a knowledge source to be cut into passages",
        )
    return given[0]


def _inputs_fingerprint(
    source: FilePath,
    files: Mapping[tuple[str, str], tuple[tuple[str, ...], FilePath]],
    options: KiltOptions,
    *,
    chunked: bool,
) -> str:
    """Fingerprint of all inputs' bytes; reports a missing file before any work is done."""
    digests: dict[str, str] = {}
    for path in [source, *(path for _, path in files.values())]:
        if str(path) not in digests:
            digests[str(path)] = file_digest(path)
    described: list[object] = ["kilt", _VERSION, chunked, digests[str(source)]]
    described += [[*key, *sharing, digests[str(path)]] for key, (sharing, path) in files.items()]
    settings = to_plain(options)
    return fingerprint_json([*described, settings])


def _gold_is_there(data_dir: FilePath, prepared: PreparedCollection) -> bool:
    with contextlib.suppress(TaserError):
        return all(
            gold_path(QuerySet.open(data_dir, prepared.collection, one.task, one.split)).exists()
            for one in prepared.splits
        )
    return False
