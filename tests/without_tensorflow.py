"""Runs commands in one process in which TensorFlow, TensorFlow Text and SeqIO are not installed.

    python without_tensorflow.py '[["prepare", "tsv", ...], ["tokenize", ...]]'

`sys.modules["tensorflow"] = None` would not do: TensorFlow Datasets takes it for loaded.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from typing import Any

ABSENT = ("tensorflow", "tensorflow_text", "seqio")


class _Finder(importlib.machinery.PathFinder):
    """Finds all modules on the path but those."""

    @classmethod
    def find_spec(cls, fullname: str, *arguments: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in ABSENT:
            return None
        return super().find_spec(fullname, *arguments)


def hide() -> None:
    """Makes an import of them fail as where they are not installed."""
    sys.meta_path = [
        _Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
    ]


if __name__ == "__main__":
    hide()
    from taser_jax import cli

    for command in json.loads(sys.argv[1]):
        if status := cli.run(command):
            sys.exit(f"taser {' '.join(command)}: ended with {status}")
