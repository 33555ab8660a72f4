"""Recorded sizes and checksums: what opening, `read_json` and `taser verify` find damaged."""

import os
import pathlib
import shutil

import numpy as np
import pytest
import tiny_training
from disks import flip, killed_at_call
from small_world import refused, succeed

from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.bm25 import Bm25Index
from taser_jax.retrieval.embeddings import Embeddings, write_embeddings
from taser_jax.retrieval.runs import Run, read_trec_run, write_trec_run
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError, DataError

TEXTS = ["the sea", "a hill", "the tree by the sea"]
IDS = ["s", "h", "t"]


@pytest.fixture
def tokens(tmp_path) -> pathlib.Path:
    tiny_training.write_token_store(tmp_path / "tokens")
    return tmp_path / "tokens"


def test_the_checksum_is_the_standards(tmp_path):
    (tmp_path / "x").write_bytes(b"123456789")
    assert checksums.crc(tmp_path / "x") == "cbf43926"
    (tmp_path / "x").write_bytes(b"123456789" * 700_000)
    assert len(checksums.crc(tmp_path / "x")) == 8


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_file_is_never_damaged_by_a_kill(tmp_path, monkeypatch, killed_at, is_new):
    """At each of the three renames that replace it, the file is the old or the new, and checked."""
    path = tmp_path / "a b.json"
    if not is_new:
        artifacts.write_json(path, {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed_at_call(killed_at, os.replace))
        with pytest.raises(KeyboardInterrupt):
            artifacts.write_json(path, {"x": 22})
    old = {"absent": True} if is_new else {"x": 1}
    expected = old if killed_at < 3 else {"x": 22}
    assert artifacts.read_json(path, absent={"absent": True}) == expected
    if path.exists():
        flip(path, 5)
        with pytest.raises(DataError, match="damaged"):
            artifacts.read_json(path)
    artifacts.write_json(path, {"x": 3})
    assert artifacts.read_json(path) == {"x": 3}
    assert checksums.read(tmp_path) == {"a b.json": [checksums.found(path)]}
    [line] = (tmp_path / checksums.FILE).read_text().splitlines()
    assert line.endswith(" a b.json")


@pytest.mark.parametrize("at", ["read", "_state", "crc"])
def test_a_file_that_is_replaced_while_it_is_checked_is_not_damaged(tmp_path, monkeypatch, at):
    """Another process's writer comes after the reader's step of this name."""
    path, step = tmp_path / "a.json", getattr(checksums, at)
    artifacts.write_json(path, {"x": 1})

    def and_then_replaced(argument: os.PathLike) -> object:
        value = step(argument)
        monkeypatch.setattr(checksums, at, step)
        artifacts.write_json(path, {"x": 22})
        return value

    monkeypatch.setattr(checksums, at, and_then_replaced)
    assert artifacts.read_json(path) == {"x": 22}
    flip(path, 5)
    with pytest.raises(DataError, match="damaged"):
        artifacts.read_json(path)


def test_what_nobody_recorded_is_not_checked(tmp_path):
    path = tmp_path / "old.json"
    path.write_text("{}")
    assert artifacts.read_json(path) == {}
    # Torn by a kill, or damaged itself: says nothing, and the next line stands by itself.
    (tmp_path / checksums.FILE).write_bytes(b"0000 2 old.js")
    assert artifacts.read_json(path) == {}
    artifacts.write_json(tmp_path / "new.json", {"y": 1})
    assert set(checksums.read(tmp_path)) == {"new.json"}


def test_a_record_that_is_a_link_is_replaced(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / checksums.FILE).symlink_to(tmp_path / "precious")
    artifacts.write_json(tmp_path / "out" / "a.json", {})
    assert (tmp_path / "precious").read_text() == "mine"
    assert set(checksums.read(tmp_path / "out")) == {"a.json"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "other bytes of the same number"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes in place of"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "passages/ids.npy",
        "metadata.json",
        "vocabulary/vocabulary.json",
        "queries/first/train/query_ids.json",
    ],
)
def test_a_damaged_token_store_is_refused(tokens, name, damage, said):
    TokenStore.open(tokens)
    assert checksums.verify(directory=str(tokens)) > 10
    damage(tokens / name)
    is_unfinished = name == "metadata.json" and said == "missing"
    told = "unfinished" if is_unfinished else f"{name}: damaged after it was written: .*{said}"
    with pytest.raises(DataError, match=f"(?s){told}.*`taser tokenize`"):
        TokenStore.open(tokens)
    with pytest.raises(DataError, match=f"{tokens / name}: .*{said}"):
        checksums.verify(directory=str(tokens.parent))


