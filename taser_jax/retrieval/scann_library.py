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

    If TensorFlow is installed, `import scann` also loads operations for it. That takes seconds and
    memory, and fails with an undefined symbol for any release but the one they were built for. So
    TensorFlow is hidden during the import.
    """
    with _IMPORTING:
        if _NAME not in sys.modules:
            tensorflow = sys.modules.get("tensorflow")
            # None in sys.modules makes the import fail.
            sys.modules["tensorflow"] = None  # type: ignore[assignment]
            try:
                importlib.import_module(_NAME)
            finally:
                del sys.modules["tensorflow"]
                if tensorflow is not None:
                    sys.modules["tensorflow"] = tensorflow
        return sys.modules[_NAME]
