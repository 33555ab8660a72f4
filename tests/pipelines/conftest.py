"""The tiny token store of `tiny_training`, shared by the tests of pipelines."""

from __future__ import annotations

import pathlib

import pytest
import tiny_training


@pytest.fixture(scope="session")
def tiny_store_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tiny") / "tokens"
    tiny_training.write_token_store(directory)
    return directory
