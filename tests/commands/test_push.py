"""`taser push` to a hub on this machine, which keeps what it is sent."""

from __future__ import annotations

import base64
import http.server
import json
import pathlib
import socket
import threading
from typing import Any

import pytest
from huggingface_hub import constants
from small_world import gin, succeed
from written_files import contents

from taser_jax.commands import export
from taser_jax.commands.export import push
from taser_jax.storage.errors import ConfigError, DataError


class Hub(http.server.BaseHTTPRequestHandler):
    """Makes repositories and takes commits whose files are sent inline."""

    refuses: str | None = None
    made: list[Any]
    files: dict[str, bytes]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.refuses is not None:
            self.reply(403, {"error": self.refuses})
        elif self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self.reply(200, {"url": f"http://{self.headers['Host']}/us/taser", "id": "us/taser"})
        elif self.path == "/api/models/us/taser/preupload/main":
            way = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **way} for file in json.loads(body)["files"]]
            self.reply(200, {"files": files})
        elif self.path.startswith("/api/validate-yaml"):
            self.reply(200, {"warnings": [], "errors": []})
        elif self.path == "/api/models/us/taser/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/us/taser/commit/1"
            self.reply(200, {"success": True, "commitUrl": url, "commitOid": "1", "hookOutput": ""})
        else:
            self.reply(404, {"error": f"unexpected {self.path}"})

    def do_GET(self):
        self.reply(404, {"error": f"unexpected {self.path}"})

    def reply(self, status: int, content: dict[str, Any]):
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    handler = type("Handler", (Hub,), {"made": [], "files": {}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield handler
    server.shutdown()


@pytest.fixture
def exported(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "sentence_transformers"
    (directory / "query").mkdir(parents=True)
    # What the hub reads of a card is tested with the card's writer.
    (directory / "README.md").write_text("---\nlibrary_name: sentence-transformers\n---\n")
    (directory / "export.json").write_text("{}")
    (directory / "query" / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    return directory


def test_files_arrive_as_they_are(hub, exported: pathlib.Path):
    assert push(repo="us/taser", export_dir=str(exported)).endswith("/us/taser/commit/1")
    assert (hub.made[0]["name"], hub.made[0]["visibility"]) == ("taser", "private")
    assert hub.files == contents(exported)
    succeed("push", "us/taser", *gin(EXPORT_DIR=exported, PRIVATE=False))
    assert hub.made[1].get("visibility") != "private"


def test_what_is_no_export_is_refused_before_the_hub_is_asked(hub, tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match=r"(?s)no exported model.*fix: `taser export"):
        push(repo="us/taser", export_dir=str(tmp_path))
    assert not hub.made


def test_a_refusal_has_the_hubs_reason(hub, exported: pathlib.Path):
    hub.refuses = "no write access to us/taser"
    with pytest.raises(DataError, match=r"(?s)the hub did not take it.*us/taser.*hf auth login"):
        push(repo="us/taser", export_dir=str(exported))


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch, exported: pathlib.Path):
    monkeypatch.setattr(export, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DataError, match=r"(?s)the hub did not take it: .*timed out"):
            push(repo="us/taser", export_dir=str(exported))


@pytest.mark.parametrize("repo", ["us/taser", "a/b/c"])
def test_no_hub_and_a_bad_name(monkeypatch, exported: pathlib.Path, repo: str):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match=f"(?s)^{repo}: the hub did not take it.*fix: "):
        push(repo=repo, export_dir=str(exported))
