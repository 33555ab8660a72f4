import gzip
import itertools
import json
import os
import tracemalloc

import pytest
import tensorflow as tf
from etils.epath import backend
from written_files import write

from taser_jax.data import files
from taser_jax.data.files import json_lines, json_records, numbered_lines
from taser_jax.data.readers.passages import read_passages
from taser_jax.storage.errors import DataError


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_numbered_lines_keeps_newlines_and_only_splits_at_line_feeds(tmp_path, name):
    lines = ["one\r\n", "two\u2028still two\n", "thrée"]
    path = write(tmp_path / name, "\ufeff" + "".join(lines))
    assert list(numbered_lines(path)) == list(enumerate(lines, start=1))
    with files.open_text(path) as text:
        assert text.read() == "".join(lines)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: a pipe or a device"):
        list(json_lines(tmp_path / "a.jsonl"))


class _LocalGFile:
    """`tf.io.gfile` with a folder in place of gs://bucket."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __getattr__(self, name):
        function = getattr(tf.io.gfile, name)
        return lambda path, *rest: function(path.replace("gs://bucket", self._folder), *rest)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(type(backend.tf_backend), "gfile", _LocalGFile(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_a_path_with_a_scheme_is_read_through_tensorflow(bucket, name):
    content = '[{"a": 1},\n{"a": "é"}]' if name == "a.json" else '{"a": 1}\n{"a": "é"}\n'
    write(bucket / name, content)
    assert [record["a"] for _, record in json_records(f"gs://bucket/{name}")] == [1, "é"]
    with pytest.raises(DataError, match=r"missing\.tsv: cannot be read: No such file"):
        list(numbered_lines("gs://bucket/missing.tsv"))


@pytest.mark.parametrize("read", [numbered_lines, json_records])
def test_a_missing_or_empty_file_is_named(tmp_path, read):
    with pytest.raises(DataError, match=r"nowhere\.txt: cannot be read: No such file"):
        list(read(tmp_path / "nowhere.txt"))
    for name in ("empty.txt", "empty.txt.gz"):
        with pytest.raises(DataError, match="the file is empty"):
            list(read(write(tmp_path / name, b"")))


LATIN = b"fine\ncaf\xe9\n"
# Its header would have the time, and the ids of two workers would differ.
CUT = gzip.compress(b"fine\n" * 9999, mtime=0)[:-20]


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (numbered_lines, "latin.txt", LATIN, r"t:2: not UTF-8: byte 0xe9.*\n.* gb18030"),
        (json_records, "latin.json", b'[{"a": "caf\xe9"}]', r"latin\.json: not UTF-8"),
        # As Windows calls Unicode.
        (numbered_lines, "a.txt", "a\n".encode("utf-16"), r":1: not UTF-8: .*\n  fix: .*-f utf-16"),
        (numbered_lines, "faq.xlsx", b"PK\x03\x04\xff", r"not UTF-8: .*\n  fix: save it as CSV"),
        (numbered_lines, "cut.gz", CUT, r"cut\.gz: the gzip stream is damaged or truncated"),
        (numbered_lines, "plain.txt.gz", b"not gzip at all\n", "the gzip stream is damaged"),
        (json_lines, "a.jsonl", b'{"a": 1}\n\n{"a": 2\n', r"a\.jsonl:3: not valid JSON.*\n  fix: "),
        (json_lines, "b.jsonl", b'{"a": 1}\n["a"]\n', r"b\.jsonl:2: found a JSON list"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, read, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read(tmp_path / name))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_json_array_is_streamed_whatever_the_chunk(tmp_path, monkeypatch, indent, chunk):
    rows = [
        {"n": n, "text": 'quote " \\ tab\t é \u2028 ]}', "t": [True, None, -1.5e-3], "d": {}}
        for n in range(9)
    ]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=indent))
    monkeypatch.setattr(files, "_CHUNK", chunk)
    assert [record for _, record in json_records(path)] == rows


def test_a_json_array_reports_the_line_each_value_starts_on(tmp_path):
    path = write(tmp_path / "a.json", b'\n[\n {"a":\n 1},\n\n {"a": 2}, {"a": 3}\n]\n')
    assert [line for line, _ in json_records(path)] == [3, 6, 6]


def test_a_json_array_is_read_no_further_than_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", 16)
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"a": 2}, ' + b" " * 200 + b"{broken")
    assert len(list(itertools.islice(json_records(path), 2))) == 2


@pytest.mark.parametrize("chunk", [5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1},\n{"a": 2}', r":2: the JSON array is not closed"),
        (b'[{"a": 1},\n{"a": "cut', r":2: the JSON array is not closed"),
        (b'[{"a": 1},\n{"a" 2}, {"b": "long enough to be far from the end"}]', ":2: not valid"),
        (b'[{"a": 1},\n3]', r":2: found a JSON int"),
    ],
)
def test_a_broken_json_array_names_the_line(tmp_path, monkeypatch, chunk, content, message):
    monkeypatch.setattr(files, "_CHUNK", chunk)
    with pytest.raises(DataError, match=r"a\.json" + message):
        list(json_records(write(tmp_path / "a.json", content)))


SIZE = 16 << 20


@pytest.fixture
def a_mebibyte(monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1 << 20)


@pytest.mark.usefixtures("a_mebibyte")
@pytest.mark.parametrize(
    ("read", "name", "start"),
    [
        (numbered_lines, "a.json.gz", b'{"a": 1}\n'),
        (json_lines, "a.json.gz", b'{"a": 1}\n'),
        (json_records, "a.json.gz", b'[{"a": 1},\n{"b": "'),
        (read_passages, "m.xml.gz", b"<DescriptorRecordSet><DescriptorRecord>\n<ScopeNote>"),
    ],
)
def test_a_line_beyond_the_limit_is_named_before_it_takes_memory(tmp_path, read, name, start):
    path = write(tmp_path / name, start + b"x" * SIZE)
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name}:2: longer than 1 MiB"):
        list(read(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SIZE


@pytest.mark.usefixtures("a_mebibyte")
def test_lines_up_to_the_limit_are_read(tmp_path):
    line = json.dumps({"a": "x" * ((1 << 20) - 11)}) + "\n"
    assert len(line) == (1 << 20) - 1
    assert len(list(json_lines(write(tmp_path / "a.jsonl", f"{line} {line}")))) == 2
    with pytest.raises(DataError, match=r"a\.jsonl:2: longer than 1 MiB"):
        list(json_lines(write(tmp_path / "a.jsonl", f"{line}  {line}")))
