"""What is prepared and how: files of questions, by name or pattern, and options of all formats."""

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
from taser_jax.storage.artifacts import FilePath
from taser_jax.storage.errors import ConfigError, check_fields
from taser_jax.storage.progress import logger

VALIDATION = "validation"
# Shares of the splits of a file that holds several.
SHARES: Mapping[str, float] = {"train": 0.8, VALIDATION: 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionFiles:
    """The files with the questions of one task and split.

    Attributes:
        questions: of any format (`read_questions`).
        qrels: judgements (TREC or BEIR columns), for queries whose file has none; they replace the
            positives in `questions`, and questions that are not judged are left out unless they
            have answers.
        passages: label of the passage file whose ids the questions and qrels use. Needed if several
            files are merged and an id means different passages in them.
    """

    questions: FilePath
    qrels: FilePath | None = None
    passages: str = ""


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """How files become a collection; options named after tasks are for these tasks only.

    Attributes:
        strict: whether to refuse, at their first, empty passages, repeated passages, positives and
            judged ids that are not in the files; otherwise they are left out, counted and listed.
        validation_share: share of the training questions that become a validation split, where a
            task comes without one; never of the test questions. 0 makes none.
        task_shares: task -> shares of the splits of its file, where one holds several, in place of
            `SHARES`.
        validation_last: number of questions at the end of a file with several splits that are its
            validation split, instead of a share (TACO-DR: the last 500 of each training file); 0
            uses the shares.
        split_groups: task -> pattern; questions whose ids have the same match share a split.
        split_by_page: tasks of KILT's whose questions share a split where their positives are on
            one page: no split has a page of another's (CMU DoG's films).
        train_samples: task -> number of training questions that are kept, chosen by hash, before a
            validation share is taken from them; with `validation_last`, the number kept of the
            whole file, before its last questions are split off (TACO-DR: zsRE's 99,500 are 100,000
            less 500).
        page_gold_tasks: tasks of KILT's whose gold is always the whole page, as TACO-DR's AIDA.
        passage_words: words of a passage of what is cut: text files and KILT's pages. Set it to
            what the model reads in one piece.
        entity_tasks: tasks whose questions mark a mention with [START_ENT] and [END_ENT].
        distractors: share of the passages that are kept although no question has them as a
            positive, chosen by a hash of their ids. Below 1 the collection is smaller and still has
            every positive.
    """

    strict: bool = False
    validation_share: float = 0.0
    task_shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation_last: int = 0
    split_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    split_by_page: tuple[str, ...] = ()
    train_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    page_gold_tasks: tuple[str, ...] = ()
    passage_words: int = 100
    entity_tasks: tuple[str, ...] = ()
    distractors: float = 1.0

    def __post_init__(self) -> None:
        share = "at least 0 and below 1, such as 0.1"
        check_fields(self, "validation_share", is_valid=lambda x: 0 <= x < 1, expected=share)
        last = "0 or more questions"
        check_fields(self, "validation_last", is_valid=lambda n: n >= 0, expected=last)
        check_fields(self, "passage_words", is_valid=lambda n: n >= 1, expected="1 or more")
        kept = "a share between 0 and 1"
        check_fields(self, "distractors", is_valid=lambda x: 0 <= x <= 1, expected=kept)
        if self.validation_last and (self.split_groups or self.split_by_page):
            problem = "validation_last, whose questions may be part of a group of the others"
            fix = "set validation_last = 0, or leave out split_groups and split_by_page"
            raise ConfigError(problem, where="PrepareOptions", fix=fix)

    def check_tasks(self, tasks: Mapping[str, object]) -> None:
        """Checks that the tasks that options name are tasks of the files.

        Raises:
            ConfigError: naming the first option with another task.
        """
        for field in dataclasses.fields(self):
            named = getattr(self, field.name)
            if not isinstance(named, Mapping | tuple | list):
                continue
            if unknown := [task for task in named if task not in tasks]:
                raise ConfigError(
                    f"it names {', '.join(map(repr, unknown))}; the tasks are {', '.join(tasks)}",
                    where=f"PrepareOptions.{field.name}",
                    fix="correct the name, or leave the option out",
                )


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
        fix = "write one such as 'folder/{task}.{split}.queries.tsv', or {task: {split: path}}"
        raise ConfigError("the pattern has no {task}", where=pattern, fix=fix)
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
        problem = f"the pattern has no {{split}}, and finds {_few(with_split)} as tasks"
        fix = "write {split} where the files' names have train, validation or test"
        raise ConfigError(problem, where=pattern, fix=fix)
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
        fix = "add one for each file of questions, or correct the pattern"
        where = "QuestionFiles.qrels"
        raise ConfigError(f"missing: {_few(absent)}; there is: {_few(there)}", where=where, fix=fix)


def _nothing_matches(pattern: str, others: list[str]) -> ConfigError:
    base, _ = _parted(pattern)
    folder = epath.Path(base)
    if others:
        seen = f"{_few(others)}: no split there is one of {', '.join(SPLITS)}"
    elif not folder.is_dir():
        seen = f"there is no folder {base}"
    else:
        seen = f"{base} has {_few(sorted(path.name for path in folder.iterdir()))}"
    fix = "correct the pattern, or name the files: {task: {split: path}}"
    return ConfigError(f"no file matches; {seen}", where=pattern, fix=fix)


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
