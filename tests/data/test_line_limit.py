"""A file of few bytes that unpacks to one endless line: refused within the limit's memory."""

import gzip
import json
import tracemalloc

import pytest

from taser_jax.data import files
from taser_jax.data.files import json_lines, json_records, numbered_lines
from taser_jax.data.readers.passages import read_passages
from taser_jax.storage.errors import DataError

SIZE = 16 << 20


@pytest.fixture(autouse=True)
def _a_mebibyte(monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)


@pytest.mark.parametrize(
    ("read", "name", "start"),
    [
        (numbered_lines, "a.json.gz", b'{"a": 1}\n'),
        (json_lines, "a.json.gz", b'{"a": 1}\n'),
        (json_records, "a.json.gz", b'[{"a": 1},\n{"b": "'),
        (
            read_passages,
            "m.xml.gz",
            b"<DescriptorRecordSet><DescriptorRecord><ConceptList>\n<Concept><ScopeNote>",
        ),
    ],
)
def test_a_line_beyond_the_limit_is_named_before_it_takes_memory(tmp_path, read, name, start):
    path = tmp_path / name
    path.write_bytes(gzip.compress(start + b"x" * SIZE, compresslevel=1))
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name}:2: longer than 1 MiB"):
        list(read(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SIZE


def test_lines_up_to_the_limit_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"a": "x" * ((1 << 20) - 11)}) + "\n"
    assert len(line) == (1 << 20) - 1
    path.write_text(f"{line} {line}")
    assert len(list(json_lines(path))) == 2
    path.write_text(f"{line}  {line}")
    with pytest.raises(DataError, match=r"a\.jsonl:2: longer than 1 MiB"):
        list(json_lines(path))
