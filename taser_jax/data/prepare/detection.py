"""Detects passages, tasks and splits of a folder's files from their names and first lines."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.files import first_lines, texts_among, visible_files
from taser_jax.data.prepare.splits import WHOLE, QuestionFiles
from taser_jax.data.readers import fields
from taser_jax.data.readers.fields import Record, Role
from taser_jax.data.readers.passages import LeftOut, passage_of, read_passages
from taser_jax.data.readers.questions import topic_tag
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger
from taser_jax.storage.records import Passage, check_id

PassageSource = FilePath | Iterable[Passage | str | Mapping[str, object]]
_FILES = (
    *(".json", ".jsonl", ".ndjson", ".tsv", ".csv", ".txt", ".parquet", ".arrow"),
    *(".sgml", ".xml", ".qrels", ".trec"),
)
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "trainset"), "train"),
    **dict.fromkeys(("validation", "dev", "val", "valid", "devset", "valset"), "validation"),
    **dict.fromkeys(("test", "testing", "testset", "eval", "evaluation"), "test"),
}
# Words of file names that are not part of a task's name.
_OTHER_WORDS = {
    *("queries", "questions", "query", "qa", "kilt", "dpr", "biencoder", "qrels", "data"),
    *("topics", "small"),
}
_WORDS = (*_SPLIT_WORDS, "queries", "questions", "topics", "qrels")
# Those that count between underscores or capitals, too, as in train_queries and faqTrain.
_WORD = (
    rf"((?<![^\W_])(?i:{'|'.join(_WORDS)})|(?<=[^\W_])({'|'.join(map(str.title, _WORDS))}))"
    r"(?![^\W_])"
)
_CARD = "(?i)readme|licen[cs]e|changelog|contributing|requirements"


class _Role(enum.Enum):
    """The role of a file, detected from its first lines."""

    PASSAGES = "passages"
    PAIRS = "questions with their passages or answers"
    KILT = "queries of KILT"
    QRELS = "judgements"
    QUERIES = "queries of id and text"
    TOPICS = "TREC's topics"
    OTHER = "no columns or fields of known names"


@dataclasses.dataclass(frozen=True, slots=True)
class Detected:
    """What the files of a folder are.

    Attributes:
        passages: the file of passages, or those of pairs, or the folder itself if its text files
            are the passages.
        tasks: task -> split -> files of questions.
    """

    passages: tuple[str, ...]
    tasks: dict[str, dict[str, QuestionFiles]]


def detect(directory: str | os.PathLike[str], name: str = "") -> Detected:
    """Detects the passages, tasks and splits of the files in a folder.

    BEIR's folders have corpus.jsonl, queries.jsonl and qrels/<split>.tsv. In others the fields of a
    file's first record decide (`fields.Role`): KILT's queries have `input` and `output`, DPR's and
    pairs have a question, passages have a text. A table of two columns without a header, or TREC's
    topics, holds queries if a file of judgements belongs to it. Task and split are words of a
    file's name, as in `nq-train.json` or `faq.validation.queries.tsv`; `dev` means validation, a
    file without a task's name belongs to the task of the folder's name, and one without a split is
    divided into all three, but TREC's topics are test queries.

    A folder without a file of passages takes those that its questions quote (positives, or else
    answers), or its .txt, .md and .html files. Without questions it is a collection to be searched.
    Of a Hugging Face dataset, cloned or written by `save_to_disk`, Parquet or Arrow files count, or
    any tables in `data` if there is no other text than its card.

    Args:
        directory: a local folder.
        name: the task of files without one; "" takes the folder's name.

    Raises:
        ConfigError: no known format, or several files of passages; lists what was found.
    """
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        fix = "check the spelling, or give `taser prepare` a file of passages as PASSAGES"
        problem = "it is a file" if folder.exists() else "no such folder"
        fix = "give the folder that it is in" if folder.exists() else fix
        raise ConfigError(problem, where=os.fspath(directory), fix=fix)
    _refuse_twins(folder)
    name = name or folder.resolve().name
    beirs = [_of_name(folder, f"{kind}.jsonl") for kind in ("corpus", "queries")]
    if any(beirs) and (folder / "qrels").is_dir():
        return _of_beir(folder, name, *beirs)
    files: dict[_Role, list[str]] = {role: [] for role in _Role}
    visible = visible_files(folder)
    texts = texts_among(visible)
    # Beside tables they are about these.
    has_texts = not all(map(re.compile(_CARD).match, (text.name for text in texts)))
    for path in _files(folder, "*.parquet" if has_texts else "[!.]*"):
        if (found := _role(path)) is not None:
            files[found].append(str(path))
    qrels = {_name_of(file): file for file in files[_Role.QRELS]}
    judged = {
        file: QuestionFiles(file, qrels=qrels[_name_of(file)])
        for file in (*files[_Role.QUERIES], *files[_Role.TOPICS])
        if _name_of(file) in qrels
    }
    # Queries without a split may be judged by a file for each.
    undivided = {_name_of(file): file for file in files[_Role.QUERIES] if file not in judged}
    for (task, split), file in qrels.items():
        if split and (queries := undivided.get((task, ""))):
            judged[file] = QuestionFiles(queries, qrels=file)
    if len(files[_Role.TOPICS]) == len(qrels) == 1:
        # Of TREC's files the names say little.
        [topics] = files[_Role.TOPICS]
        judged[topics] = QuestionFiles(topics, qrels=next(iter(qrels.values())))
    if not files[_Role.PASSAGES] and not judged:
        # Without judgements a table of id and text is what there is to search.
        files[_Role.PASSAGES], files[_Role.QUERIES] = files[_Role.QUERIES], []
    used = {file for each in judged.values() for file in (each.questions, each.qrels)}
    for role in (_Role.QRELS, _Role.QUERIES, _Role.TOPICS):
        other = "queries" if role is _Role.QRELS else "judgements"
        for file in files[role]:
            if file not in used:
                logger.warning("%s is left out: no %s have its task and split", file, other)
    passages = files[_Role.PASSAGES]
    if not passages and not judged:
        is_of_texts = has_texts or (texts and not files[_Role.OTHER])
        passages = files[_Role.PAIRS] or ([str(folder)] if is_of_texts else [])
    if not passages or len(files[_Role.PASSAGES]) > 1:
        described = [
            f"{pathlib.Path(file).name}: {role.value}"
            for role, of_role in files.items()
            for file in of_role
        ]
        raise _unknown(folder, described)
    for file in files[_Role.OTHER]:
        logger.warning("%s is left out: %s", file, _Role.OTHER.value)
    # Further shards are read with the first.
    beside = {str(fields.first_shard(file)) for file in visible}.difference(*files.values())
    place = passages[0]
    if place == str(folder):
        beside, place = beside.difference(map(str, texts)), ".txt, .md and .html files"
    if beside:
        message = "%d other files are left out, such as %s: the passages are those of %s"
        logger.warning(message, len(beside), ", ".join(sorted(beside)[:3]), place)
    quoting = {file: QuestionFiles(file) for file in (*files[_Role.KILT], *files[_Role.PAIRS])}
    tasks = _by_task(judged | quoting, name, files[_Role.TOPICS])
    if files[_Role.KILT]:
        # KILT publishes gold for train and dev alone: dev is the test set, train has both others.
        for splits in tasks.values():
            if "validation" in splits and "test" not in splits:
                splits["test"] = splits.pop("validation")
            if "train" in splits and "validation" not in splits:
                splits["train+validation"] = splits.pop("train")
    return Detected(tuple(passages), tasks)


def _refuse_twins(folder: pathlib.Path) -> None:
    for packed in (*folder.glob("*.gz"), *folder.glob("qrels/*.gz")):
        if packed.with_suffix("").exists():
            problem = f"{packed.stem} and {packed.name} may contradict each other"
            raise ConfigError(problem, where=os.fspath(packed.parent), fix="delete one of them")


def given_passages(source: PassageSource) -> Iterator[Passage]:
    """Passages of a file or folder, of texts, records or a data frame, or passages as they are.

    A text or record without an id gets one from its content, so that equal ones are one passage.
    Empty passages, and repeated ones of files, are left out, and counted in the log.

    Example:
        >>> [(one.title, one.text) for one in given_passages([{"heading": "a", "content": "b"}])]
        [('a', 'b')]

    Args:
        source: a path that `read_passages` or `detect` takes; texts; mappings with the fields of
            tables (`fields.Role`); anything that speaks Arrow, such as pandas' or Polars' frames.

    Raises:
        ConfigError: a path that does not exist, or a folder of no known format.
        DataError: malformed input.
    """
    # A column alone, which has a list, is no table.
    if hasattr(source, "__arrow_c_stream__") and not hasattr(source, "to_list"):
        import pyarrow

        try:
            source = pyarrow.table(source).to_pylist()
        except pyarrow.ArrowException as error:
            fix = "give a column values of one type, as in astype(str)"
            raise DataError(f"no table of Arrow: {error}", where="passages", fix=fix) from error
    if isinstance(source, Mapping | Passage) or not isinstance(source, os.PathLike | Iterable):
        # The keys of a dictionary are texts, too.
        fix = "write [passage] to add one"
        raise DataError(f"found one {type(source).__name__}", where="passages", fix=fix)
    left_out, where = LeftOut(), "passages"
    if isinstance(source, str | os.PathLike):
        where = os.fspath(source)
        if not os.path.exists(source):
            fix = "check the spelling; write [text] to add a text"
            raise ConfigError("no such file or folder", where=where, fix=fix)
        for path in detect(source).passages if os.path.isdir(source) else (source,):
            yield from (entry.passage for entry in read_passages(path, left_out))
        source = ()
    for number, entry in enumerate(source):
        at, record = f"passage {number}", {"text": entry} if isinstance(entry, str) else entry
        if isinstance(record, Mapping):
            record = passage_of(Record(at, record))
        if not isinstance(record, Passage):
            fix = "write a text, a dictionary or a Passage"
            raise DataError(f"found {entry!r}", where=at, fix=fix)
        id = check_id(record.id or fields.content_id(record.title, record.text), where=at)
        if record.text.strip() or record.title.strip():
            yield dataclasses.replace(record, id=id)
        else:
            left_out.counts["empty passages"] += 1
    for kind, count in left_out.counts.items():
        logger.warning("%s: %d %s are left out", where, count, kind)


def _files(folder: pathlib.Path, tables: str) -> list[pathlib.Path]:
    """The files of a folder, and the tables of a Hugging Face dataset, by their names' pattern."""
    if any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        # Not cache-*.arrow, which `map` leaves there.
        paths = [*folder.rglob("data*.arrow")]
    else:
        # MTEB's have a folder for each kind.
        kinds = ("data", "corpus", "queries", "qrels")
        paths = [path for kind in kinds for path in folder.glob(f"{kind}/{tables}")]
        paths += folder.glob("[!.]*")
    # Further shards are read with the first.
    return sorted(set(map(fields.first_shard, paths)))


