"""Imports a library without the INFO lines that its compiled parts write to stderr."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence

# What absl writes before it is initialised, when no level is in force: its notice of that, and
# information. Warnings and errors begin with another letter.
_INFORMATION = re.compile(
    rb"(WARNING: All log messages before absl::InitializeLog\(\) is called|I\d{4} ).*\n?"
)


def quiet_import(name: str) -> None:
    """Drops INFO lines from stderr while the module `name` is imported, whenever that happens.

    TensorFlow from 2.21 on logs before it has read `TF_CPP_MIN_LOG_LEVEL`. Everything else written
    meanwhile, such as warnings and errors, appears when the import ends.

    Args:
        name: a module that nothing has imported yet.
    """
    if not any(isinstance(it, _Finder) and it.name == name for it in sys.meta_path):
        # First, so that it is asked before the finder that knows the file.
        sys.meta_path.insert(0, _Finder(name))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str) -> None:
        self.name = name
        self._asking_others = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def quietly(module: types.ModuleType) -> None:
                with _without_information():
                    execute(module)

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _without_information() -> Iterator[None]:
    """Compiled code writes to the file descriptor, which is what must be redirected."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not _INFORMATION.fullmatch(line):
                    os.write(2, line)
