"""Imports ScaNN without TensorFlow, which its index does not need."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

_NAME = "scann.scann_ops.py.scann_ops_pybind"
_IMPORTING = threading.Lock()


def scann_library() -> Any:
    """The module of ScaNN that builds, loads and searches indexes of NumPy arrays.

    `import scann` also loads operations for TensorFlow where it finds TensorFlow: seconds and
    memory for nothing, and an undefined symbol beside any release but the one they were built
    against. So TensorFlow is hidden while ScaNN is imported, and is back afterwards.
    """
    with _IMPORTING:
        if _NAME not in sys.modules:
            hidden = {"tensorflow": sys.modules.get("tensorflow")}
            # None in sys.modules is how Python itself says that a module is not to be had.
            sys.modules["tensorflow"] = None  # type: ignore[assignment]
            try:
                importlib.import_module(_NAME)
            finally:
                del sys.modules["tensorflow"]
                sys.modules.update({name: it for name, it in hidden.items() if it is not None})
        return sys.modules[_NAME]
