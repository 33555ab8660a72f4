"""What the tests of exports share."""

import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def sentence_transformer() -> Callable[[str | os.PathLike[str]], Any]:
    """Directory -> sentence-transformers' model of it. Its import alone takes ten seconds."""
    library = pytest.importorskip("sentence_transformers")
    return lambda directory: library.SentenceTransformer(
        str(directory), device="cpu", local_files_only=True
    )
