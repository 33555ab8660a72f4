"""The hub is a server on this machine, or a port that nobody listens on: no network."""

import http.server
import json
import pathlib
import socket
import threading
import time

import pytest
from bert_checkpoints import write_checkpoint
from huggingface_hub import constants

from taser_jax.interop import hub
from taser_jax.interop.hub import fetch
from taser_jax.storage.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ADVICE = r"(?s)the Hugging Face hub did not provide it.*fix: .*path of the directory"


class HubHandler(http.server.BaseHTTPRequestHandler):
    """The four questions that a download asks: model, tree, and head and body of a file."""

    root: pathlib.Path

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body):
        path = self.path.split("?")[0]
        names = sorted(p.name for p in self.root.iterdir())
        if path.startswith(f"/api/models/us/tiny/tree/{COMMIT}"):
            tree = [
                {
                    "type": "file",
                    "path": n,
                    "oid": f"{i:040x}",
                    "size": (self.root / n).stat().st_size,
                }
                for i, n in enumerate(names)
            ]
            self.send(json.dumps(tree).encode(), {}, body)
        elif path.startswith("/api/models/us/tiny"):
            siblings = [{"rfilename": name} for name in names]
            info = {"_id": "1", "id": "us/tiny", "sha": COMMIT, "siblings": siblings}
            self.send(json.dumps(info).encode(), {}, body)
        elif path.startswith(f"/us/tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            etag = f'"{names.index(name):040x}"'
            self.send(
                (self.root / name).read_bytes(), {"ETag": etag, "X-Repo-Commit": COMMIT}, body
            )
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, content, headers, body):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return tmp_path / "cache"


def point_to(monkeypatch, port):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def served(tmp_path, monkeypatch, cache):
    """A directory that a local hub serves as us/tiny."""
    directory, _ = write_checkpoint(tmp_path / "served")
    (directory / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    (directory / "README.md").write_text("not needed", encoding="utf-8")
    (directory / "pytorch_model.bin").write_bytes(b"the same again")
    handler = type("Handler", (HubHandler,), {"root": directory})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    point_to(monkeypatch, server.server_port)
    yield directory
    server.shutdown()
    server.server_close()


def close_port(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    point_to(monkeypatch, port)


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    assert fetch(tmp_path) == tmp_path
    assert fetch(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert fetch(f"~/{tmp_path.name}") == tmp_path


@pytest.mark.parametrize("source", ["./nowhere", "/no/where/at/all", "a/b/c", "../up", "~/x/y"])
def test_a_path_that_is_not_there_is_no_hub_id(source):
    with pytest.raises(DataError, match="no such directory"):
        fetch(source)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match="not a directory"):
        fetch(str(tmp_path / "model.safetensors"))


def test_a_hub_that_never_answers_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point_to(monkeypatch, silent.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(DataError, match=ADVICE):
            fetch("us/tiny")
        assert time.monotonic() - start < 5


def test_an_unknown_id(served):
    with pytest.raises(DataError, match=ADVICE):
        fetch("us/other")


def test_only_what_is_needed_is_downloaded_and_then_kept(served, monkeypatch):
    directory = fetch("us/tiny")
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.json", "model.safetensors", "vocab.txt"}
    for name in names:
        assert (directory / name).read_bytes() == (served / name).read_bytes()
    close_port(monkeypatch)
    assert fetch("us/tiny") == directory
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("us/tiny") == directory


def test_pytorch_files_where_there_is_nothing_else(served):
    (served / "model.safetensors").unlink()
    assert (fetch("us/tiny") / "pytorch_model.bin").is_file()
