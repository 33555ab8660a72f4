"""What a retriever is made of, and `retriever.json`, which says where its parts lie."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from taser_jax.assembly.model_directory import VOCABULARY, LoadedModel, write_model
from taser_jax.data.collections.store import PassageStore, write_collection
from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.retrieval.bm25 import Bm25Index, title_and_text
from taser_jax.retrieval.embeddings import write_embeddings
from taser_jax.retrieval.fusion import ScoreNormalization
from taser_jax.retrieval.index import build_index
from taser_jax.retrieval.passages import Passages, Sparse
from taser_jax.storage.artifacts import FilePath, is_remote, write_json
from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import read_typed, to_plain

RETRIEVER_FILE = "retriever.json"
_VERSION = 1
# Most questions have fewer tokens: padding them to a passage's 32 would double their time.
_QUERY_MULTIPLE = 16
# As many queries share one call of the model.
_TOGETHER = 64
_FIX = "run the command that wrote it again"
_FOLDERS = {"model_dir", "index_dir", "data_dir", "bm25_dir"}
# Of run.json, how texts become tokens.
TEXT_FACTS = (
    *("query_length", "query_lengths", "query_normalization", "query_prompt"),
    *("passage_length", "passage_prompt", "titles"),
)


@dataclasses.dataclass(frozen=True)
class RetrieverParts:
    """The directories that make a retriever.

    Attributes:
        model_dir: the trained model.
        index_dir: an index of its embeddings.
        data_dir: folder of collections.
        collection: the collection.
        bm25_dir: BM25's index of it, where a hybrid was recommended.
        alpha: weight of BM25's scores there.
        normalization: of the scores for which α was chosen; None means by the scores themselves.
    """

    model_dir: str
    index_dir: str
    data_dir: str
    collection: str
    bm25_dir: str | None = None
    alpha: float | None = None
    normalization: ScoreNormalization | None = None


def write_parts(directory: FilePath, parts: RetrieverParts) -> None:
    """Writes the `retriever.json` that `Retriever.load` reads.

    Folders below it are relative to it, so that the whole can be moved; others are absolute.
    """
    values = {name: value for name, value in to_plain(parts).items() if value is not None}
    root = pathlib.Path(directory).resolve()
    for name in _FOLDERS & values.keys():
        if is_remote(values[name]):
            continue
        folder = pathlib.Path(values[name]).resolve()
        values[name] = str(folder.relative_to(root) if folder.is_relative_to(root) else folder)
    write_json(pathlib.Path(directory) / RETRIEVER_FILE, {"format_version": _VERSION, **values})


def read_parts(directory: FilePath) -> RetrieverParts | None:
    """The parts that a directory's `retriever.json` names; None where it has none.

    Raises:
        DataError: it is damaged, of another format version, or names a folder that is not there.
    """
    path = pathlib.Path(directory) / RETRIEVER_FILE
    if not path.is_file():
        return None
    parts = read_typed(path, RetrieverParts, fix=_FIX, version=_VERSION)
    if (parts.bm25_dir is None) != (parts.alpha is None):
        raise DataError("one of bm25_dir and alpha without the other", where=str(path), fix=_FIX)
    named = {name: folder for name in _FOLDERS if (folder := getattr(parts, name)) is not None}
    folders = {
        # A path would lose one slash of gs://.
        name: folder if is_remote(folder) else str(path.parent / folder)
        for name, folder in named.items()
    }
    for name, folder in sorted(folders.items()):
        if not is_remote(folder) and not os.path.isdir(folder):
            problem = f"{name} is {named[name]!r}, and no such folder is there any more"
            fix = "move that folder back, or write into this file where it is now"
            raise DataError(problem, where=str(path), fix=fix)
    return RetrieverParts(
        **folders, collection=parts.collection, alpha=parts.alpha, normalization=parts.normalization
    )


def open_sparse(parts: RetrieverParts | None, store: PassageStore) -> Sparse | None:
    """BM25's index, where retriever.json names one."""
    if parts is None or parts.bm25_dir is None or parts.alpha is None:
        return None
    prints = {"collection": store.fingerprint}
    return Sparse(Bm25Index(parts.bm25_dir, fingerprints=prints), parts.alpha, parts.normalization)


def write_retriever(
    root: pathlib.Path,
    model: LoadedModel,
    passages: Passages,
    embeddings: Float[np.ndarray, "passages dim"],
    *,
    facts: Mapping[str, object],
    vocabulary: Vocabulary,
) -> None:
    """Writes model, passages and indexes, and last the `retriever.json` that names them.

    Args:
        root: a folder without a retriever.
        model: the model.
        passages: those that are searched.
        embeddings: of the same passages.
        facts: how texts become tokens, for run.json.
        vocabulary: the model's.
    """
    names = (str(root / name) for name in ("model", "index", "data", "bm25"))
    model_dir, index_dir, data_dir, bm25_dir = names
    vocabulary.save(f"{model_dir}/{VOCABULARY}")
    write_model(model_dir, model.model, model.params, facts=facts, partitioner=model.partitioner)
    stored = passages.get(passages.rows())
    store = write_collection(data_dir, "passages", stored)
    collection = {"collection": store.fingerprint}
    prints = {"model": model.fingerprint, **collection}
    normalization = model.model.config.normalization.value
    write_embeddings(root / "embeddings", embeddings, prints, normalization)
    build_index(root / "embeddings", index_dir)
    parts = RetrieverParts(model_dir, index_dir, data_dir, "passages")
    if (sparse := passages.sparse) is not None:
        texts = map(title_and_text, stored)
        Bm25Index.build(texts, bm25_dir, config=sparse.index.config, fingerprints=collection)
        parts = dataclasses.replace(
            parts, bm25_dir=bm25_dir, alpha=sparse.alpha, normalization=sparse.normalization
        )
    write_parts(root, parts)


def query_multiple(lengths: Int[np.ndarray, " queries"]) -> int:
    """Queries are padded to multiples of it.

    Example:
        For 32 queries of up to 20 tokens it is 32: they are one call of the model, and a server
        meets few shapes. For a thousand queries it is 16, and each length has its own calls.

    Args:
        lengths: tokens of each query.
    """
    if len(lengths) > _TOGETHER:
        return _QUERY_MULTIPLE
    longest = int(lengths.max(initial=1))
    return max(_QUERY_MULTIPLE, 1 << (longest - 1).bit_length())
