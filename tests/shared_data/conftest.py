"""Where the real data is, for the tests that read it."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    default = pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "data"
    path = pathlib.Path(os.environ.get("TASER_SHARED_DATA", default))
    if not path.is_dir():
        pytest.skip("real data is not here; set TASER_SHARED_DATA to its folder")
    return path
