"""Detects the format of a folder's files from their names and first lines."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import pathlib
import re
from collections.abc import Sequence

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.files import json_records, numbered_lines
from taser_jax.data.prepare.questions import QuestionFiles
from taser_jax.data.readers import beir
from taser_jax.storage.errors import ConfigError

_TEXT = (".json", ".jsonl", ".tsv", ".csv", ".txt")
_SPLIT_WORDS = {"train": "train", "dev": "validation", "valid": "validation"} | {
    split: split for split in SPLITS
}
_WHOLE = "train+validation+test"
# Words of file names that are not part of a task's name.
_OTHER_WORDS = {"queries", "questions", "query", "qa", "kilt", "dpr", "biencoder"}


class Format(enum.Enum):
    """A format that `taser prepare` reads; the value is the command's second word."""

    BEIR = "beir"
    DPR = "dpr"
    KILT = "kilt"
    TSV = "tsv"


class _Role(enum.Enum):
    """The role of a file, detected from its first lines."""

    PASSAGES = "passages"
    DPR = "questions of DPR"
    KILT = "queries of KILT"
    PAGES = "KILT's knowledge source"
    QRELS = "judgements"
    QUERIES = "queries of id and text"


@dataclasses.dataclass(frozen=True)
class DetectedFiles:
    """The files of one folder, as `taser prepare` takes them.

    Attributes:
        format: their format.
        passages: the file with the passages; the folder itself for BEIR.
        questions: task -> split -> files; empty for BEIR, whose reader finds them.
    """

    format: Format
    passages: str
    questions: dict[str, dict[str, QuestionFiles]]


def detect(directory: str | os.PathLike[str]) -> DetectedFiles:
    """Detects the format, passages, tasks and splits of the files in a folder.

    BEIR has a corpus.jsonl. KILT's queries are JSON lines with `input` and `output`, DPR's have
    `question`, or are a `.qa.csv`. A TSV of two columns holds queries if a file of judgements
    belongs to it; the only TSV of three columns or more holds the passages. Task and split are
    words of a file's name, as in `nq-train.json` or `faq.validation.queries.tsv`; `dev` means
    validation, and a file without a task's name belongs to the task of the folder's name.

    Args:
        directory: a local folder.

    Raises:
        ConfigError: no known format, or several files of passages; lists what was found.
    """
    folder = pathlib.Path(directory)
    if not folder.is_dir():
        raise ConfigError("no such folder", where=os.fspath(directory), fix="check the spelling")
    if any((folder / f"corpus.jsonl{suffix}").is_file() for suffix in ("", ".gz")):
        if not beir.qrels_files(folder):
            raise _unknown(folder, ["corpus.jsonl, but no qrels/"])
        return DetectedFiles(Format.BEIR, str(folder), {})
    roles: dict[str, _Role] = {}
    for path in sorted(folder.iterdir()):
        if path.name.removesuffix(".gz").endswith(_TEXT):
            role = _role(path)
            if role is not None:
                roles[str(path)] = role
    passages = [path for path, role in roles.items() if role in (_Role.PASSAGES, _Role.PAGES)]
    described = [f"{pathlib.Path(path).name}: {role.value}" for path, role in roles.items()]
    for role, format in ((_Role.KILT, Format.KILT), (_Role.DPR, Format.DPR)):
        if role in roles.values() and len(passages) == 1:
            files = {path: QuestionFiles(path) for path, found in roles.items() if found is role}
            found = _by_task(files, folder, whole=_WHOLE if format is Format.KILT else "")
            return DetectedFiles(format, passages[0], found)
    judged = _judged([path for path, role in roles.items() if role is _Role.QRELS])
    files = {
        path: QuestionFiles(path, qrels=judged[_words(path)])
        for path, role in roles.items()
        if role is _Role.QUERIES and _words(path) in judged
    }
    if not files or len(passages) != 1:
        raise _unknown(folder, described)
    return DetectedFiles(Format.TSV, passages[0], _by_task(files, folder))


def _role(path: pathlib.Path) -> _Role | None:
    """The role of a file by its name and first lines; None if it has none of these roles."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".qa.csv"):
        return _Role.DPR
    if name.endswith((".json", ".jsonl")):
        record = next((record for _, record in json_records(path)), {})
        if {"input", "output"} <= record.keys():
            return _Role.KILT
        if {"wikipedia_id", "text"} <= record.keys():
            return _Role.PAGES
        return _Role.DPR if "question" in record else None
    lines = [line.rstrip("\r\n") for _, line in itertools.islice(numbered_lines(path), 2)]
    if not lines:
        return None
    columns = lines[-1].split("\t")
    trec = re.fullmatch(r"\S+\s+\S+\s+\S+\s+\d+", lines[0]) and lines[0].count("\t") != 1
    if lines[0].startswith("query-id") or trec:
        return _Role.QRELS
    if len(columns) >= 3:
        return _Role.PASSAGES
    if len(columns) == 2:
        # Passages may have no title.
        return _Role.PASSAGES if "passage" in name or "corpus" in name else _Role.QUERIES
    return None


def _words(path: str) -> tuple[str, str]:
    """Task and split in a file's name; an empty string for each that it does not have."""
    stem = pathlib.Path(path).name.split(".gz")[0].rpartition(".")[0]
    words = [word for word in re.split(r"[.\-]", stem.removesuffix(".qa")) if word]
    split = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), "")
    kept = [
        word for word in words if word not in _SPLIT_WORDS and word not in {*_OTHER_WORDS, "qrels"}
    ]
    return "-".join(kept), split


def _judged(qrels: Sequence[str]) -> dict[tuple[str, str], str]:
    return {_words(path): path for path in qrels}


def _by_task(
    files: dict[str, QuestionFiles], folder: pathlib.Path, *, whole: str = ""
) -> dict[str, dict[str, QuestionFiles]]:
    found: dict[str, dict[str, QuestionFiles]] = {}
    for path, questions in files.items():
        task, split = _words(path)
        split = split or whole
        splits = found.setdefault(task or folder.resolve().name, {})
        if not split or split in splits:
            raise ConfigError(
                f"no split in the name of {pathlib.Path(path).name}"
                if not split
                else f"{splits[split].questions} and {path} are both {split}",
                where=str(folder),
                expected="one file for each task and split, named like nq-train.json",
                fix="rename the files, or move others out of the folder",
            )
        splits[split] = questions
    # KILT publishes gold for train and dev alone: dev is the test set, and train has both others.
    if whole:
        for splits in found.values():
            if "validation" in splits and "test" not in splits:
                splits["test"] = splits.pop("validation")
            if "train" in splits and "validation" not in splits:
                splits["train+validation"] = splits.pop("train")
    return found


def _unknown(folder: pathlib.Path, described: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"no collection is recognised; found {'; '.join(described) or 'no file of text'}",
        where=str(folder),
        expected="BEIR (corpus.jsonl, queries.jsonl, qrels/), or one TSV of passages beside DPR's "
        "or KILT's questions, or beside queries and judgements (faq.train.queries.tsv, "
        "faq.train.qrels.tsv)",
        fix="prepare it with one of `taser prepare beir`, `dpr`, `kilt` and `tsv`, which take "
        "files of any name",
    )
