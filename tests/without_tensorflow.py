"""Runs commands in one process in which TensorFlow, TensorFlow Text and SeqIO are not installed.

    python without_tensorflow.py '[["prepare", ...], ["tokenize", ...]]'

`sys.modules["tensorflow"] = None` would not do: TensorFlow Datasets takes it for loaded.
"""

import functools
import importlib.machinery
import json
import sys
from typing import Any

ABSENT = ("tensorflow", "tensorflow_text", "seqio")


def hide() -> None:
    """Makes an import of them fail as where they are not installed."""
    find = importlib.machinery.PathFinder.find_spec

    def find_others(fullname: str, *arguments: Any) -> importlib.machinery.ModuleSpec | None:
        return None if fullname.split(".")[0] in ABSENT else find(fullname, *arguments)

    # A partial is no method: pytest keeps it as an attribute of a class of its own.
    importlib.machinery.PathFinder.find_spec = functools.partial(find_others)


if __name__ == "__main__":
    hide()
    from taser_jax.cli import main as cli

    for command in json.loads(sys.argv[1]):
        if status := cli.run(command):
            sys.exit(f"taser {' '.join(command)}: ended with {status}")