def _of_beir(folder: pathlib.Path, name: str, corpus: str | None, queries: str | None) -> Detected:
    """Split -> the queries judged in it; layout as published with Thakur et al., 2021."""
    judged = {
        qrels: QuestionFiles(queries, qrels=qrels)
        for split in SPLITS
        for qrels in map(str, sorted(folder.glob("qrels/[!.]*")))
        if queries and _name_of(qrels) == ("", split)
    }
    if not judged or corpus is None:
        here, missing = ("corpus", "queries") if corpus else ("queries", "corpus")
        missing += ".jsonl" if judged else ".jsonl with judgements in qrels/"
        raise _unknown(folder, [f"{here}.jsonl, but no {missing}"])
    return Detected((corpus,), _by_task(judged, name, ()))


def _of_name(folder: pathlib.Path, name: str) -> str | None:
    paths = (folder / name, folder / f"{name}.gz")
    return next((str(path) for path in paths if path.is_file()), None)


def _role(path: pathlib.Path) -> _Role | None:
    """The role of a file by its name and first lines; None if it has none of these roles."""
    name = path.name.lower().removesuffix(".gz")
    is_trec = name.startswith(("topics", "qrels")) and not name.endswith((".md", ".html", ".htm"))
    if not (is_trec or name.endswith(_FILES)) or not path.is_file() or not path.stat().st_size:
        return None
    if name.endswith(".qa.csv"):
        return _Role.PAIRS
    # Others of these are texts.
    other = None if name.endswith(".txt") else _Role.OTHER
    try:
        if (records := fields.read_records(path)) is not None:
            record = next(records, Record("", {}))
            role = _role_of_fields(name, record) or other
            has_split = "split" in map(str.lower, record.values)
            if role is _Role.PAIRS and has_split and not _name_of(str(path))[1]:
                problem, fix = "its column 'split' is not read", "write a file for each split"
                raise ConfigError(problem, where=os.fspath(path), fix=f"{fix}, or remove it")
            return role
    except DataError as error:
        # A program's settings, say: no array of records, nor one a line.
        if not name.endswith(".json"):
            raise
        problem = "neither an array of objects nor one a line"
        logger.warning("%s is left out: %s (%s)", path, problem, error.problem)
        return None
    if topic_tag(path):
        return _Role.TOPICS
    lines = first_lines(path, 2) or [""]
    if lines[0].lstrip().lower().startswith("<doc>"):
        return _Role.PASSAGES
    tabs = [line.count("\t") for line in lines]
    if "qrels" in name or (re.fullmatch(r"(\S+\s+){3}-?\d+", lines[0]) and tabs[0] != 1):
        return _Role.QRELS
    # A text may have a line with tabs.
    if not min(tabs) or (name.endswith(".txt") and tabs[0] != tabs[-1]):
        return other
    # Passages may have no title.
    has_title = tabs[-1] > 1 or re.search("passage|corpus|collection", name)
    return _Role.PASSAGES if has_title else _Role.QUERIES


