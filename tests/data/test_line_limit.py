"""A file of few bytes that unpacks to one endless line: refused within the limit's memory."""

import gzip
import tracemalloc

import pytest

from taser_jax.data import files
from taser_jax.data.files import json_lines
from taser_jax.storage.errors import DataError

SIZE = 16 << 20


@pytest.fixture(autouse=True)
def _a_mebibyte(monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)


def test_a_line_beyond_the_limit_is_named_before_it_takes_memory(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + b"x" * SIZE, compresslevel=1))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.json\.gz:2: longer than 1 MiB"):
        list(json_lines(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SIZE


def test_lines_up_to_the_limit_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    line = '{"a": "' + "x" * ((1 << 20) - 10) + '"}\n'
    assert len(line) == 1 << 20
    path.write_text(f"{line}{line}")
    assert len(list(json_lines(path))) == 2
    path.write_text(f"{line} {line}")
    with pytest.raises(DataError, match=r"a\.jsonl:2: longer than 1 MiB"):
        list(json_lines(path))
