"""Detected folders as the Gin lines of the `taser prepare` commands that read them."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

from taser_jax.data.prepare.detection import DetectedFiles, Format
from taser_jax.storage.errors import ConfigError

# Parameter of `taser prepare FORMAT` that names its queries.
_QUERIES = {Format.DPR: "tasks", Format.TSV: "tasks", Format.KILT: "queries"}


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One `taser prepare` command.

    Attributes:
        format: the format that it reads, its second word.
        collection: the collection that it writes.
        lines: Gin lines that name its files.
    """

    format: Format
    collection: str
    lines: tuple[str, ...]


def preparations(detected: Sequence[DetectedFiles], *, collection: str) -> list[Preparation]:
    """The commands that prepare folders: one for each format.

    Folders of one format become the collection itself, and their lines set the macros that all
    commands share. Several formats become a collection each, `my_data_beir` beside `my_data_tsv`,
    to be merged; each command then has bindings of its own.

    Args:
        detected: the folders.
        collection: name of the collection of all of them.

    Raises:
        ConfigError: two folders have a task of one name, or are both KILT's.
    """
    _check_names(detected)
    groups: dict[Format, list[DetectedFiles]] = {}
    for one in detected:
        groups.setdefault(one.format, []).append(one)
    if len(groups.get(Format.KILT, ())) > 1:
        raise ConfigError(
            f"{len(groups[Format.KILT])} folders of KILT's files: "
            + ", ".join(one.passages for one in groups[Format.KILT]),
            where="DIRECTORIES",
            expected="one: KILT's queries share one file of passages",
            fix="put the queries into one folder, beside that file",
        )
    if len(groups) == 1:
        ((format, found),) = groups.items()
        return [Preparation(format, collection, tuple(_lines(found)))]
    return [
        Preparation(format, f"{collection}_{format.value}", tuple(_own_lines(found, collection)))
        for format, found in groups.items()
    ]


def _check_names(detected: Sequence[DetectedFiles]) -> None:
    folders = collections.defaultdict(list)
    for found in detected:
        for task in _tasks(found):
            folders[task].append(found.passages)
    if clashes := {task: paths for task, paths in folders.items() if len(paths) > 1}:
        raise ConfigError(
            "; ".join(f"task {task!r} in {', '.join(paths)}" for task, paths in clashes.items()),
            where="DIRECTORIES",
            expected="tasks of different names",
            fix="rename a folder of BEIR, or the files of others: tasks are named after them",
        )


def _tasks(found: DetectedFiles) -> list[str]:
    return [_folder_name(found)] if found.format is Format.BEIR else list(found.questions)


def _own_lines(detected: Sequence[DetectedFiles], collection: str) -> list[str]:
    """The lines of one command's own parameters, in place of macros."""
    format = detected[0].format
    command = f"prepare_{format.value}"
    macros = {
        "DIRECTORIES": f"{command}.directories",
        "PASSAGES": f"{command}.passages",
        "QUERIES": f"{command}.{_QUERIES.get(format, '')}",
    }
    lines = [f"{command}.collection = {f'{collection}_{format.value}'!r}"]
    for line in _lines(detected):
        name, _, value = line.partition(" = ")
        lines.append(f"{macros[name]} = {value}" if name in macros else line)
    return lines


def _lines(detected: Sequence[DetectedFiles]) -> list[str]:
    """Gin lines of the passages and queries of folders of one format."""
    format = detected[0].format
    if format is Format.BEIR:
        return [f"DIRECTORIES = { ({_folder_name(found): found.passages for found in detected}) }"]
    if format is Format.KILT:
        # KILT's reader takes paths, not `QuestionFiles`.
        (kilt,) = detected
        queries = {
            task: {split: str(files.questions) for split, files in splits.items()}
            for task, splits in kilt.questions.items()
        }
        is_pages = kilt.passages.removesuffix(".gz").endswith((".json", ".jsonl"))
        name = "prepare_kilt.knowledge_source" if is_pages else "PASSAGES"
        return [f"{name} = {kilt.passages!r}", f"QUERIES = {queries}"]
    labels = {f"{format.value}{number}": found for number, found in enumerate(detected)}
    passages = {label: found.passages for label, found in labels.items()}
    lines: list[str] = []
    tasks: list[str] = []
    for label, found in labels.items():
        for task, splits in found.questions.items():
            named = []
            for split, files in splits.items():
                scope = f"{label}_{len(lines)}"
                named.append(f"{split!r}: @{scope}/QuestionFiles()")
                fields = {"questions": files.questions, "qrels": files.qrels}
                fields["passages"] = label if len(labels) > 1 else None
                lines += [
                    f"{scope}/QuestionFiles.{field} = {str(value)!r}"
                    for field, value in fields.items()
                    if value is not None
                ]
            tasks.append(f"    {task!r}: {{{', '.join(named)}}},")
    return [
        f"PASSAGES = {passages if len(labels) > 1 else detected[0].passages!r}",
        *("QUERIES = {", *tasks, "}"),
        *lines,
    ]


def _folder_name(found: DetectedFiles) -> str:
    return pathlib.Path(found.passages).resolve().name
