"""What the tests of exports share: each model is made once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import ten_steps


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
