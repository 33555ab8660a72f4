"""Retrieval tasks of mteb and ir_datasets by name, as folders in BEIR's format.

    taser prepare mteb:SciFact        taser compare ir_datasets:beir/scifact --pretrained=minilm

The library reads the task, from this machine where its data are at hand, and a folder in
`~/.cache/taser_jax/tasks` gets what BEIR publishes: corpus.jsonl, queries.jsonl and
qrels/<split>.tsv. From there on it is a folder like any other.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from taser_jax.interop.hub import first_line
from taser_jax.storage.artifacts import FilePath, file_name, replacing
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.publishing import cache_folder

# Others' names of a split -> BEIR's.
_DEVELOPMENT = ("dev", "val", "valid", "validation")
_SPLITS = {"train": "train", **dict.fromkeys(_DEVELOPMENT, "dev"), "test": "test"}
TextT = TypeVar("TextT")


@dataclasses.dataclass
class _Task:
    """What BEIR's files hold.

    Attributes:
        passages: id -> title, text.
        queries: id -> text.
        qrels: split -> query -> passage -> grade.
    """

    passages: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    queries: dict[str, str] = dataclasses.field(default_factory=dict)
    qrels: dict[str, dict[str, dict[str, int]]] = dataclasses.field(default_factory=dict)

    def add(
        self,
        split: str,
        passages: Iterable[tuple[str, str, str]],
        queries: Iterable[tuple[str, str]],
        judged: Iterable[tuple[str, str, int]],
    ) -> None:
        """Adds a split, whose passages may be there already.

        Raises:
            DataError: an id has two texts.
        """
        for id, title, text in passages:
            _add(self.passages, id, (title, text), "passage")
        for id, text in queries:
            _add(self.queries, id, text, "query")
        grades = self.qrels.setdefault(split, {})
        for query, passage, grade in judged:
            grades.setdefault(query, {})[passage] = grade

    def write(self, folder: pathlib.Path) -> None:
        """Writes the files into a new folder."""
        (folder / "qrels").mkdir(parents=True)
        with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
            for id, (title, text) in self.passages.items():
                _write_line(file, {"_id": id, "title": title, "text": text})
        with open(folder / "queries.jsonl", "w", encoding="utf-8") as file:
            for id, text in self.queries.items():
                _write_line(file, {"_id": id, "text": text})
        for split, grades in self.qrels.items():
            with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8") as file:
                file.write("query-id\tcorpus-id\tscore\n")
                for query, judged in grades.items():
                    file.writelines(f"{query}\t{id}\t{grade}\n" for id, grade in judged.items())


def _add(texts: dict[str, TextT], id: str, text: TextT, kind: str) -> None:
    if texts.setdefault(id, text) != text:
        raise DataError(f"{kind} {id!r} has two texts", where="splits", fix="name one split")


def _write_line(file: TextIO, value: object) -> None:
    file.write(json.dumps(value, ensure_ascii=False) + "\n")


def local(
    names: FilePath | Sequence[FilePath] | Mapping[str, FilePath],
) -> FilePath | Sequence[FilePath] | Mapping[str, FilePath]:
    """`as_folder` of one name, of several, or of those that labels have."""
    if isinstance(names, Mapping):
        return {label: as_folder(name) for label, name in names.items()}
    if isinstance(names, str | os.PathLike):
        return as_folder(names)
    return [as_folder(name) for name in names]


def as_folder(name: FilePath) -> FilePath:
    """The folder of a task "mteb:NAME" or "ir_datasets:NAME"; other names are folders already.

    What has been read once is kept.

    Args:
        name: of a task, or a path.

    Raises:
        ConfigError: the library is not installed, has no such task, or the task needs more than
            passages, queries and judgements.
        DataError: its data could not be read.
    """
    library, _, task = os.fspath(name).partition(":")
    if library not in _READERS or not task:
        return name
    folder = cache_folder("tasks", library, file_name(task))
    if folder.is_dir():
        logger.info("%s: read before; delete %s to read it again", name, folder)
        return str(folder)
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        fix = how_to_install(library)
        raise ConfigError(f"{library} is not installed", where=str(name), fix=fix) from error
    with phase(f"read {name}"), replacing(folder, recorded=False) as scratch:
        try:
            read = _READERS[library](module, task)
        except (ConfigError, DataError):
            raise
        except KeyError as error:
            fix = f"choose a retrieval task of {library}"
            raise ConfigError(f"no such task ({error})", where=str(name), fix=fix) from error
        except Exception as error:
            # Offline, HTTP, archive and format errors share no base class.
            reason = (first_line(str(error)) or type(error).__name__)[:200]
            fix = f"let {library} read it where there is a network, and copy its cache here"
            raise DataError(
                f"{library} could not read it: {reason}", where=str(name), fix=fix
            ) from error
        read.write(pathlib.Path(scratch))
    return str(folder)


def _of_mteb(mteb: types.ModuleType, name: str) -> _Task:
    task, result = mteb.get_task(name), _Task()
    task.load_data()
    if hasattr(task, "convert_v1_dataset_format_to_v2"):
        task.convert_v1_dataset_format_to_v2(num_proc=None)
    subsets = getattr(task, "dataset", None) or {}
    if len(subsets) != 1:
        raise _unfit(name, f"{len(subsets)} subsets", "choose a task of one language")
    (splits,) = subsets.values()
    for split, data in splits.items():
        if not isinstance(data, Mapping) or "relevant_docs" not in data:
            raise _unfit(name, "no relevant passages", "choose a task of type Retrieval")
        if data.get("top_ranked") or "instruction" in data["queries"].column_names:
            raise _unfit(name, "candidates or instructions", "choose a task of type Retrieval")
        result.add(
            _SPLITS.get(split, "test"),
            ((row["id"], row.get("title") or "", row["text"]) for row in data["corpus"]),
            ((row["id"], row["text"]) for row in data["queries"]),
            (
                (query, passage, grade)
                for query, judged in data["relevant_docs"].items()
                for passage, grade in judged.items()
            ),
        )
    return result


def _of_ir_datasets(ir_datasets: types.ModuleType, name: str) -> _Task:
    whole, result = ir_datasets.load(name), _Task()
    splits = {_SPLITS.get(name.rpartition("/")[2], "test"): whole}
    if not whole.has_qrels():
        splits = {}
        for part, split in _SPLITS.items():
            try:
                splits.setdefault(split, ir_datasets.load(f"{name}/{part}"))
            except KeyError:
                continue
    splits = {name: data for name, data in splits.items() if data.has_qrels()}
    if not splits:
        raise _unfit(name, "no judgements", f"choose one of its parts, such as {name}/test")
    for split, data in splits.items():
        result.add(
            split,
            ((doc.doc_id, getattr(doc, "title", ""), _text(doc)) for doc in data.docs_iter()),
            ((query.query_id, _text(query)) for query in data.queries_iter()),
            ((judged.query_id, judged.doc_id, judged.relevance) for judged in data.qrels_iter()),
        )
    return result


def _text(record: Any) -> str:
    """A document's text without its title; a query's own words."""
    text = getattr(record, "text", None)
    return text if isinstance(text, str) else record.default_text()


def _unfit(name: str, content: str, fix: str) -> ConfigError:
    expected = "passages, queries and judgements"
    return ConfigError(f"the task has {content}", where=name, expected=expected, fix=fix)


_READERS: Mapping[str, Callable[[types.ModuleType, str], _Task]] = {
    "mteb": _of_mteb,
    "ir_datasets": _of_ir_datasets,
}
