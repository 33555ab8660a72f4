"""T5X checkpoints, read without T5X: legacy (msgpack and zarr), orbax, and the mix of 2022-23."""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping

import jax
import ml_dtypes
import msgspec
import numpy as np
import tensorstore
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict
from msgpack.exceptions import ExtraData, FormatError, OutOfData, StackError

from taser_jax.models.dual_encoder import Params
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import track
from taser_jax.storage.typed_files import Natural, Positive, read_typed

_INDEX_FILE = "checkpoint"
_ORBAX_FILE = "_METADATA"
_STEP_DIRECTORY = re.compile(r"checkpoint_(\d+)")
_TENSORFLOW_MARK = b"model_checkpoint_path"
_PLACEHOLDER = "PLACEHOLDER://"
# From this version on bfloat16 is written natively; before, as unsigned integer bits.
_NATIVE_BFLOAT16 = 3
# Bytes of one array: a number in a header can claim any amount of memory.
_LARGEST_ARRAY = 16 << 30
_FIX_COPY = "copy the checkpoint again, as a whole with hidden files: files may be truncated"
_UNREADABLE = (ValueError, KeyError, TypeError, ExtraData, FormatError, OutOfData, StackError)


def read_t5x(directory: str | pathlib.Path) -> Params:
    """Reads the parameters of a T5X checkpoint, but no optimiser state.

    In the legacy form a msgpack file "checkpoint" has the tree. Each leaf is either stored inline
    or as a TensorStore description of a zarr directory beside it, depending on the writer's
    partitioning.

    Example:
        >>> read_t5x("t5_1_1_base/checkpoint_1000000")["encoder"]["encoder_norm"]["scale"].shape
        (768,)

    Args:
        directory: directory of one step, or of a run, whose latest `checkpoint_<step>` is read.

    Returns:
        Nested dicts of arrays in their stored dtypes.

    Raises:
        DataError: no checkpoint, a TensorFlow checkpoint, missing or truncated files.
    """
    root = _step_root(pathlib.Path(directory))
    return _read_orbax(root) if (root / _ORBAX_FILE).is_file() else _read_msgpack(root)


def write_t5x(directory: str | pathlib.Path, params: Params, *, step: int) -> pathlib.Path:
    """Writes parameters as a checkpoint that T5X restores without optimiser state.

    The file is T5X's legacy form with all arrays inline, for weights that fit a host's memory.

    Args:
        directory: of the run.
        params: a dual encoder's, nested dicts of arrays.
        step: the training step.

    Returns:
        The step's directory, checkpoint_<step>.
    """
    optimizer = {
        "target": jax.tree.map(np.asarray, params),
        "state": {"step": np.int32(step), "param_states": {}},
    }
    path = pathlib.Path(directory) / f"checkpoint_{step}"
    with replacing(path) as scratch:
        scratch.mkdir()
        content = msgpack_serialize({"version": _NATIVE_BFLOAT16, "optimizer": optimizer})
        (scratch / _INDEX_FILE).write_bytes(content)
    return path


def is_t5x_checkpoint(directory: str | pathlib.Path) -> bool:
    """Whether a directory has a checkpoint for `read_t5x`."""
    directory = pathlib.Path(directory)
    return _root(directory) is not None or bool(_steps(directory))


def _root(directory: pathlib.Path) -> pathlib.Path | None:
    """The directory of one step's tree, which Orbax stores one level down."""
    for root in (directory / "state", directory):
        if any((root / name).is_file() for name in (_ORBAX_FILE, _INDEX_FILE)):
            return root
    return None


