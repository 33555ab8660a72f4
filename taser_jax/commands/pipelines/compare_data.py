"""The collection of `taser compare`: detected files as one collection, and the lengths of texts."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.commands.pipelines.compare_plan import FittedLength, fit_length
from taser_jax.commands.prepare import prepare_beir, prepare_dpr, prepare_kilt, prepare_tsv
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.detection import DetectedFiles, Format
from taser_jax.data.prepare.kilt_options import KiltOptions
from taser_jax.data.prepare.questions import PrepareOptions, QuestionFiles
from taser_jax.data.seqio_tasks.merged_collections import merge_collections
from taser_jax.data.text.preprocessors import passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.devices.hosts import writes
from taser_jax.storage.errors import ConfigError

# Texts whose tokens are counted.
_SAMPLE = 2000
_LONGEST = {"query": 64, "passage": 256}


def collection_name(directories: Sequence[str]) -> str:
    """The folder's name, or those of several, as a name for files."""
    names = [pathlib.Path(directory).resolve().name for directory in directories]
    slug = re.sub(r"\W+", "_", "_".join(names).lower()).strip("_")
    return slug if slug[:1].isalpha() else f"c_{slug}"


def file_sizes(directories: Sequence[str]) -> dict[str, int]:
    """File -> its bytes, of all files in folders: what tells that they have changed."""
    paths = [path for one in directories for path in sorted(pathlib.Path(one).rglob("*"))]
    return {str(path): path.stat().st_size for path in paths if path.is_file()}


def check_detected(detected: Sequence[DetectedFiles]) -> None:
    """Refuses folders with tasks of one name, and several with KILT's files.

    Raises:
        ConfigError: naming the folders.
    """
    folders = collections.defaultdict(list)
    for files in detected:
        for task in [_folder(files)] if files.format is Format.BEIR else files.questions:
            folders[task].append(files.passages)
    if clashes := {task: paths for task, paths in folders.items() if len(paths) > 1}:
        found = "; ".join(f"task {task!r} in {', '.join(paths)}" for task, paths in clashes.items())
        fix = "rename a folder of BEIR, or the files of others: tasks are named after them"
        raise ConfigError(found, where="DIRECTORIES", expected="tasks of different names", fix=fix)
    kilt = [files.passages for files in detected if files.format is Format.KILT]
    if len(kilt) > 1:
        found = f"{len(kilt)} folders of KILT's files: {', '.join(kilt)}"
        fix = "put the queries into one folder: KILT's share one file of passages"
        raise ConfigError(found, where="DIRECTORIES", fix=fix)


@writes("{data_dir}/{collection}")
def prepare_detected(
    *,
    detected: Sequence[DetectedFiles],
    sizes: Mapping[str, int],
    data_dir: str,
    collection: str,
    validation_share: float = 0.1,
) -> dict[str, list[str]]:
    """Prepares folders as one collection; those of several formats as one for each, then merged.

    Args:
        detected: the folders' files.
        sizes: their bytes; files of other sizes are another input.
        data_dir: folder of collections.
        collection: name of the collection; of one format's, `docs_beir` beside `docs_tsv`.
        validation_share: share of training queries that a task without validation queries holds
            out.

    Returns:
        Task -> its splits.
    """
    groups: dict[Format, list[DetectedFiles]] = {}
    for files in detected:
        groups.setdefault(files.format, []).append(files)
    names = {
        format: collection if len(groups) == 1 else f"{collection}_{format.value}"
        for format in groups
    }
    options = PrepareOptions(validation_share=validation_share)
    for format, group in groups.items():
        _prepare(format, group, data_dir, names[format], options)
    if len(groups) > 1:
        merge_collections(data_dir, collection, list(names.values()))
    return list_tasks(data_dir, collection)


def _prepare(
    format: Format,
    group: Sequence[DetectedFiles],
    data_dir: str,
    collection: str,
    options: PrepareOptions,
) -> None:
    if format is Format.BEIR:
        folders = {_folder(files): files.passages for files in group}
        prepare_beir(data_dir=data_dir, collection=collection, directories=folders, options=options)
    elif format is Format.KILT:
        # KILT's reader takes paths, not `QuestionFiles`.
        (kilt,) = group
        queries = {
            task: {split: str(files.questions) for split, files in splits.items()}
            for task, splits in kilt.questions.items()
        }
        is_pages = kilt.passages.removesuffix(".gz").endswith((".json", ".jsonl"))
        source = {"knowledge_source" if is_pages else "passages": kilt.passages}
        prepare_kilt(
            data_dir=data_dir,
            collection=collection,
            queries=queries,
            options=KiltOptions(strictness=options),
            **source,
        )
    else:
        labels = {f"{format.value}{number}": files for number, files in enumerate(group)}
        tasks = {
            task: {split: _labelled(each, label, len(group)) for split, each in splits.items()}
            for label, files in labels.items()
            for task, splits in files.questions.items()
        }
        passages = {label: files.passages for label, files in labels.items()}
        prepare = prepare_dpr if format is Format.DPR else prepare_tsv
        prepare(
            data_dir=data_dir,
            collection=collection,
            passages=passages if len(group) > 1 else group[0].passages,
            tasks=tasks,
            options=options,
        )


def _labelled(files: QuestionFiles, label: str, folders: int) -> QuestionFiles:
    """Of several folders, the one whose passages the ids are of."""
    named = {"passages": label} if folders > 1 else {}
    return QuestionFiles(files.questions, qrels=files.qrels, **named)


def _folder(files: DetectedFiles) -> str:
    return pathlib.Path(files.passages).resolve().name


def fit_lengths(
    *,
    data_dir: str,
    collection: str,
    vocabulary: str,
    prompt: str,
    own_length: int | None,
    given: Mapping[str, int],
) -> dict[str, FittedLength]:
    """Lengths of queries and passages, from a sample of the texts.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        vocabulary: directory of the vocabulary.
        prompt: text before every query.
        own_length: tokens that the pretrained model takes: texts are cut there and nowhere below;
            None cuts at the 95th percentiles, and at 64 and 256 tokens.
        given: lengths to use instead, {"query": ..., "passage": ...} or one of them.
    """
    words = load_vocabulary(vocabulary)
    texts = [
        prompt + queries[row].text
        for task, splits in list_tasks(data_dir, collection).items()
        for split in splits
        for queries in [QuerySet.open(data_dir, collection, task, split)]
        for row in _sampled(len(queries))
    ]
    store = PassageStore.open(data_dir, collection)
    passages = store.get_many(_sampled(len(store)))
    titles, bodies = [one.title for one in passages], [one.text for one in passages]
    counts = {
        "query": [2 + len(ids) for ids in words.encode(texts)] or [_LONGEST["query"]],
        "passage": [len(ids) for ids in passage_ids(titles, bodies, words, None)],
    }
    return {
        side: fit_length(
            found,
            longest=own_length or _LONGEST[side],
            given=given.get(side),
            share=0.95 if own_length is None else 1.0,
        )
        for side, found in counts.items()
    }


def _sampled(count: int) -> list[int]:
    """Rows of a sample, in order."""
    rng = np.random.default_rng(0)
    size = min(count, _SAMPLE)
    return sorted(rng.choice(count, size=size, replace=False).tolist())