def test_linked_folders_are_verified_too(tokens):
    output = tokens.parent / "output"
    output.mkdir()
    (output / "tokens").symlink_to(tokens)
    # One that leads back is not followed for ever.
    (tokens / "vocabulary" / "up").symlink_to(output)
    assert checksums.verify(directory=str(output)) == checksums.verify(directory=str(tokens))
    flip(tokens / "passages" / "ids.npy")
    with pytest.raises(DataError, match=r"output/tokens/passages/ids\.npy: other bytes"):
        checksums.verify(directory=str(output))


@pytest.mark.parametrize("length", [5000, -4, 0])
def test_impossible_lengths_are_named_also_where_nothing_is_recorded(tokens, length):
    (tokens / checksums.FILE).unlink()
    lengths = np.load(tokens / "passages" / "lengths.npy")
    lengths[7] = length
    np.save(tokens / "passages" / "lengths.npy", lengths)
    with pytest.raises(DataError, match=f"(?s)row 7 has length {length}, not 1 to "):
        TokenStore.open(tokens)


def test_a_store_without_records_opens_with_a_warning_and_is_not_verified(tokens, caplog):
    for path in tokens.rglob(checksums.FILE):
        path.unlink()
    for _ in range(2):
        assert len(TokenStore.open(tokens).queries("first", "train")) > 0
    [said] = caplog.messages
    assert f"{tokens}: " in said
    assert "files cannot be checked, since no checksums.txt has a line of them: " in said
    with pytest.raises(DataError, match=r"passages/ids\.npy: no checksums\.txt has a line of it"):
        checksums.verify(directory=str(tokens))


def test_a_file_without_a_line_is_named(tokens, caplog):
    record = tokens / checksums.FILE
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if "lengths.npy" not in line))
    TokenStore.open(tokens)
    assert ": passages/lengths.npy, queries/" in caplog.text
    with pytest.raises(DataError, match=r"passages/lengths\.npy: no checksums\.txt"):
        checksums.verify(directory=str(tokens.parent))


def test_where_nothing_is_recorded_nothing_is_verified(tmp_path):
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(DataError, match="no artefact"):
        checksums.verify(directory=str(tmp_path))
    artifacts.write_json(tmp_path / "runs" / "a.json", {})
    (tmp_path / "runs" / "metrics.jsonl").write_text("{}")
    assert checksums.verify(directory=str(tmp_path)) == 1


def test_a_large_file_is_read_once_a_change(tmp_path, monkeypatch):
    """Another process is one that has compared nothing yet."""
    reads: list[str] = []
    crc = checksums.crc
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_LARGE", 10)
    monkeypatch.setattr(checksums, "crc", lambda path: reads.append(str(path)) or crc(path))
    artifacts.write_text(tmp_path / "large.bin", "0123456789")
    artifacts.write_text(tmp_path / "small.bin", "01234")

    def opened() -> list[str]:
        monkeypatch.setattr(checksums, "_compared", set())
        reads.clear()
        checksums.check_directory(tmp_path, fix="again")
        return sorted(pathlib.Path(path).name for path in reads)

    assert opened() == ["large.bin", "small.bin"]
    assert opened() == ["small.bin"]
    (tmp_path / "large.bin").touch()
    assert opened() == ["large.bin", "small.bin"]
    (tmp_path / "large.bin").write_text("0123456780")
    with pytest.raises(DataError, match=r"large\.bin: damaged"):
        opened()