def _steps(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    if not directory.is_dir():
        return {}
    matches = ((_STEP_DIRECTORY.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}


def _step_root(directory: pathlib.Path) -> pathlib.Path:
    if not directory.is_dir():
        raise DataError("no such directory", where=str(directory), fix="give a T5X checkpoint")
    root = _root(directory)
    if root is not None:
        return root
    steps = _steps(directory)
    if steps:
        return _step_root(steps[max(steps)])
    if any(directory.glob("*.index")):
        raise _tensorflow_error(directory)
    problem = f'no T5X checkpoint: neither a file "{_INDEX_FILE}" (legacy) nor "{_ORBAX_FILE}"'
    fix = "name the directory of one step, checkpoint_<step>, copied as a whole"
    raise DataError(problem, where=str(directory), fix=fix)


def _tensorflow_error(path: pathlib.Path) -> DataError:
    problem = "this is a TensorFlow checkpoint (Mesh TensorFlow T5), not one of T5X"
    fix = "convert it with T5X, or take the model's Hugging Face version"
    return DataError(problem, where=str(path), fix=fix)


def _read_orbax(directory: pathlib.Path) -> Params:
    # Imported here because it takes seconds and legacy checkpoints do not need it.
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        tree = checkpointer.metadata(directory.absolute()).item_metadata.tree
        item = {"target": _target(tree, directory)}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        restored = checkpointer.restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True),
        )
    except (*_UNREADABLE, AttributeError, OSError, RecursionError) as error:
        problem = f"no complete orbax checkpoint: {_first_line(error)}"
        raise DataError(problem, where=str(directory), fix=_FIX_COPY) from error
    finally:
        checkpointer.close()
    return jax.tree.map(np.asarray, restored["target"])


def _read_msgpack(directory: pathlib.Path) -> Params:
    path = directory / _INDEX_FILE
    content = path.read_bytes()
    if content.startswith(_TENSORFLOW_MARK):
        raise _tensorflow_error(path)
    try:
        tree = msgpack_restore(content)
    except (*_UNREADABLE, UnicodeDecodeError) as error:
        problem = f"no msgpack, as T5X writes it: {_first_line(error) or type(error).__name__}"
        raise DataError(problem, where=str(path), fix=_FIX_COPY) from error
    if not isinstance(tree, dict):
        problem = f"this holds {type(tree).__name__} in place of a map"
        raise DataError(problem, where=str(path), fix=_FIX_COPY)
    version = np.asarray(tree.get("version", 0))
    if version.size != 1 or version.dtype.kind not in "iu" or version < 0:
        problem = f"version is {str(tree['version'])[:60]!r} in place of a whole number"
        raise DataError(problem, where=f"{path}, field 'version'", fix=_FIX_COPY)
    target = _target(tree.get("optimizer") or tree.get("_optimizer") or tree, path)
    leaves = flatten_dict(target, is_leaf=lambda _, node: "kvstore" in node)
    read = {
        name: _leaf(leaf, directory, name, int(version.item()))
        for name, leaf in track(leaves.items(), description="read T5X arrays", total=len(leaves))
        if leaf is not None
    }
    return unflatten_dict(read)


