"""The collection of `taser compare`: detected files as one collection, and the lengths of texts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from taser_jax.commands.pipelines.compare_plan import FittedLength, fit_length
from taser_jax.commands.prepare import prepare_files
from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.options import PrepareOptions
from taser_jax.data.text.preprocessors import passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.devices.hosts import writes

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


@writes("{data_dir}/{collection}")
def prepare_detected(
    *,
    directories: Sequence[str],
    sizes: Mapping[str, int],
    data_dir: str,
    collection: str,
    validation_share: float = 0.1,
) -> dict[str, list[str]]:
    """Prepares folders as one collection.

    Args:
        directories: the folders, whose files are detected.
        sizes: the files' bytes; files of other sizes are another input.
        data_dir: folder of collections.
        collection: name of the collection.
        validation_share: share of training queries that a task without validation queries holds
            out.

    Returns:
        Task -> its splits.
    """
    del sizes
    prepare_files(
        data_dir=data_dir,
        collection=collection,
        directories=directories,
        options=PrepareOptions(validation_share=validation_share),
    )
    return list_tasks(data_dir, collection)


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
