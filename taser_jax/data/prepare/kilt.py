"""From KILT's files to a collection with query sets and their official gold."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from etils import epath

from taser_jax.artifacts import FilePath, fingerprint_json, storage_errors
from taser_jax.data.collections.store import QuerySet, write_collection, write_queries
from taser_jax.data.files import file_digest
from taser_jax.data.prepare.formats import (
    PreparedCollection,
    PreparedSplit,
    already_prepared,
    write_receipt,
)
from taser_jax.data.prepare.kilt_gold import Gold, ProvenanceIndex
from taser_jax.data.prepare.kilt_options import VALIDATION, KiltOptions
from taser_jax.data.prepare.query_splits import (
    group_of,
    last,
    named_splits,
    sampled,
    split_of,
    without_last,
)
from taser_jax.data.prepare.questions import MissingPassages, NoPositive
from taser_jax.data.readers import kilt
from taser_jax.data.readers.kilt import KiltPassage, KiltQuery
from taser_jax.data.readers.kilt_chunking import chunk_page
from taser_jax.errors import ConfigError, DataError, TaserError
from taser_jax.records import EmptyPassages, Query
from taser_jax.settings import to_plain

GOLD_FILE = "kilt.jsonl"
ALL_SPLITS = "train+validation+test"
# Of what is made from the same files and options: another one prepares them again.
_VERSION = 2
# What fact checking answers with; no passage holds it as an answer.
_VERDICTS = frozenset({"SUPPORTS", "REFUTES", "DISPUTED", "NOT ENOUGH INFO"})
MENTION_START, MENTION_END = "[START_ENT]", "[END_ENT]"

logger = logging.getLogger("taser")


_DEFAULTS = KiltOptions()
QueryFiles = Mapping[str, FilePath | Mapping[str, FilePath]]


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
            of the ids. A file without a split is divided into all three.
        passages: TSV with page ids: Maillard's six columns, or id, text, title, wikipedia_id and
            optionally paragraph_id.
        knowledge_source: KILT's JSONL of pages, to be cut into passages; replaces `passages`.
        directory: base of relative paths; None is the current directory.
        options: how the files are read.

    Returns:
        Counts and fingerprints. The same call on the same files does nothing.

    Raises:
        ConfigError: both or none of `passages` and `knowledge_source`; options for other tasks.
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
    prepared = PreparedCollection(
        collection=collection,
        passages=len(store),
        merged=0,
        renamed=0,
        fingerprint=store.fingerprint,
        splits=tuple(splits),
    )
    write_receipt(data_dir, prepared, inputs)
    return prepared


def gold_path(queries: QuerySet) -> epath.Path:
    """The official gold of a query set that was prepared from KILT's files."""
    return queries.directory / GOLD_FILE


class _QueryMapper:
    """Turns KILT's queries into ours.

    Attributes:
        counts: "without_positive", "missing_positives" and "whole_page".
    """

    def __init__(self, task: str, split: str, index: ProvenanceIndex, options: KiltOptions) -> None:
        self._task, self._split, self._index, self._options = task, split, index, options
        self._gold = Gold.PAGE if task in options.page_gold_tasks else options.gold
        self.counts: collections.Counter[str] = collections.Counter()

    def query(self, query: KiltQuery) -> Query | None:
        """The query with its gold rows; None where it is dropped for having none."""
        positives = self._positives(query)
        if not positives and not self._keeps(query):
            return None
        answers = [one.answer for one in query.outputs if one.answer is not None]
        return Query(
            id=query.id,
            text=self._text(query),
            task=self._task,
            positives=positives,
            answers=tuple(answer for answer in dict.fromkeys(answers) if answer not in _VERDICTS),
        )

    def _text(self, query: KiltQuery) -> str:
        options = self._options
        if self._task in options.entity_tasks:
            return entity_input(query.text, left_words=options.left_words, where=query.where)
        if self._task in options.dialogue_turns:
            return dialogue_input(query.text, turns=options.dialogue_turns[self._task])
        return query.text

    def _positives(self, query: KiltQuery) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for number, output in enumerate(query.outputs):
            for place, provenance in enumerate(output.provenance or ()):
                where = f"{query.where}, output[{number}].provenance[{place}]"
                if not self._index.has_page(provenance.page_id):
                    self._missing(f"the page {provenance.page_id!r}", where)
                    continue
                rows, whole_page = self._index.rows(provenance, self._gold, where)
                if not rows:
                    self._missing("the place in the page", where)
                self.counts["whole_page"] += whole_page
                found.update(dict.fromkeys(rows))
        return tuple(found)

    def _missing(self, what: str, where: str) -> None:
        if self._options.strictness.missing_positives is MissingPassages.ERROR:
            raise DataError(
                f"{what} is not in the collection",
                where=f"{where}, field 'wikipedia_id'",
                expected="a page, and a place in it, that the passages cover",
                fix="give the passages or knowledge source that the queries were made from, or "
                "drop such provenance with PrepareOptions.missing_positives = 'drop'",
            )
        self.counts["missing_positives"] += 1

    def _keeps(self, query: KiltQuery) -> bool:
        self.counts["without_positive"] += 1
        option = (
            "train_without_positive" if self._split == "train" else "evaluation_without_positive"
        )
        choice: NoPositive = getattr(self._options.strictness, option)
        if choice is NoPositive.ERROR:
            raise DataError(
                "no output has a provenance in the collection",
                where=f"{query.where}, field 'output'",
                expected="at least one gold passage",
                fix=f"add one, or drop such queries with PrepareOptions.{option} = 'drop'",
            )
        return choice is NoPositive.KEEP


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
    mapper = _QueryMapper(task, split, index, options)
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
    return PreparedSplit(
        task=task,
        split=split,
        queries=len(queries),
        without_positive=mapper.counts["without_positive"],
        missing_positives=mapper.counts["missing_positives"],
        missing_hard_negatives=0,
        fingerprint=queries.fingerprint,
    )


