import json
import struct
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from bert_checkpoints import random_tensors
from safetensors.numpy import save_file

from taser_jax.interop.tensors import read_tensors
from taser_jax.storage.errors import ConfigError, DataError


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_one_file(tmp_path, dtype):
    tensors = random_tensors() | {"ids": np.arange(3), "half": np.array([1.5, -2.0], dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = read_tensors(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded, tensors)
    assert loaded["half"].dtype == dtype


def test_shards(tmp_path):
    tensors, weight_map = random_tensors(), {}
    for part in range(2):
        names, file = sorted(tensors)[part::2], f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    jax.tree.map(np.testing.assert_array_equal, read_tensors(tmp_path), tensors)
    (tmp_path / file).unlink()
    with pytest.raises(DataError, match=r"model-00002-of-00002.*cannot be read: No such"):
        read_tensors(tmp_path)


def test_shards_outside_of_the_directory_are_not_opened(tmp_path):
    (tmp_path / "model").mkdir()
    save_file(random_tensors(), tmp_path / "a.safetensors")
    index = json.dumps({"weight_map": dict.fromkeys(random_tensors(), "../a.safetensors")})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        read_tensors(tmp_path / "model")


def test_weights_of_eight_bits_are_refused(tmp_path):
    header = {"w": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(DataError, match=r"float8(.|\n)*quantised"):
        read_tensors(tmp_path)


def test_a_file_cut_short(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"model\.safetensors: cannot be read"):
        read_tensors(tmp_path)


def test_pytorch_files_without_pytorch_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"PyTorch is not installed(?s:.*)\[torch\]"):
        read_tensors(tmp_path)
