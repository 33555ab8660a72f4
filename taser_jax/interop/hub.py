"""A checkpoint's directory, from this machine or from the Hugging Face hub."""

from __future__ import annotations

import os
import pathlib
import re

from taser_jax.errors import DataError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = (
    *("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")


def fetch(source: str | os.PathLike[str]) -> pathlib.Path:
    """The directory of a checkpoint; what is no directory here is looked up on the hub.

    Only configuration, vocabulary and weights are downloaded, once, into Hugging Face's cache
    (`HF_HOME`); with `HF_HUB_OFFLINE=1` only that cache is read.

    Args:
        source: a directory, or a hub id such as "google-bert/bert-base-uncased".

    Raises:
        DataError: neither a directory nor a hub id, or the hub cannot be reached or lacks it.
    """
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source) or path.exists():
        raise DataError(
            "not a directory" if path.exists() else "no such directory",
            where=str(source),
            expected="a directory with config.json and weights, or a hub id (owner/name)",
        )
    directory = _download(source, _SAFETENSORS)
    if not any(directory.glob("model*.safetensors*")):
        directory = _download(source, _PYTORCH)
    return directory


def _download(hub_id: str, weights: tuple[str, ...]) -> pathlib.Path:
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=[*_TOKENIZER_FILES, *weights]
        )
    except Exception as error:
        # Offline, name resolution, proxy, HTTP and time-out errors share no base class.
        raise DataError(
            f"not a directory here, and not to be had from the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)})",
            where=hub_id,
            expected="a local directory, or an id on a hub that can be reached",
            fix="download the model where there is a network (config.json, model.safetensors, "
            "vocab.txt) and give the path of that directory in place of the id",
        ) from error
    return pathlib.Path(found)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
