"""A file of few bytes that unpacks to one endless line: refused within the limit's memory."""

import gzip
import json
import tracemalloc

import pytest

from taser_jax.cli import main as cli
from taser_jax.data.files import json_lines, json_records, numbered_lines
from taser_jax.data.readers.passages import read_passages
from taser_jax.storage import limits
from taser_jax.storage.errors import ConfigError, DataError

SIZE = 32 << 20


@pytest.fixture
def one_line(tmp_path):
    def write(name, start=b"", filler=b"x"):
        path = tmp_path / name
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(b'{"a": 1}\n' * (not start) + start)
            for _ in range(SIZE >> 20):
                file.write(filler * (1 << 20))
        return path

    return write


@pytest.mark.parametrize(
    ("read", "start", "place"),
    [(numbered_lines, b"", 2), (json_lines, b"", 2), (json_records, b'[{"a": 1},\n{"b": "', 2)],
)
def test_a_line_beyond_the_limit_is_named_before_it_takes_memory(one_line, read, start, place):
    path = one_line("a.json.gz", start)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    message = rf"a\.json\.gz:{place}: longer than 2 MiB(.|\n)*--max_line_mib="
    with limits.use(limits.Limits(line_mib=2)), pytest.raises(DataError, match=message):
        list(read(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SIZE / 2


def test_lines_up_to_the_limit_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"a": "x" * ((1 << 20) - 11)}) + "\n"
    assert len(line) == (1 << 20) - 1
    path.write_text(line * 2)
    with limits.use(limits.Limits(line_mib=1)):
        assert len(list(json_lines(path))) == 2
        path.write_text(f"{line} {line}")
        assert len(list(json_lines(path))) == 2
        path.write_text(f"{line}  {line}")
        with pytest.raises(DataError, match=r"a\.jsonl:2: longer than 1 MiB"):
            list(json_lines(path))


def test_flags_set_the_limits(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_execute", lambda *_: seen.append(limits.line_bytes()) or 0)
    assert cli.run(["verify", "x", "--max_line_mib=3"]) == 0
    assert cli.run(["verify", "x"]) == 0
    assert seen == [3 << 20, 64 << 20]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_limits_that_are_none(value, capsys):
    assert cli.run(["verify", "x", f"--max_array_gib={value}"]) == 2
    assert "--max_array_gib" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="line_mib is 0"):
        limits.Limits(line_mib=0)


def test_a_concept_beyond_the_limit_is_named(one_line):
    start = b"<DescriptorRecordSet><DescriptorRecord><ConceptList>\n<Concept><ScopeNote>"
    path = one_line("m.xml.gz", start)
    with (
        limits.use(limits.Limits(line_mib=2)),
        pytest.raises(DataError, match=r"m\.xml\.gz:2: longer than 2 MiB"),
    ):
        list(read_passages(path))