def test_an_object_is_checked_by_lines_of_itself_and_of_the_one_before_alone(bucket):
    for steps in range(3):
        artifacts.write_json("gs://bucket/model/run.json", {"steps": steps})
    assert artifacts.read_json("gs://bucket/model/run.json") == {"steps": 2}
    assert checksums.verify(directory="gs://bucket/model") == 1
    assert len(checksums.read("gs://bucket/model")["run.json"]) == 2
    # What the first of the three was.
    path = bucket.folder / "bucket/model/run.json"
    path.write_text('{\n  "steps": 0\n}\n')
    os.utime(path, (0, 0))
    with pytest.raises(DataError, match=r"run\.json: damaged .* other bytes"):
        artifacts.read_json("gs://bucket/model/run.json")


def test_a_damaged_shard_run_and_index_are_refused(tmp_path):
    write_embeddings(tmp_path / "e", np.ones((4, 2), np.float32), {"model": "m"}, "none")
    shard = tmp_path / "e" / "embeddings-00000-of-00001.npy"
    flip(shard)
    with pytest.raises(DataError, match=r"(?s)00001\.npy: damaged.*makes embeddings again"):
        Embeddings(tmp_path / "e")
    shard.unlink()
    with pytest.raises(DataError, match=r"(?s)00001\.npy: .*makes embeddings again"):
        Embeddings(tmp_path / "e")

    Bm25Index.build(TEXTS, tmp_path / "b", fingerprints={})
    flip(next((tmp_path / "b").glob("*data*.npy")))
    with pytest.raises(DataError, match=r"(?s)\.npy: damaged.*bm25 index again"):
        Bm25Index(tmp_path / "b")

    rows, scores = np.array([[2, 0]], np.int32), np.array([[2.0, 1.0]], np.float32)
    path = tmp_path / "r" / "t.test.trec"
    write_trec_run(path, Run(["q"], rows, scores), ids=IDS)
    assert read_trec_run(path, IDS.index).rows.tolist() == [[2, 0]]
    flip(path, 7)
    with pytest.raises(DataError, match=r"(?s)t\.test\.trec: damaged.*`taser search`"):
        read_trec_run(path, IDS.index)


def test_damaged_negatives_are_refused(tmp_path):
    metadata = {"collection_fingerprint": "c", "source": "s"}
    lists = {"query_ids": ["q"], "rows": [[1, 2]], "scores": [[2.0, 1.0]]}
    path = write_negatives(tmp_path, "t", "train", metadata=metadata, **lists)
    path.write_text(path.read_text().replace("[1,2]", "[1,3]"))
    with pytest.raises(DataError, match=r"(?s)t\.train\.jsonl: damaged.*`taser mine`"):
        read_negatives(tmp_path, "t", "train", ["q"])


def test_verify_on_the_command_line(tmp_path, capsys):
    for number in range(25):
        artifacts.write_json(tmp_path / "all" / f"{number}.json", {"n": number})
    shutil.copytree(tmp_path / "all", tmp_path / "copy")
    succeed("verify", str(tmp_path / "copy"))
    for path in (tmp_path / "copy").glob("*.json"):
        flip(path)
    said = refused(capsys, "verify", str(tmp_path))
    assert "25 of 50 files" in said
    assert "and 5 more" in said
    assert "copy/0.json: other bytes" in said
    assert "all/0.json" not in said
    with pytest.raises(ConfigError, match="no such directory"):
        checksums.verify(directory=str(tmp_path / "none"))
    # A record in which a byte has changed, too.
    record = tmp_path / "all" / "checksums.txt"
    record.write_bytes(b"x" + record.read_bytes()[1:])
    said = refused(capsys, "verify", str(tmp_path / "all"))
    assert "all/checksums.txt: a line that is no record" in said
