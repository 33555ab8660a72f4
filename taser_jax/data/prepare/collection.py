"""Turns files of any format into a collection with its query sets."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath
from jaxtyping import Int32

from taser_jax.data.collections.store import PassageStore, QuerySet, write_collection, write_queries
from taser_jax.data.files import open_bytes
from taser_jax.data.prepare.detection import detect
from taser_jax.data.prepare.mapping import PageIndex, PassageResolver, QuestionMapper
from taser_jax.data.prepare.splits import (
    VALIDATION,
    PrepareOptions,
    QuestionSplit,
    Tasks,
    check_former_splits,
    divide_by_positives,
    question_splits,
    without_small,
)
from taser_jax.data.readers.fields import content_id
from taser_jax.data.readers.passages import LeftOut, LocatedPassage, read_passages
from taser_jax.data.readers.questions import is_kilt, read_qrels
from taser_jax.storage.artifacts import FilePath, replacing, split_path, write_text
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage, Query, check_id, hash_share, normalized_content

_DEFAULTS = PrepareOptions()

PassageFiles = FilePath | Sequence[FilePath] | Mapping[str, FilePath]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedSplit:
    """Counts of one task and split.

    Attributes:
        task: its task.
        split: "train", "validation" or "test".
        queries: number written.
        left_out: kind -> number of what its files lack.
    """

    task: str
    split: str
    queries: int
    left_out: Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedCollection:
    """A summary of what was prepared.

    Attributes:
        collection: its name.
        passages: number written.
        merged: passages skipped because their title and text occurred before.
        renamed: passages whose id was taken, now written label:id.
        left_out: kind -> number of passages left out.
        fingerprint: fingerprint of the collection.
        splits: the query sets.
    """

    collection: str
    passages: int
    merged: int
    renamed: int
    left_out: Mapping[str, int]
    fingerprint: str
    splits: tuple[PreparedSplit, ...]


def prepare(
    *,
    data_dir: FilePath,
    collection: str,
    directories: PassageFiles = (),
    passages: PassageFiles | None = None,
    queries: Tasks | None = None,
    directory: FilePath | None = None,
    options: PrepareOptions = _DEFAULTS,
    unjudged_tasks: Collection[str] = (),
) -> PreparedCollection:
    """Prepares folders whose files are detected, and files given by name, as one collection.

    Several passage files are merged: passages with the same title and text become one; an id that
    another file has taken is written `label:id`. The official gold of KILT's questions is copied as
    `kilt.jsonl` beside each query set, line by line as in the source, for `taser evaluate` with
    judge 'kilt' and for KILT's own script. What the files lack is counted, and listed in left_out/.

    Example:
        >>> prepare(  # doctest: +SKIP
        ...     data_dir="data", collection="wikipedia", passages="psgs_w100.tsv",
        ...     queries={"nq": {"train": "nq-train.json", "test": "nq-test.qa.csv"}})
        >>> prepare(data_dir="data", collection="c", directories="my_beir")  # doctest: +SKIP

    Args:
        data_dir: folder of collections.
        collection: name of the collection to write.
        directories: a folder, several, or name -> folder (`detect`). The name is the label of its
            passages, and the task of files without one in their names.
        passages: a file, several (labelled by their names without suffixes), or label -> file.
        queries: task -> split -> questions, as a path or `QuestionFiles`; a split such as
            "train+validation" is divided by a hash of the ids, of questions that have none by their
            text, and a file without a split into all three.
        directory: base of relative paths; None is the current directory.
        options: how files are divided, and what they may lack.
        unjudged_tasks: tasks whose training questions stay without a positive, to be found later.

    Returns:
        Counts, and the collection's fingerprint. The same files give equal bytes.

    Raises:
        ConfigError: no file, a task or label twice, options of other tasks.
        DataError: malformed input; names file:line, the field and the fix.
        StorageError: the disk is full or `data_dir` cannot be written.
    """
    base = "" if directory is None else directory
    sources = {} if passages is None else _labelled(passages, "passages", base)
    label = next(iter(sources)) if len(sources) == 1 else ""
    splits = question_splits(queries or {}, options, base=base, label=label)
    for name, folder in _labelled(directories, "directories", base).items():
        found = detect(folder, name)
        taken = {split.task for split in splits} & found.tasks.keys()
        if name in sources or taken:
            raise ConfigError(
                f"{', '.join(taken) or name} is a task or name of another source, too",
                where=os.fspath(folder),
                fix="rename the files, after which tasks are named, or give names: {name: folder}",
            )
        label = name if len(found.passages) == 1 else ""
        for path in found.passages:
            # Files of several folders may have one name.
            place = os.path.relpath(path, folder).replace(os.sep, ".")
            sources[label or f"{name}.{_label(place)}"] = path
        splits += question_splits(found.tasks, options, label=label)
    if not sources:
        fix = "write `taser prepare DIRECTORY`, or set PASSAGES and QUERIES"
        raise ConfigError("neither a folder nor a file of passages is given", fix=fix)
    options.check_tasks(dict.fromkeys(split.task for split in splits))
    for split in splits:
        if split.files.passages and split.files.passages not in sources:
            problem = f"no passage file is labelled {split.files.passages!r}"
            where = f"task {split.task!r}, split {split.split!r}"
            raise ConfigError(problem, where=where, fix=f"take one of {', '.join(sources)}")
    splits = [
        dataclasses.replace(
            split,
            pairs=split.files.questions in sources.values(),
            keeps_unjudged=split.task in unjudged_tasks,
        )
        for split in splits
    ]
    return _prepare(data_dir, collection, sources, splits, options)


def _prepare(
    data_dir: FilePath,
    collection: str,
    sources: Mapping[str, FilePath],
    splits: Sequence[QuestionSplit],
    options: PrepareOptions,
) -> PreparedCollection:
    """Writes passages as one collection, and questions as its query sets."""
    asked = [
        path for split in splits for path in (split.files.questions, split.files.qrels) if path
    ]
    for path in dict.fromkeys([*sources.values(), *asked]):
        # A missing file is reported before any work is done.
        if not os.path.isdir(path):
            with open_bytes(path):
                pass
    splits = without_small(splits)
    check_former_splits(data_dir, collection, splits, options)
    left_out, pages = LeftOut(strict=options.strict), PageIndex()
    has_pages = any(is_kilt(split.files.questions) for split in splits)

    def passages_of(label: str) -> Iterator[Passage]:
        located = read_passages(sources[label], left_out, words=options.passage_words)
        if options.distractors < 1:
            located = _without_distractors(located, label, splits, options.distractors)
        return (read.passage for read in (pages.watch(located) if has_pages else located))

    merger = PassageMerger({label: passages_of(label) for label in sources})
    store = write_collection(data_dir, collection, merger.passages(), aliases=merger.aliases)
    write_left_out(data_dir, collection, "passages.txt", left_out.lines)
    if has_pages:
        pages.close(merger.rows(store))
    resolver = PassageResolver(store, merger.rows_of_source)
    held_out = {split.task for split in splits if split.split == VALIDATION}
    written: list[PreparedSplit] = []
    for split in splits:
        lacks = LeftOut(strict=options.strict)
        mapper = QuestionMapper(split, resolver, pages, lacks)
        carves = split.split == "train" and split.task not in held_out
        share = options.validation_share if carves else 0.0
        for queries in _write_split(data_dir, collection, mapper, share):
            counts = +lacks.counts if queries.split == split.split else {}
            written.append(PreparedSplit(split.task, queries.split, len(queries), counts))
        file = split_path("", split.task, split.split, ".txt")
        write_left_out(data_dir, collection, file, lacks.lines)
    return PreparedCollection(
        collection=collection,
        passages=len(store),
        merged=merger.merged,
        renamed=merger.renamed,
        left_out=dict(left_out.counts),
        fingerprint=store.fingerprint,
        splits=tuple(written),
    )


class PassageMerger:
    """Streams the passages of one or more files, and records their ids in the collection.

    A single file is passed through unchanged: row = position in the file. Several files become one
    collection in which no two passages have the same title and text (ignoring white space and
    Unicode form): the first stays, and the ids of the others become its aliases. An id that is
    already taken is written `label:id`. Merging takes some 300 bytes of memory per passage.

    Example:
        files a (id 1: "x", id 2: "y") and b (id 1: "y", id 3: "x", id 2: "z") give the rows
        1 "x", 2 "y", b:2 "z", with the aliases b:1 -> row 1, b:3 and 3 -> row 0.

    Args:
        sources: label of each file, the prefix for clashing ids -> its passages, which are read
            once; in the order of their rows.
    """

    def __init__(self, sources: Mapping[str, Iterable[Passage]]) -> None:
        self._sources = sources
        for label in sources if len(sources) > 1 else ():
            check_id(label, where=f"the label {label!r} of a file of passages")
        self.aliases: dict[str, int] = {}
        self.merged = 0
        self.renamed = 0
        self.rows_of_source: dict[str, range] = {}
        self._rows = array.array("i")

    def passages(self) -> Iterator[Passage]:
        """The merged passages in row order."""
        if len(self._sources) == 1:
            yield from next(iter(self._sources.values()))
            return
        row_of_content: dict[bytes, int] = {}
        taken: dict[str, int] = {}
        row = 0
        for label, passages in self._sources.items():
            start = row
            for passage in passages:
                content = normalized_content(passage.title, passage.text)
                encoded = content.encode("utf-8", "surrogatepass")
                key = hashlib.blake2b(encoded, digest_size=16).digest()
                name = f"{label}:{passage.id}"
                same = row_of_content.get(key)
                self._rows.append(row if same is None else same)
                if same is not None:
                    self.merged += 1
                    for alias in (name, passage.id):
                        if alias not in taken:
                            taken[alias] = self.aliases[alias] = same
                    continue
                row_of_content[key] = row
                is_repeated = taken.get(passage.id, -1) >= start
                if passage.id in taken:
                    self.renamed += 1
                    passage = dataclasses.replace(passage, id=name)
                if is_repeated or passage.id in taken:
                    problem = f"the id {passage.id!r} is used for two texts"
                    fix = "correct the file, or give it another label"
                    raise DataError(problem, where=f"passages {label!r}", fix=fix)
                taken[passage.id] = row
                yield passage
                row += 1
            self.rows_of_source[label] = range(start, row)

    def rows(self, store: PassageStore) -> Int32[np.ndarray, "passages"]:
        """Row in the collection of each passage that was read, in the order of reading."""
        if len(self._sources) == 1:
            return np.arange(len(store), dtype=np.int32)
        return np.array(self._rows, np.int32)


def _write_split(
    data_dir: FilePath, collection: str, mapper: QuestionMapper, validation_share: float
) -> list[QuerySet]:
    """Writes the queries of a split, or of training and validation, and KILT's gold."""
    split = mapper.split
    gold: dict[str, str] = {}

    def mapped() -> Iterator[Query]:
        for query, question in mapper.queries():
            if question.record is not None:
                record = {**question.record, "id": query.id}
                gold[query.id] = json.dumps(record, ensure_ascii=False) + "\n"
            yield query

    parts: Mapping[str, Iterable[Query]] = {split.split: mapped()}
    if validation_share:
        parts = _carved(mapped(), split.task, validation_share)
    written = []
    for name, part in parts.items():
        written.append(write_queries(data_dir, collection, split.task, name, part))
        if gold:
            with replacing(gold_path(written[-1])) as scratch:
                scratch.write_text("".join(gold[query.id] for query in written[-1]))
    return written


