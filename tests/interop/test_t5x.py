"""T5X checkpoints written here, by hand and by orbax, read back."""

import functools
import os

import jax
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from legacy_t5x import packed, write_index, write_legacy, write_zarr, zarr_leaf

from taser_jax.interop.t5x import is_t5x_checkpoint, read_t5x, write_t5x
from taser_jax.storage.errors import DataError

TARGET = {
    "token_embedder": {"embedding": np.arange(35, dtype=np.float32).reshape(7, 5)},
    "encoder": {
        "encoder_norm": {"scale": np.array([1.5, -2], np.float32)},
        "layers_0": {"mlp": {"wi": {"kernel": np.arange(12.0, dtype=np.float32).reshape(3, 4)}}},
    },
}


def assert_same(arrays, expected):
    """Dtypes, too."""
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), arrays, expected)


def test_legacy_with_edge_chunks_and_inline_leaves(tmp_path):
    assert not is_t5x_checkpoint(tmp_path)
    directory = write_legacy(tmp_path / "checkpoint_7", TARGET)
    assert (directory / "target.token_embedder.embedding" / "1.1").is_file()
    assert_same(read_t5x(directory), TARGET)


def test_a_run_directory_means_its_latest_step(tmp_path):
    for step in (9, 10):
        target = {"scale": np.full(2, step, np.float32)}
        write_legacy(tmp_path / f"checkpoint_{step}", target, step=step)
    (tmp_path / "checkpoint_11.tmp").mkdir()
    assert is_t5x_checkpoint(tmp_path)
    assert_same(read_t5x(tmp_path), {"scale": np.full(2, 10, np.float32)})


def test_both_storage_descriptions_bare_trees_and_flax_chunks(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    chunks = {"1": array.ravel()[4:], "0": array.ravel()[:4]}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": chunks}
    old, far = zarr_leaf("target.old/", at_top=True), zarr_leaf("/cns/t5x-dummy-bucket/target.far")
    target = {"old": old, "far": far, "chunked": chunked, "number": np.float32(2.5)}
    write_zarr(tmp_path / "target.old", array, [1, 3])
    write_zarr(tmp_path / "target.far", array[0], [2])
    write_index(tmp_path, {"target": target, "state": {"step": 3}})
    expected = {"old": array, "far": array[0], "chunked": array, "number": np.float32(2.5)}
    assert_same(read_t5x(tmp_path), expected)


@pytest.mark.parametrize("version", [0, 2, 3])
def test_bfloat16_before_and_since_version_3(tmp_path, version):
    values = np.array([1.0, -0.5, 3.0], ml_dtypes.bfloat16)
    stored = values if version == 3 else values.view(np.uint16)
    target = {"inline": {"scale": stored}, "file": {"kernel": stored}}
    directory = write_legacy(tmp_path / "c", target, version=version)
    assert_same(read_t5x(directory), {"inline": {"scale": values}, "file": {"kernel": values}})


@pytest.mark.parametrize("inner", ["", "state"])
def test_placeholders_of_early_orbax(tmp_path, inner):
    tmp_path = tmp_path / inner
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_zarr(tmp_path / "_optimizer.target.kernel", array, [2, 3])
    write_zarr(tmp_path / "_optimizer.state.step", np.asarray(5, np.int32), [])
    target = {"kernel": "PLACEHOLDER://_optimizer.target.kernel"}
    optimizer = {"target": target, "state": {"step": "PLACEHOLDER://_optimizer.state.step"}}
    write_index(tmp_path, {"_optimizer": optimizer, "flax_mutables": None})
    assert_same(read_t5x(tmp_path.parent if inner else tmp_path), {"kernel": array})


@pytest.mark.parametrize("inner", ["state", ""])
def test_orbax(tmp_path, inner):
    tree = {"target": TARGET, "state": {"step": np.int32(4), "param_states": np.ones(9)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "checkpoint_4" / inner, tree)
    assert_same(read_t5x(tmp_path), TARGET)


def of_tensorflow(directory):
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1000000"\n')
    (directory / "model.ckpt-1000000.index").touch()


def without_target(directory):
    content = msgpack.packb({"params": {"scale": np.ones(1)}, "step": 1}, default=packed)
    (directory / "checkpoint").write_bytes(content)


EMBEDDING = "target.token_embedder.embedding"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "checkpoint").unlink(), "no T5X checkpoint: neither"),
        (of_tensorflow, "a TensorFlow checkpoint"),
        (lambda at: (at / EMBEDDING / ".zarray").unlink(), r"ing/\.zarray(.|\n)*hidden files"),
        (lambda at: (at / EMBEDDING / "1.0").unlink(), r"token_embedder\.embedding/.*1\.0"),
        (lambda at: os.truncate(at / "checkpoint", 200), "no complete T5X check(.|\n)*truncated"),
        (without_target, 'no parameters in a tree "target": there is params, step'),
    ],
)
def test_what_cannot_be_read(tmp_path, damage, message):
    directory = write_legacy(tmp_path / "c", TARGET)
    damage(directory)
    with pytest.raises(DataError, match=message):
        read_t5x(directory)


def test_chunks_left_out_of_an_array_with_a_fill_value_are_that_value(tmp_path):
    write_zarr(tmp_path / "kernel", np.ones((4, 2), np.float32), [2, 2], fill_value=0.0)
    (tmp_path / "kernel" / "1.0").unlink()
    write_index(tmp_path, {"optimizer": {"target": {"kernel": zarr_leaf("kernel")}}})
    expected = np.array([[1, 1], [1, 1], [0, 0], [0, 0]], np.float32)
    np.testing.assert_array_equal(read_t5x(tmp_path)["kernel"], expected)


def test_parameters_written_for_t5x_are_read_back_bit_for_bit(tmp_path):
    kernel = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    params = {"encoder": {"kernel": kernel, "half": kernel.astype(ml_dtypes.bfloat16)}}
    assert write_t5x(tmp_path, params, step=7) == tmp_path / "checkpoint_7"
    assert_same(read_t5x(tmp_path), params)
