"""T5X checkpoints, read without T5X: legacy (msgpack and zarr), orbax, and the mix of 2022-23."""

from __future__ import annotations

import json
import pathlib
import re

import jax
import ml_dtypes
import numpy as np
import tensorstore
from flax.serialization import msgpack_restore, msgpack_serialize
from flax.traverse_util import flatten_dict, unflatten_dict

from taser_jax.interop.hub import first_line
from taser_jax.models.dual_encoder import Params
from taser_jax.storage.artifacts import replacing
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import track

_INDEX_FILE = "checkpoint"
_ORBAX_FILE = "_METADATA"
_STEP_DIRECTORY = re.compile(r"checkpoint_(\d+)")
_PLACEHOLDER = "PLACEHOLDER://"
# From this version on bfloat16 is written natively; before, as unsigned integer bits.
_NATIVE_BFLOAT16 = 3


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
    if root is None:
        problem = f'neither a file "{_INDEX_FILE}" (legacy) nor "{_ORBAX_FILE}"'
        if any(pathlib.Path(directory).glob("*.index")):
            problem = "a TensorFlow checkpoint (Mesh TensorFlow T5)"
        fix = (
            "give checkpoint_<step> or its parent, copied as a whole, or a Hugging Face directory "
            "with its config.json"
        )
        raise DataError(f"no T5X checkpoint: {problem}", where=str(directory), fix=fix)
    try:
        return _read_orbax(root) if (root / _ORBAX_FILE).is_file() else _read_msgpack(root)
    except Exception as error:
        # Errors of msgpack, zarr, TensorStore and Orbax share no base class.
        reason = first_line(str(error)).partition(" [")[0]
        problem = f"no complete T5X checkpoint: {type(error).__name__}: {reason}"
        fix = "copy the checkpoint again, as a whole with hidden files: files may be truncated"
        raise DataError(problem, where=str(root), fix=fix) from error


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
    return _step_root(pathlib.Path(directory)) is not None


def _step_root(directory: pathlib.Path) -> pathlib.Path | None:
    """Where a step's tree lies: Orbax stores it one level down, a run has it in its steps."""
    steps = {
        int(match[1]): path
        for path in directory.glob("checkpoint_*")
        if (match := _STEP_DIRECTORY.fullmatch(path.name))
    }
    for place in [directory, *([steps[max(steps)]] if steps else [])]:
        # TensorFlow's own has a file "checkpoint", too.
        if any(place.glob("*.index")):
            return None
        for root in (place / "state", place):
            if any((root / name).is_file() for name in (_ORBAX_FILE, _INDEX_FILE)):
                return root
    return None


def _read_orbax(directory: pathlib.Path) -> Params:
    # Imported here because it takes seconds and legacy checkpoints do not need it.
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(directory.absolute()).item_metadata.tree
        item = {"target": _target(tree)}
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        restored = checkpointer.restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True),
        )
    return jax.tree.map(np.asarray, restored["target"])


def _read_msgpack(directory: pathlib.Path) -> Params:
    tree = msgpack_restore((directory / _INDEX_FILE).read_bytes())
    version = int(np.asarray(tree.get("version", 0)))
    target = _target(tree.get("optimizer") or tree.get("_optimizer") or tree)
    leaves = flatten_dict(target, is_leaf=lambda _, node: "kvstore" in node)
    read = {
        name: _leaf(leaf, directory, version)
        for name, leaf in track(leaves.items(), description="read T5X arrays", total=len(leaves))
        if leaf is not None
    }
    return unflatten_dict(read)


def _target(tree: Params) -> Params:
    target = tree.get("target")
    if not isinstance(target, dict) or not target:
        raise ValueError(f'no parameters in a tree "target": there is {", ".join(map(str, tree))}')
    return target


def _leaf(node: object, directory: pathlib.Path, version: int) -> np.ndarray:
    """The array of a leaf: stored inline, or in a zarr directory."""
    if isinstance(node, str):
        # Orbax beside msgpack stored native bfloat16 for all versions of the tree.
        return _read_zarr(directory, node.removeprefix(_PLACEHOLDER))
    if isinstance(node, dict):
        # In the oldest files the path is beside `kvstore`, not inside.
        array = _read_zarr(directory, node["kvstore"].get("path") or node["path"])
    else:
        array = np.asarray(node)
    # NumPy has no name for bfloat16: some writers stored its two bytes as void.
    if array.dtype == "V2" or (version < _NATIVE_BFLOAT16 and array.dtype == np.uint16):
        return array.view(ml_dtypes.bfloat16)
    return array


def _read_zarr(directory: pathlib.Path, stored: str) -> np.ndarray:
    # Only the last part of a path on the writer's machine or bucket is useful here.
    path = directory / pathlib.PurePosixPath(stored).name
    metadata = json.loads((path / ".zarray").read_text(encoding="utf-8"))
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path.absolute())},
        # T5X writes every chunk.
        "fill_missing_data_reads": metadata["fill_value"] is not None,
    }
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())