def _role_of_fields(name: str, record: Record) -> _Role | None:
    roles = fields.roles_of(tuple(record.values))
    if {"input", "output"} <= record.values.keys():
        return _Role.KILT
    is_asked = Role.QUERY_ID in roles or (Role.QUESTION in roles and not record.is_pair())
    by_id = (is_asked and Role.PASSAGE_ID in roles) or {Role.QUERY_ID, Role.ID} <= roles.keys()
    # With ranks or texts, scores are a system's.
    is_graded = Role.RELEVANCE in roles and "rank" not in record.values
    are_ids = Role.QUERY_ID in roles and len(record.values) == 2
    if by_id and (is_graded or are_ids) and Role.TEXT not in roles:
        return _Role.QRELS
    is_named = re.search("quer|question|topic", name) is not None
    if Role.QUESTION in roles:
        return _Role.QUERIES if is_named and not record.is_pair() else _Role.PAIRS
    if Role.TEXT in roles:
        return _Role.QUERIES if is_named else _Role.PASSAGES
    return None


def _name_of(path: str) -> tuple[str, str]:
    """Task and split in a file's name; an empty string for each that it does not have.

    A shard of a Hugging Face dataset may have its split in its folder's name.
    """
    file = pathlib.Path(path)
    stem, shards = re.subn(fields.SHARD, "", file.name.split(".gz")[0].rpartition(".")[0])
    stem = f"{file.parent.name}.{stem}" if shards and file.parent.name in _SPLIT_WORDS else stem
    stem = re.sub(_WORD, lambda word: f".{word[0].lower()}.", stem)
    words = [word.strip("_") for word in re.split(r"[.\-]", stem.removesuffix(".qa"))]
    split = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), "")
    task = [word for word in words if word not in {"", *_SPLIT_WORDS, *_OTHER_WORDS}]
    return "-".join(task), split


