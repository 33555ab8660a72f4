"""What the tests of exports share: each model is made once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import ten_steps


@pytest.fixture(scope="session")
def sentence_transformer() -> Callable[[str | os.PathLike[str]], Any]:
    """Directory -> sentence-transformers' model of it. Its import alone takes ten seconds."""
    library = pytest.importorskip("sentence_transformers")
    return lambda directory: library.SentenceTransformer(
        str(directory), device="cpu", local_files_only=True
    )


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ten_steps.Trained]:
    """Kind ("taser", "dpr", "shared", "minilm") -> that model, moved at random."""

    @functools.cache
    def make(kind: str) -> ten_steps.Trained:
        directory = tmp_path_factory.mktemp(kind)
        if kind == "minilm":
            return ten_steps.from_minilm(directory)
        return ten_steps.from_scratch(directory, kind)

    return make
