"""Train, mine for, evaluate and serve dense retrievers that specialise by task."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taser_jax.retriever import Retriever as Retriever
    from taser_jax.storage.records import Passage as Passage

__version__ = "0.1.0"
_PUBLIC = {"Passage": "taser_jax.storage.records", "Retriever": "taser_jax.retriever"}


def __getattr__(name: str) -> Any:
    """Imports public names when they are used: training needs no TensorFlow, a retriever does."""
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
