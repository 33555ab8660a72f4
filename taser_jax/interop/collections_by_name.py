"""Retrieval tasks of mteb and ir_datasets by name, as folders in BEIR's format.

    taser prepare mteb:SciFact        taser compare ir_datasets:beir/scifact --pretrained=minilm

The library reads the task, from this machine where its data are at hand, and a folder in
`~/.cache/taser_jax/tasks` gets what BEIR publishes: corpus.jsonl, queries.jsonl and
qrels/<split>.tsv. From there on it is a folder like any other.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from taser_jax.interop.hub import first_line
from taser_jax.storage.artifacts import FilePath, file_name, replacing
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.publishing import cache_folder

# Others' names of a split -> BEIR's.
_DEVELOPMENT = ("dev", "val", "valid", "validation")
_SPLITS = {"train": "train", **dict.fromkeys(_DEVELOPMENT, "dev"), "test": "test"}


# A split's name; its passages (id, title, text), queries (id, text) and judgements (query, passage,
# grade).
_Split = tuple[
    str,
    Iterable[tuple[str, str, str]],
    Iterable[tuple[str, str]],
    Iterable[tuple[str, str, int]],
]


def _write(splits: Iterable[_Split], folder: pathlib.Path) -> None:
    """Writes BEIR's files into a new folder; splits may share passages and queries.

    Raises:
        DataError: an id has two texts.
    """
    passages: dict[str, dict[str, str]] = {}
    queries: dict[str, dict[str, str]] = {}
    qrels: dict[str, dict[tuple[str, str], int]] = {}
    for split, texts, questions, judged in splits:
        for id, title, text in texts:
            _add(passages, {"_id": id, "title": title, "text": text})
        for id, text in questions:
            _add(queries, {"_id": id, "text": text})
        qrels.setdefault(split, {}).update({(query, id): grade for query, id, grade in judged})
    (folder / "qrels").mkdir(parents=True)
    for name, records in (("corpus", passages), ("queries", queries)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for record in records.values():
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for split, grades in qrels.items():
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"{query}\t{id}\t{grade}\n" for (query, id), grade in grades.items())


def _add(records: dict[str, dict[str, str]], record: dict[str, str]) -> None:
    id = record["_id"]
    if records.setdefault(id, record) != record:
        raise DataError(f"{id!r} has two texts", where="splits", fix="name one split")


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
            _write(_READERS[library](module, task), pathlib.Path(scratch))
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
    return str(folder)


def _of_mteb(mteb: types.ModuleType, name: str) -> Iterator[_Split]:
    task = mteb.get_task(name)
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
        yield (
            _SPLITS.get(split, "test"),
            ((row["id"], row.get("title") or "", row["text"]) for row in data["corpus"]),
            ((row["id"], row["text"]) for row in data["queries"]),
            (
                (query, passage, grade)
                for query, judged in data["relevant_docs"].items()
                for passage, grade in judged.items()
            ),
        )


def _of_ir_datasets(ir_datasets: types.ModuleType, name: str) -> Iterator[_Split]:
    whole = ir_datasets.load(name)
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
        yield (
            split,
            ((doc.doc_id, getattr(doc, "title", ""), _text(doc)) for doc in data.docs_iter()),
            ((query.query_id, _text(query)) for query in data.queries_iter()),
            ((judged.query_id, judged.doc_id, judged.relevance) for judged in data.qrels_iter()),
        )


def _text(record: Any) -> str:
    """A document's text without its title; a query's own words."""
    text = getattr(record, "text", None)
    return text if isinstance(text, str) else record.default_text()


def _unfit(name: str, content: str, fix: str) -> ConfigError:
    expected = "passages, queries and judgements"
    return ConfigError(f"the task has {content}", where=name, expected=expected, fix=fix)


_READERS: Mapping[str, Callable[[types.ModuleType, str], Iterator[_Split]]] = {
    "mteb": _of_mteb,
    "ir_datasets": _of_ir_datasets,
}
