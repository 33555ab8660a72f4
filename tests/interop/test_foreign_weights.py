"""Weights that are not what they should be are named before memory is taken for them."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
from legacy_t5x import write_index, write_zarr, zarr_leaf

from taser_jax.interop.t5x import read_t5x
from taser_jax.interop.tensors import read_shapes, read_tensors
from taser_jax.storage.errors import DataError


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
@pytest.mark.parametrize("read", [read_tensors, read_shapes])
def test_weights_of_eight_bits_are_refused(tmp_path, dtype, read):
    header = {"w": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=rf"w is of type {dtype}(.|\n)*F32, F16 or BF16"):
        read(tmp_path)


def tree(**changed):
    target = {"a": np.ones(2, np.float32)}
    return {"version": 3, "optimizer": {"target": target, "state": {"step": np.array(7)}}} | changed


@pytest.mark.parametrize("version", ["abc", None, 3.5, -1, True, {"a": 1}, [1, 2], b"x"])
def test_versions_that_are_no_numbers(tmp_path, version):
    write_index(tmp_path, tree(version=version))
    with pytest.raises(DataError, match=r"field 'version': version is (.|\n)*a whole number"):
        read_t5x(tmp_path)


@pytest.mark.parametrize("store", [3, {"path": "n" * 300}, {"path": "a\0b"}])
def test_stores_that_are_no_folders(tmp_path, store):
    target = {"w": {"driver": "zarr", "kvstore": store}}
    write_index(tmp_path, tree(optimizer={"target": target}))
    with pytest.raises(DataError, match="parameter w"):
        read_t5x(tmp_path)


def zarr(directory, **changed):
    write_index(directory, tree(optimizer={"target": {"w": zarr_leaf("target.w")}}))
    write_zarr(directory / "target.w", np.ones((2, 2), np.float32), (1, 2))
    path = directory / "target.w" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return directory


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": [100_000, 100_000]}, r"shape \[100000, 100000\] takes 37 GiB(.|\n)*16 GiB"),
        ({"shape": [100_000, 100_000], "fill_value": 0.0}, "files may be truncated"),
        ({"chunks": [100_000, 100_000]}, "field 'chunks': parameter w.* takes 37 GiB"),
        ({"shape": [100_000, 10_000], "chunks": [1, 1]}, "999,99[0-9],[0-9]+ of 1,000,000,000"),
        ({"shape": "ab"}, "field 'shape'"),
        ({"chunks": [0, 1]}, r"field 'chunks\[0\]'"),
        ({"dimension_separator": 5}, "dimension_separator"),
        ({"dtype": "no"}, "dtype 'no'"),
    ],
)
def test_arrays_that_claim_more_than_there_is(tmp_path, changed, message):
    read_t5x(zarr(tmp_path / "whole"))
    directory = zarr(tmp_path / "changed", **changed)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        read_t5x(directory)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