def _target(tree: Params, where: pathlib.Path) -> Params:
    target = tree.get("target") if isinstance(tree, dict) else None
    if not isinstance(target, dict) or not target:
        keys = ", ".join(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        problem = f'no parameters in a tree "target": there is {keys or "nothing"}'
        raise DataError(problem, where=str(where), fix=_FIX_COPY)
    return target


def _leaf(node: object, directory: pathlib.Path, name: tuple[str, ...], version: int) -> np.ndarray:
    """The array of a leaf: stored inline, or in a zarr directory."""
    if isinstance(node, str) and node.startswith(_PLACEHOLDER):
        # Orbax beside msgpack stored native bfloat16 for all versions of the tree.
        return _read_zarr(directory, node.removeprefix(_PLACEHOLDER), name)
    if isinstance(node, dict):
        array = _read_zarr(directory, _stored_path(node, name), name)
    elif isinstance(node, np.ndarray | np.generic | int | float):
        array = np.asarray(node)
    else:
        problem = f"parameter {'/'.join(map(str, name))} is {str(node)[:60]!r}, not an array"
        raise DataError(problem, where=str(directory / _INDEX_FILE), fix=_FIX_COPY)
    # NumPy has no name for bfloat16: some writers stored its two bytes as void.
    if array.dtype == "V2" or (version < _NATIVE_BFLOAT16 and array.dtype == np.uint16):
        return array.view(ml_dtypes.bfloat16)
    return array


def _stored_path(spec: Mapping[str, object], name: tuple[str, ...]) -> str:
    """Path of a description's files; in the oldest files beside `kvstore`, not inside."""
    kvstore = spec.get("kvstore")
    if not isinstance(kvstore, dict):
        problem = f"parameter {'/'.join(map(str, name))} is stored in {str(kvstore)[:60]!r}, no map"
        raise DataError(problem, where=f"{_INDEX_FILE}, field 'kvstore'", fix=_FIX_COPY)
    path = kvstore.get("path") or spec.get("path") or ""
    return str(path).rstrip("/")


def _read_zarr(directory: pathlib.Path, stored: str, name: tuple[str, ...]) -> np.ndarray:
    # Only the last part of a path on the writer's machine or bucket is useful here.
    stored_path = pathlib.PurePosixPath(stored)
    relative = stored_path.name if stored_path.is_absolute() or ".." in stored else stored
    path = directory / relative
    parameter = "/".join(map(str, name))
    metadata_file = path / ".zarray"
    # Unlike pathlib's, this accepts names of any length and with any character.
    if not stored or not os.path.isfile(metadata_file):
        problem = f"no zarr array for parameter {parameter}"
        raise DataError(problem, where=str(metadata_file), fix=_FIX_COPY)
    try:
        metadata = read_typed(metadata_file, _Zarray)
        _check_size(metadata, metadata_file, parameter)
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path.absolute())},
            # T5X writes every chunk.
            "fill_missing_data_reads": metadata.fill_value is not None,
        }
        return np.asarray(tensorstore.open(spec, open=True).result().read().result())
    except (*_UNREADABLE, OSError) as error:
        problem = f"parameter {parameter} cannot be read: {_first_line(error)}"
        raise DataError(problem, where=str(path), fix=_FIX_COPY) from error


class _Zarray(msgspec.Struct):
    """The .zarray file of an array."""

    shape: list[Natural]
    chunks: list[Positive]
    dtype: str
    fill_value: object = None


def _check_size(metadata: _Zarray, path: pathlib.Path, parameter: str) -> None:
    """Refuses arrays or chunks beyond the limit before memory is taken, and absent chunks.

    Raises:
        DataError: naming the size, or how many chunks are missing.
    """
    try:
        item = np.dtype(metadata.dtype).itemsize
    except TypeError as error:
        problem = f"NumPy has no dtype {metadata.dtype!r}"
        raise DataError(problem, where=f"{path}, field 'dtype'", fix=_FIX_COPY) from error
    for field, shape in {"shape": metadata.shape, "chunks": metadata.chunks}.items():
        size = item * math.prod(shape)
        if size > _LARGEST_ARRAY:
            raise DataError(
                f"parameter {parameter}, of shape {shape} takes {size / 2**30:,.0f} GiB",
                where=f"{path}, field {field!r}",
                expected="at most 16 GiB for one array",
                fix=_FIX_COPY,
            )

    sizes = zip(metadata.shape, metadata.chunks, strict=True)
    chunks = math.prod(-(-size // chunk) for size, chunk in sizes)
    files = sum(len(names) for _, _, names in os.walk(path.parent))
    if metadata.fill_value is None and chunks > files:
        # There may be far too many to ask for each.
        problem = (
            f"{chunks - files + 1:,} of {chunks:,} chunks of parameter {parameter} are missing"
        )
        raise DataError(problem, where=str(path.parent), fix=_FIX_COPY)


def _first_line(error: BaseException) -> str:
    return str(error).split(" [", 1)[0].split("\n", 1)[0]
