"""Runs a notebook's cells and keeps what they print in it.

python examples/run_notebook.py examples/search_docstrings.ipynb
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys


def run(notebook: pathlib.Path) -> dict[str, object]:
    """The notebook as JSON, with what its cells print now.

    Args:
        notebook: its cells are Python; what is to be seen is printed.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        stream = {"output_type": "stream", "name": "stdout", "text": text}
        cell["execution_count"] = number
        cell["outputs"] = [stream] if text else []
    return content


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    path.write_text(json.dumps(run(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
