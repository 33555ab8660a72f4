"""Named tensors of a Hugging Face checkpoint directory, as NumPy arrays."""

from __future__ import annotations

import pathlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by it
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.typed_files import read_typed

CONFIG_FILE = "config.json"
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PYTORCH = "pytorch_model.bin"
PYTORCH_INDEX = "pytorch_model.bin.index.json"
_WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, PYTORCH, PYTORCH_INDEX)

# safetensors' names of the dtypes that NumPy has; quantised weights have others.
_FLOATS, _OTHERS = ("F64", "F32", "F16", "BF16"), ("C64", "BOOL")
_DTYPES = {*_FLOATS, *_OTHERS, *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
_LISTED = 5
_FIX_DIRECTORY = "give the directory that the model's save_pretrained wrote"
_FIX_DOWNLOAD = "download the checkpoint again, all of its files"
_FIX_QUANTISED = "quantised checkpoints are not supported: use the original checkpoint"

Tensors = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
_T = TypeVar("_T")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_tensors(directory: pathlib.Path) -> Tensors:
    """All tensors of a checkpoint by name, from safetensors or else PyTorch files.

    Args:
        directory: the checkpoint's directory.

    Returns:
        Arrays in the checkpoint's dtypes.

    Raises:
        DataError: no weights, a missing shard, or a truncated or damaged file.
        ConfigError: there are only PyTorch files, and PyTorch is not installed.
    """
    directory = pathlib.Path(directory)
    if (directory / SAFETENSORS).is_file():
        return _read_safetensors(directory / SAFETENSORS)
    if (directory / SAFETENSORS_INDEX).is_file():
        return _read_shards(directory / SAFETENSORS_INDEX, _read_safetensors)
    if (directory / PYTORCH).is_file():
        return _read_pytorch(directory / PYTORCH)
    if (directory / PYTORCH_INDEX).is_file():
        return _read_shards(directory / PYTORCH_INDEX, _read_pytorch)
    raise DataError(
        f"no weights: none of {', '.join(_WEIGHTS)}", where=str(directory), fix=_FIX_DIRECTORY
    )


def read_shapes(directory: pathlib.Path) -> Shapes | None:
    """Shapes of a checkpoint's tensors; None if finding them would require reading the values.

    Raises:
        DataError: a missing shard, or a truncated or damaged file.
    """
    directory = pathlib.Path(directory)
    if (directory / SAFETENSORS).is_file():
        return _read_safetensors_shapes(directory / SAFETENSORS)
    if (directory / SAFETENSORS_INDEX).is_file():
        return _read_shards(directory / SAFETENSORS_INDEX, _read_safetensors_shapes)
    return None


def read_config(directory: str | pathlib.Path, kind: type[_T]) -> tuple[pathlib.Path, _T]:
    """The `config.json` of a Hugging Face directory: its path and its content.

    Args:
        directory: the checkpoint's directory.
        kind: its type.

    Raises:
        DataError: there is none, it is not a JSON object, or a field is invalid.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    if not path.is_file():
        problem = f"no {CONFIG_FILE}" if path.parent.is_dir() else "no such directory"
        raise DataError(problem, where=str(path.parent), fix=_FIX_DIRECTORY)
    return path, read_typed(path, kind)


def _read_shards(
    index: pathlib.Path, read: Callable[[pathlib.Path], dict[str, _T]]
) -> dict[str, _T]:
    shard_of = read_typed(index, _Index).weight_map
    shards = sorted(set(shard_of.values()))
    outside = [shard for shard in shards if pathlib.PurePath(shard).name != shard or shard == ".."]
    if outside:
        where = f"{index}, field 'weight_map'"
        problem = f"shards outside of this directory: {listed(outside)}"
        raise DataError(problem, where=where, fix="take the checkpoint from a place that you trust")
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        problem = f"{len(absent)} of {len(shards)} shards are absent: {listed(absent)}"
        raise DataError(problem, where=str(index.parent), fix=_FIX_DOWNLOAD)
    tensors: dict[str, _T] = {}
    for shard in shards:
        tensors |= read(index.parent / shard)
    missing = [name for name in shard_of if name not in tensors]
    if missing:
        problem = f"tensors of the index are in no shard: {listed(missing)}"
        raise DataError(problem, where=str(index), fix=_FIX_DOWNLOAD)
    return tensors


def _read_safetensors(path: pathlib.Path) -> Tensors:
    # An array of a mapped file would keep the whole file mapped.
    return _of_safetensors(path, lambda file, name: np.array(file.get_tensor(name)))


def _read_safetensors_shapes(path: pathlib.Path) -> Shapes:
    return _of_safetensors(path, lambda file, name: tuple(file.get_slice(name).get_shape()))


def _of_safetensors(path: pathlib.Path, read: Callable[[Any, str], _T]) -> dict[str, _T]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            for name in names:
                _check_dtype(name, file.get_slice(name).get_dtype(), path)
            return {name: read(file, name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _check_dtype(name: str, dtype: str, path: pathlib.Path) -> None:
    if dtype not in _DTYPES:
        raise DataError(
            f"{name} is of type {dtype}, not F32, F16 or BF16", where=str(path), fix=_FIX_QUANTISED
        )


def _read_pytorch(path: pathlib.Path) -> Tensors:
    try:
        import torch
    except ImportError as error:
        problem = "PyTorch is not installed, and these weights are in PyTorch's own format"
        raise ConfigError(problem, where=str(path), fix=how_to_install("torch")) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Errors of files, zip and pickle, and torch's refusals to unpickle, share no base class.
        raise _damaged(path, error) from error
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise _damaged(path, ValueError("not a flat dictionary of tensors"))
    try:
        return {name: _to_numpy(tensor, torch) for name, tensor in state.items()}
    except (TypeError, RuntimeError) as error:
        # NumPy has no 8-bit floats, and no sparse or quantised tensors.
        raise _damaged(path, error) from error


def _to_numpy(tensor: Any, torch: types.ModuleType) -> np.ndarray:
    # NumPy has no bfloat16; float32 represents all of its values.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _damaged(path: pathlib.Path, error: Exception) -> DataError:
    reason = re.sub(r"\s+", " ", str(error)).strip()[:200] or type(error).__name__
    fix = "the file is truncated or damaged: download or copy it again"
    return DataError(f"cannot be read: {reason}", where=str(path), fix=fix)


def listed(names: Sequence[str]) -> str:
    """The first few names, and the number of others."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
