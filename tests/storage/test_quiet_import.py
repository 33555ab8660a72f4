"""Importing a library whose compiled parts write information to stderr."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from taser_jax.storage.messages import quiet_import

WRITES = """import os
notice = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
os.write(2, notice + b"\\n")
os.write(2, b"I0000 00:00:1.5 1 port.cc:153] oneDNN is on\\n")
os.write(2, b"E0000 00:00:1.5 1 cuda.cc:7] no driver\\n")
"""


@pytest.fixture
def noisy(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield tmp_path / "noisy_library.py"
    sys.modules.pop("noisy_library", None)


def test_information_is_kept_and_errors_come_through(noisy, capfd):
    noisy.write_text(WRITES)
    quiet_import("noisy_library")
    quiet_import("noisy_library")
    # Libraries ask what is installed before they import it.
    assert importlib.util.find_spec("noisy_library") is not None
    import noisy_library  # noqa: F401

    assert capfd.readouterr().err == "E0000 00:00:1.5 1 cuda.cc:7] no driver\n"


def test_an_import_that_fails_still_says_what_it_wrote(noisy, capfd):
    noisy.write_text(WRITES + "raise ImportError('no such symbol')\n")
    quiet_import("noisy_library")
    with pytest.raises(ImportError, match="no such symbol"):
        import noisy_library  # noqa: F401
    assert "no driver" in capfd.readouterr().err
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_a_library_that_is_missing_is_missing(noisy):
    quiet_import("noisy_library")
    with pytest.raises(ModuleNotFoundError, match="noisy_library"):
        import noisy_library  # noqa: F401