def _mapped(
    queries: Iterator[KiltQuery], mapper: _QueryMapper, gold: IO[str], where: str
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
            yield from last(queries, options.validation_last)
            return
        queries = without_last(queries, options.validation_last)
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
    """Those whose hash falls into the split."""
    pattern = options.split_groups.get(task)
    shares = options.task_shares.get(task, options.shares)
    for query in queries:
        group = group_of(query.id, pattern, query.where)
        if split_of(group, task=task, splits=splits, shares=shares) == split:
            yield query


def _sampled(
    read: Callable[[], Iterator[KiltQuery]], task: str, count: int | None
) -> Iterator[KiltQuery]:
    """A sample of what is read, twice: ids first."""
    if count is None:
        return read()
    kept = sampled((query.id for query in read()), task=task, count=count)
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
    for task, given in queries.items():
        for name, path in (given if isinstance(given, Mapping) else {ALL_SPLITS: given}).items():
            sharing = named_splits(name, f"task {task!r}")
            for split in sharing:
                if (task, split) in files:
                    raise ConfigError(
                        f"split {split!r} twice", where=f"task {task!r}", expected="each split once"
                    )
                files[task, split] = (sharing, os.path.join(base, path))
    if not files:
        raise ConfigError("no query file is given", where="queries")
    if unknown := sorted(options.tasks() - set(queries)):
        raise ConfigError(
            f"options for {', '.join(unknown)}",
            where="KiltOptions",
            expected=f"tasks of the query files: {', '.join(queries)}",
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
    described: list[Any] = ["kilt", _VERSION, chunked, digests[str(source)]]
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


def entity_input(text: str, *, left_words: int, where: str) -> str:
    """A document around a marked mention, with only the last words before it.

    The tokeniser truncates on the right, so the mention is never lost, as in TACO-DR's AIDA inputs.

    Example:
        >>> entity_input("a b c [START_ENT] Bern [END_ENT] d", left_words=2, where="line 1")
        'b c [START_ENT] Bern [END_ENT] d'

    Args:
        text: the whole input.
        left_words: words kept before the mention; TACO-DR keeps 64.
        where: file:line, for the message.

    Raises:
        DataError: the text does not have exactly one mention between [START_ENT] and [END_ENT].
    """
    left, start, rest = text.partition(MENTION_START)
    mention, end, right = rest.partition(MENTION_END)
    if not start or not end or not mention.strip() or MENTION_START in rest:
        raise DataError(
            f"{text.count(MENTION_START)} {MENTION_START}, {text.count(MENTION_END)} {MENTION_END}",
            where=f"{where}, field 'input'",
            expected=f"one mention, as {MENTION_START} Bern {MENTION_END}",
            fix="leave the task out of entity_tasks if it is not entity linking",
        )
    words = left.split()
    kept = words[max(0, len(words) - left_words) :]
    return " ".join(
        [*kept, MENTION_START, *mention.split(), MENTION_END, *right.split()],
    )


def dialogue_input(text: str, *, turns: int) -> str:
    r"""The last turns of a dialogue, one per line, oldest first.

    The last turn is the one to answer, and would be the first to be lost by truncation.

    Example:
        >>> dialogue_input("Hello\nHi\nSeen it?", turns=2)
        'Hi\nSeen it?'
    """
    lines = [line for line in text.split("\n") if line.strip()]
    return "\n".join(lines[max(0, len(lines) - turns) :])