def _carved(queries: Iterable[Query], task: str, share: float) -> dict[str, list[Query]]:
    """A task's training and validation queries."""
    train, validation = divide_by_positives(list(queries), share=share)
    # Of no queries at all, the split that is written first is said to be empty.
    if bool(train) != bool(validation):
        raise ConfigError(
            f"{len(validation)} of {len(train) + len(validation)} training queries become a "
            "validation split, where equal questions stay together",
            where=f"VALIDATION_SHARE = {share}, task {task!r}",
            fix="add a validation split to the files",
        )
    return {"train": train, VALIDATION: validation}


def _without_distractors(
    passages: Iterator[LocatedPassage], label: str, splits: Sequence[QuestionSplit], share: float
) -> Iterator[LocatedPassage]:
    """The passages that are positive for a query, and a share of the others."""
    gold = {
        id for split in splits if split.files.passages in ("", label) for id in _positive_ids(split)
    }
    for located in passages:
        passage = located.passage
        is_gold = not gold.isdisjoint((passage.id, content_id(passage.title, passage.text)))
        if is_gold or hash_share(passage.id) < share:
            yield located


def _positive_ids(split: QuestionSplit) -> Iterator[str]:
    asked = {question.id: question for question in split.questions()}
    if split.files.qrels is not None:
        for judgement in read_qrels(split.files.qrels):
            if judgement.relevance > 0 and judgement.query_id in asked:
                yield judgement.passage_id
        return
    for question in asked.values():
        for context in question.positives:
            # Of another file's ids, a positive goes by its content.
            yield from (context.id, content_id(context.title, context.text))
        for place in question.provenance:
            if not place.passage:
                problem = f"the positive on {place.title or place.page_id!r} has no passage_id"
                fix = "add it, or keep all passages: PrepareOptions.distractors = 1.0"
                raise DataError(problem, where=question.where, fix=fix)
            yield place.passage


