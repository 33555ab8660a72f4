"""The Python of README.md and docs/python.md runs as it stands and prints what is promised."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
HUB_ID = '"sentence-transformers/all-MiniLM-L6-v2"'


def blocks_of(page: pathlib.Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_python_example_of_the_readme(minilm, capsys):
    readme = REPOSITORY / "README.md"
    example = blocks_of(readme)[0]
    assert example.count(HUB_ID) == 1
    exec(compile(example.replace(HUB_ID, repr(str(minilm))), str(readme), "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "which river runs through the capital of France? -> Seine",
        "what is Python? -> Python",
    ]


def test_calls_of_our_functions_on_all_pages_have_arguments_that_these_take():
    calls = 0
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        for block in blocks_of(page):
            nodes = list(ast.walk(ast.parse(block)))
            ours = {
                name.name: getattr(importlib.import_module(str(node.module)), name.name)
                for node in nodes
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("taser_jax")
                for name in node.names
            }
            for call in nodes:
                if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ours:
                    names = dict.fromkeys(word.arg for word in call.keywords if word.arg)
                    inspect.signature(ours[call.func.id]).bind(*call.args, **names)
                    calls += 1
    assert calls > 10


@pytest.mark.release
def test_code_of_the_python_page(minilm, tmp_path, monkeypatch, capsys):
    page = REPOSITORY / "docs" / "python.md"
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    printed = []
    for block in blocks:
        exec(compile(block.replace(HUB_ID, repr(str(minilm))), str(page), "exec"), names)
        printed.append(capsys.readouterr().out.splitlines())
    promised = re.findall(r"# (\[\(.*)$", blocks[0], re.MULTILINE)
    assert printed[0][:1] == promised
    # Two blocks of MiniLM, one of them with a second feed-forward.
    assert printed[1][0].endswith("parameters")
    assert len(printed[1]) >= 4
    assert (tmp_path / "model" / "config.gin").is_file()
