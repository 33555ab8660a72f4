"""Retrieval tasks of mteb and ir_datasets by name, as folders in BEIR's format.

    taser prepare mteb:SciFact        taser compare ir_datasets:beir/scifact --pretrained=minilm

The library reads the task, from this machine where its data are at hand, and a folder in
`~/.cache/taser_jax/tasks` gets what BEIR publishes: corpus.jsonl, queries.jsonl and
qrels/<split>.tsv. From there on it is a folder like any other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from taser_jax.interop.hub import first_line
from taser_jax.storage.artifacts import FilePath, file_name, replacing
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.publishing import cache_folder

# Others' names of a split -> BEIR's.
_DEVELOPMENT = ("dev", "val", "valid", "validation")
_SPLITS = {"train": "train", **dict.fromkeys(_DEVELOPMENT, "dev"), "test": "test"}


# Name of a split; its passages and queries, in BEIR's form; query, passage and grade of judgements.
_Record = dict[str, str]
_Split = tuple[str, Iterable[_Record], Iterable[_Record], Iterable[tuple[str, str, int]]]


def _write(splits: Iterable[_Split], folder: pathlib.Path) -> None:
    """Writes BEIR's files into a new folder; splits may share passages and queries.

    Raises:
        DataError: an id has two texts.
    """
    records: dict[str, dict[str, _Record]] = {"corpus": {}, "queries": {}}
    qrels: dict[str, dict[tuple[str, str], int]] = {}
    for split, passages, queries, judged in splits:
        for name, of_split in (("corpus", passages), ("queries", queries)):
            for record in of_split:
                id = record["_id"]
                if records[name].setdefault(id, record) != record:
                    raise DataError(f"{id!r} has two texts", where="splits", fix="name one split")
        qrels.setdefault(split, {}).update({(query, id): grade for query, id, grade in judged})
    (folder / "qrels").mkdir(parents=True)
    for name, by_id in records.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for record in by_id.values():
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for split, grades in qrels.items():
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"{query}\t{id}\t{grade}\n" for (query, id), grade in grades.items())


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
        judged = data["relevant_docs"].items()
        yield (
            _SPLITS.get(split, "test"),
            (_passage(row["id"], row["text"], row.get("title")) for row in data["corpus"]),
            ({"_id": row["id"], "text": row["text"]} for row in data["queries"]),
            ((query, id, grade) for query, grades in judged for id, grade in grades.items()),
        )


def _of_ir_datasets(ir_datasets: types.ModuleType, name: str) -> Iterator[_Split]:
    whole = ir_datasets.load(name)
    splits = {_SPLITS.get(name.rpartition("/")[2], "test"): whole}
    if not whole.has_qrels():
        splits = {}
        for part, split in _SPLITS.items():
            with contextlib.suppress(KeyError):
                splits.setdefault(split, ir_datasets.load(f"{name}/{part}"))
    splits = {name: data for name, data in splits.items() if data.has_qrels()}
    if not splits:
        raise _unfit(name, "no judgements", f"choose one of its parts, such as {name}/test")
    for split, data in splits.items():
        titled = ((doc, getattr(doc, "title", "")) for doc in data.docs_iter())
        yield (
            split,
            (_passage(doc.doc_id, _text(doc, title), title) for doc, title in titled),
            ({"_id": query.query_id, "text": _text(query)} for query in data.queries_iter()),
            ((judged.query_id, judged.doc_id, judged.relevance) for judged in data.qrels_iter()),
        )


def _passage(id: str, text: str, title: str | None) -> _Record:
    return {"_id": id, "title": title or "", "text": text}


def _text(record: Any, title: str = "") -> str:
    """Its text; the default text of documents without one begins with their title."""
    text = getattr(record, "text", None)
    return text if isinstance(text, str) else record.default_text().removeprefix(f"{title} ")


def _unfit(name: str, content: str, fix: str) -> ConfigError:
    expected = "passages, queries and judgements"
    return ConfigError(f"the task has {content}", where=name, expected=expected, fix=fix)


_READERS: Mapping[str, Callable[[types.ModuleType, str], Iterator[_Split]]] = {
    "mteb": _of_mteb,
    "ir_datasets": _of_ir_datasets,
}