def _task_name(name: str) -> str:
    """The name of a file or folder as that of a task: "FAQ (1)" is "FAQ_1"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-") or "task"


def _by_task(
    files: Mapping[str, QuestionFiles], name: str, topics: Collection[str]
) -> dict[str, dict[str, QuestionFiles]]:
    tasks: dict[str, dict[str, QuestionFiles]] = {}
    for path, questions in files.items():
        task, split = _name_of(path)
        task = _task_name(task or name)
        split = split or ("test" if path in topics else WHOLE)
        other = tasks.setdefault(task, {}).setdefault(split, questions)
        if other is not questions:
            problem = f"{other.qrels or other.questions} and {path} are both {split}"
            fix = "name one after another task or split, as in faq.test.queries.tsv"
            raise ConfigError(problem, where=f"task {task!r}", fix=fix)
    return tasks


def _unknown(folder: pathlib.Path, described: Sequence[str]) -> ConfigError:
    nothing = f"no file of text ({', '.join(_FILES)})"
    return ConfigError(
        f"no collection is recognised; found {'; '.join(described) or nothing}",
        where=str(folder),
        expected="one file of passages (a table or JSON lines with id, title and text), or of "
        "question and answer, or .txt, .md and .html files; queries beside judgements as in "
        "faq.train.queries.tsv and faq.train.qrels.tsv",
        fix="rename files or columns; or save them as CSV or .txt; or give them as PASSAGES and "
        "QUERIES (runs/prepare.gin)",
    )
