"""The hub is a folder on this machine, or a port that nobody answers at: no network."""

import fnmatch
import pathlib
import shutil
import socket
import time

import huggingface_hub
import pytest
from bert_checkpoints import write_checkpoint
from huggingface_hub import constants

from taser_jax.interop import hub
from taser_jax.interop.hub import fetch
from taser_jax.storage.errors import DataError

ADVICE = r"(?s)the Hugging Face hub did not provide it.*fix: .*path of the directory"


@pytest.fixture
def served(tmp_path, monkeypatch) -> pathlib.Path:
    """What a hub has as us/tiny; downloads take what they ask for, and keep it."""
    directory, _ = write_checkpoint(tmp_path / "served")
    for name in ("vocab.txt", "README.md", "pytorch_model.bin"):
        (directory / name).write_text("of the hub")

    def download(hub_id, *, allow_patterns, local_files_only):
        assert hub_id == "us/tiny"
        if not local_files_only:
            names = [path.name for path in directory.iterdir()]
            (tmp_path / "cache").mkdir(exist_ok=True)
            for pattern in allow_patterns:
                for name in fnmatch.filter(names, pattern):
                    shutil.copy(directory / name, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    assert fetch(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert fetch(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("source", ["./nowhere", "/no/where/at/all", "a/b/c", "~/x/y"])
def test_a_path_that_is_not_there_is_no_hub_id(source):
    with pytest.raises(DataError, match="no such directory"):
        fetch(source)


def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        start = time.monotonic()
        with pytest.raises(DataError, match=ADVICE):
            fetch("us/tiny")
        assert time.monotonic() - start < 5


def test_only_what_is_needed_is_downloaded_and_then_kept(served, monkeypatch):
    directory = fetch("us/tiny")
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.txt"}

    def unreachable(*_, **__):
        raise OSError("name resolution failed")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    (served / "config.json").unlink()
    assert fetch("us/tiny") == directory
    assert (directory / "config.json").is_file()


def test_pytorch_files_where_there_is_nothing_else(served):
    (served / "model.safetensors").unlink()
    assert (fetch("us/tiny") / "pytorch_model.bin").is_file()
