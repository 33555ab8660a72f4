"""Writes T5X legacy checkpoints as T5X does, for tests: msgpack with Flax's extensions, zarr v2."""

import gzip
import itertools
import json

import ml_dtypes
import msgpack
import numpy as np


def packed(node):
    """Flax's msgpack extension 1 is an array, 3 a NumPy scalar."""
    if isinstance(node, np.generic | np.ndarray):
        content = msgpack.packb((node.shape, node.dtype.name, node.tobytes()), use_bin_type=True)
        return msgpack.ExtType(1 if isinstance(node, np.ndarray) else 3, content)
    raise TypeError(type(node))


def write_zarr(path, array, chunks, **changes):
    """Edge chunks are written in full size, padded with rubbish that a reader must crop."""
    path.mkdir(parents=True)
    dtype = "bfloat16" if array.dtype == ml_dtypes.bfloat16 else array.dtype.str
    metadata = {
        **{"zarr_format": 2, "shape": array.shape, "chunks": chunks, "dtype": dtype},
        **{"compressor": {"id": "gzip", "level": 1}, "fill_value": None},
        **{"filters": None, "order": "C"},
        **changes,
    }
    (path / ".zarray").write_text(json.dumps(metadata))
    counts = [-(-size // chunk) for size, chunk in zip(array.shape, chunks, strict=True)]
    for index in itertools.product(*map(range, counts)):
        chunk = np.full(chunks, 99, array.dtype)
        part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))]
        chunk[tuple(map(slice, part.shape))] = part
        (path / (".".join(map(str, index)) or "0")).write_bytes(gzip.compress(chunk.tobytes()))


def zarr_leaf(name, *, at_top=False):
    path, kvstore = {"path": name}, {"driver": "gfile"}
    leaf = path | {"kvstore": kvstore} if at_top else {"kvstore": kvstore | path}
    return {"driver": "zarr", "metadata": {}, **leaf}


def write_index(directory, tree):
    directory.mkdir(parents=True, exist_ok=True)
    content = msgpack.packb(tree, default=packed, strict_types=True)
    (directory / "checkpoint").write_bytes(content)


def write_legacy(directory, target, *, step=7, version=3):
    """A checkpoint of `target`; scales and relative positions lie in the msgpack file."""

    def visit(node, path):
        if isinstance(node, dict):
            return {name: visit(child, (*path, name)) for name, child in node.items()}
        if path[-1] in ("scale", "rel_embedding"):
            return node
        name = ".".join(("target", *path))
        write_zarr(directory / name, node, [max(1, -(-size // 2)) for size in node.shape])
        return zarr_leaf(name)

    state = {"step": np.asarray(step, np.int32), "param_states": {"v": np.ones(3, np.float32)}}
    tree = {"version": version, "optimizer": {"target": visit(target, ()), "state": state}}
    write_index(directory, tree)
    return directory
