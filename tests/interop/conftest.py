"""What the tests of exports share: each model is trained once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import ten_steps


@pytest.fixture(scope="session")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ten_steps.Trained]:
    """Kind ("taser", "dpr", "shared", "minilm") -> that model after ten steps."""

    @functools.cache
    def train(kind: str) -> ten_steps.Trained:
        directory = tmp_path_factory.mktemp(kind)
        if kind == "minilm":
            return ten_steps.from_minilm(directory)
        return ten_steps.from_scratch(directory, kind)

    return train
