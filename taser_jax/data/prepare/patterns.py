"""Question files by pattern: one name with {task} and {split} for all of them."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from taser_jax.data.collections.store import SPLITS
from taser_jax.data.files import file_exists
from taser_jax.data.prepare.options import QuestionFiles
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger

# The files of a task and split, or a pattern for several.
Files = FilePath | QuestionFiles
Tasks = Files | Mapping[str, Files | Mapping[str, Files]]

_PLACE = re.compile(r"\{(task|split)\}")
_SPLIT = "|".join(SPLITS)
# A file may hold several splits.
WHOLE = "+".join(SPLITS)
_SPLITS = rf"(?:{_SPLIT})(?:\+(?:{_SPLIT}))*"
_SHOWN = 8


def by_task_and_split(given: Tasks) -> dict[str, dict[str, QuestionFiles]]:
    """Question files by task and split, where patterns stand for all files whose names match.

    Example:
        "sample/{task}.{split}.queries.tsv" finds sample/code.train.queries.tsv and gives
        {"code": {"train": QuestionFiles("sample/code.train.queries.tsv")}};
        {"code": "sample/{split}.tsv"} finds one task's files, and {"code": "a.tsv"} is one file of
        all three splits, {"code": {"train+validation+test": "a.tsv"}}.

    Args:
        given: a pattern, or task -> pattern or file, or task -> split -> file. In `QuestionFiles`,
            `questions` is searched for, and the other files are those of the task and split found.

    Returns:
        Task -> split -> files.

    Raises:
        ConfigError: nothing matches, the pattern lacks a placeholder, or a file that belongs to
            the questions does not exist; says what matched and what did not.
    """
    if not isinstance(given, Mapping):
        return _found(_files(given), None)
    named: dict[str, dict[str, QuestionFiles]] = {}
    for task, files in given.items():
        if isinstance(files, Mapping):
            named[task] = {split: _files(one) for split, one in files.items()}
        else:
            named |= _found(_files(files), task)
    return named


def below(directory: FilePath, files: Any) -> Any:
    """The same files, or patterns, relative paths taken from a folder."""
    if isinstance(files, Mapping):
        return {name: below(directory, inner) for name, inner in files.items()}
    if isinstance(files, QuestionFiles):
        named = {name: getattr(files, name) for name in ("questions", "qrels")}
        return dataclasses.replace(
            files, **{name: below(directory, path) for name, path in named.items() if path}
        )
    if isinstance(files, str | os.PathLike):
        return os.path.join(os.fspath(directory), files)
    return [below(directory, path) for path in files]


def _files(given: Files) -> QuestionFiles:
    return given if isinstance(given, QuestionFiles) else QuestionFiles(given)


def _found(given: QuestionFiles, task: str | None) -> dict[str, dict[str, QuestionFiles]]:
    """The files of all tasks, or of one, that match a pattern."""
    pattern = os.fspath(given.questions)
    if task is not None:
        pattern = pattern.replace("{task}", task)
    places = set(_PLACE.findall(pattern))
    if task is None and "task" not in places:
        raise ConfigError(
            "the pattern has no {task}",
            where=pattern,
            fix="write one such as 'folder/{task}.{split}.queries.tsv', or {task: {split: path}}",
        )
    if not places:
        return {str(task): {WHOLE: given}}
    found: dict[str, dict[str, QuestionFiles]] = collections.defaultdict(dict)
    others = []
    for path in _candidates(pattern):
        match = re.fullmatch(_expression(pattern, _SPLITS), path)
        if match is None:
            others.append(path)
            continue
        named = {"task": task or "", "split": WHOLE, **match.groupdict()}
        found[named["task"]][named["split"]] = _filled(given, **named)
    if not found:
        raise _nothing_matches(pattern, others)
    with_split = [name for name in found if set(re.split(r"\W", name)) & {*SPLITS}]
    if "split" not in places and with_split:
        raise ConfigError(
            f"the pattern has no {{split}}, and finds {_few(with_split)} as tasks",
            where=pattern,
            fix="write {split} where the files' names have train, validation or test",
        )
    ordered = {
        name: {split: splits[split] for split in sorted(splits, key=_place_of_split)}
        for name, splits in sorted(found.items())
    }
    _check_qrels(ordered)
    if others:
        logger.info("%s: skipped, since their names have no split: %s", pattern, _few(others))
    return ordered


def _place_of_split(name: str) -> int:
    return SPLITS.index(name.split("+")[0])


def _filled(given: QuestionFiles, *, task: str, split: str) -> QuestionFiles:
    """The files of one task and split."""
    values = {"task": task, "split": split}

    def fill(text: FilePath) -> str:
        return _PLACE.sub(lambda place: values[place[1]], os.fspath(text))

    texts = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return dataclasses.replace(given, **{name: fill(text) for name, text in texts.items() if text})


def _check_qrels(found: Mapping[str, Mapping[str, QuestionFiles]]) -> None:
    paths = [files.qrels for splits in found.values() for files in splits.values()]
    there = [os.fspath(path) for path in paths if path and file_exists(path)]
    if absent := [os.fspath(path) for path in paths if path and os.fspath(path) not in there]:
        raise ConfigError(
            f"missing: {_few(absent)}; there is: {_few(there)}",
            where="QuestionFiles.qrels",
            fix="add one for each file of questions, or correct the pattern",
        )


def _nothing_matches(pattern: str, others: list[str]) -> ConfigError:
    base, _ = _parted(pattern)
    folder = epath.Path(base)
    if others:
        seen = f"{_few(others)}: no split there is one of {', '.join(SPLITS)}"
    elif not folder.is_dir():
        seen = f"there is no folder {base}"
    else:
        seen = f"{base} has {_few(sorted(path.name for path in folder.iterdir()))}"
    return ConfigError(
        f"no file matches; {seen}",
        where=pattern,
        fix="correct the pattern, or name the files: {task: {split: path}}",
    )


def _candidates(pattern: str) -> list[str]:
    """Files that match the pattern with any text in its placeholders, sorted."""
    base, rest = _parted(pattern)
    folder = epath.Path(base)
    if not folder.is_dir():
        return []
    paths = [path for path in folder.glob(_PLACE.sub("*", rest)) if path.is_file()]
    prefix = pattern[: len(pattern) - len(rest)]
    loose = _expression(pattern, "[^/]+")
    names = sorted(prefix + path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if re.fullmatch(loose, name)]


def _parted(pattern: str) -> tuple[str, str]:
    """The folder before the first placeholder, and the rest of the pattern."""
    head = pattern[: pattern.index("{")].rpartition("/")
    return (head[0] or head[1] or "."), pattern[len(head[0] + head[1]) :]


def _expression(pattern: str, splits: str) -> str:
    """A regular expression for matching names; a repeated placeholder must match the same text."""
    seen: set[str] = set()
    parts = []
    for number, part in enumerate(_PLACE.split(pattern)):
        if number % 2 == 0:
            parts.append(re.escape(part))
        elif part in seen:
            parts.append(f"(?P={part})")
        else:
            seen.add(part)
            parts.append(f"(?P<{part}>{'[^/]+' if part == 'task' else splits})")
    return "".join(parts)


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest if names else "none"