def _labelled(given: PassageFiles, where: str, base: FilePath = "") -> dict[str, FilePath]:
    """Label -> file or folder below `base`; without a label it is the name, without suffixes."""
    if isinstance(given, Mapping):
        return {label: os.path.join(base, path) for label, path in given.items()}
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    labelled: dict[str, FilePath] = {_label(path): os.path.join(base, path) for path in paths}
    if len(labelled) < len(paths):
        problem = f"two have the same name: {', '.join(os.fspath(path) for path in paths)}"
        raise ConfigError(problem, where=where, fix="give a label to each: {label: path}")
    return labelled


def _label(path: FilePath) -> str:
    name = pathlib.PurePath(os.fspath(path)).name or pathlib.Path(os.fspath(path)).resolve().name
    return name.removesuffix(".gz").removesuffix(".tsv")


def gold_path(queries: QuerySet) -> epath.Path:
    """The official gold of a query set that was prepared from KILT's files."""
    return queries.directory / "kilt.jsonl"


def left_out_directory(data_dir: FilePath, collection: str) -> epath.Path:
    """The lists of what was left out, one a query set; passages.txt is that of the passages."""
    return epath.Path(data_dir) / collection / "left_out"


def write_left_out(
    data_dir: FilePath, collection: str, file: FilePath, lines: Sequence[str]
) -> None:
    """Lists what was left out: file, line and reason of each.

    Args:
        data_dir: folder of collections.
        collection: its name.
        file: "passages.txt", or task and split as `split_path` names them.
        lines: the list; without any there is no file.
    """
    path = left_out_directory(data_dir, collection) / file
    path.unlink(missing_ok=True)
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(f"{line}\n" for line in lines))
