"""Recorded sizes and checksums: what opening, `read_json` and `taser verify` find damaged."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tiny_training
from damage import flip

from taser_jax.cli import main as cli
from taser_jax.commands.verify import verify
from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.retrieval.bm25 import Bm25Index
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.retrieval.index import build_index
from taser_jax.retrieval.runs import Run, read_trec_run, write_trec_run
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError, DataError

TEXTS = ["the sea", "a hill", "the tree by the sea"]
IDS = ["s", "h", "t"]


@pytest.fixture
def tokens(tmp_path: pathlib.Path) -> pathlib.Path:
    tiny_training.write_token_store(tmp_path / "tokens")
    return tmp_path / "tokens"


def embedded(directory: pathlib.Path, rows: np.ndarray) -> pathlib.Path:
    """A finished directory of these embeddings."""
    metadata = {"kind": "embeddings", "format_version": 1, "fingerprints": {"model": "m"}}
    sizes = {"num_rows": len(rows), "dim": rows.shape[1], "shard_rows": 65536, "dtype": "float32"}
    path = directory / "embeddings-00000-of-00001.npy"
    with artifacts.replacing(path, recorded=True) as scratch, open(scratch, "wb") as file:
        np.save(file, rows)
    artifacts.write_json(directory / artifacts.METADATA, {**metadata, **sizes})
    return directory


def test_the_checksum_is_the_standards(tmp_path: pathlib.Path):
    (tmp_path / "x").write_bytes(b"123456789")
    assert checksums.crc(tmp_path / "x") == "cbf43926"
    (tmp_path / "x").write_bytes(b"123456789" * 700_000)
    assert len(checksums.crc(tmp_path / "x")) == 8


def test_a_replaced_file_has_one_line(tmp_path: pathlib.Path):
    path = tmp_path / "a b.json"
    for value in ({"x": 1}, {"x": 22}, {"x": 1}):
        artifacts.write_json(path, value)
        assert artifacts.read_json(path) == value
    lines = (tmp_path / checksums.FILE).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["a b.json"]


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_file_is_never_damaged_by_a_kill(tmp_path: pathlib.Path, monkeypatch, killed_at: int):
    """At each of the three steps that replace it, the file is whole or has no line."""
    path, scratch, steps = tmp_path / "a.json", tmp_path / "scratch", []
    artifacts.write_json(path, {"x": 1})
    scratch.write_text('{"x": 22}')
    write, rename = checksums._write, os.replace

    def die_at_step() -> None:
        steps.append(1)
        if len(steps) == killed_at:
            raise KeyboardInterrupt

    def dying_write(directory: pathlib.Path, records: dict) -> None:
        die_at_step()
        write(directory, records)

    def dying_rename(source: pathlib.Path, target: pathlib.Path) -> None:
        if target == path:
            die_at_step()
        rename(source, target)

    monkeypatch.setattr(checksums, "_write", dying_write)
    monkeypatch.setattr(os, "replace", dying_rename)
    with pytest.raises(KeyboardInterrupt):
        checksums.replace(path, scratch)
    assert artifacts.read_json(path) == ({"x": 1} if killed_at < 3 else {"x": 22})


def test_what_nobody_recorded_is_not_checked(tmp_path: pathlib.Path):
    path = tmp_path / "old.json"
    path.write_text("{}")
    assert artifacts.read_json(path) == {}
    # Torn by a kill, or damaged itself: says nothing, and the next line stands by itself.
    (tmp_path / checksums.FILE).write_bytes(b"0000 2 old.js")
    assert artifacts.read_json(path) == {}
    artifacts.write_json(tmp_path / "new.json", {"y": 1})
    assert set(checksums.read(tmp_path)) == {"new.json"}


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
        *(
            "passages/ids.npy",
            "passages/lengths.npy",
            "metadata.json",
            "vocabulary/vocabulary.json",
        ),
        *("queries/first/train/positives.values.npy", "queries/first/train/query_ids.json"),
    ],
)
def test_a_damaged_token_store_is_refused(
    tokens: pathlib.Path, name: str, damage: Callable[[pathlib.Path], None], said: str
):
    TokenStore.open(tokens)
    assert verify(directory=str(tokens)) > 10
    damage(tokens / name)
    with pytest.raises(DataError) as caught:
        TokenStore.open(tokens)
    if name == "metadata.json" and said == "missing":
        assert "unfinished" in str(caught.value)
    else:
        assert f"{name}: damaged after it was written: " in str(caught.value)
        assert said in str(caught.value)
    assert "`taser tokenize`" in str(caught.value)
    with pytest.raises(DataError, match=f"{tokens / name}: .*{said}"):
        verify(directory=str(tokens.parent))


def test_rows_that_were_exchanged_are_found(tokens: pathlib.Path):
    path = tokens / "passages" / "ids.npy"
    ids = np.load(path)
    np.save(path, ids[::-1])
    with pytest.raises(DataError, match=r"passages/ids\.npy: damaged"):
        TokenStore.open(tokens)


@pytest.mark.parametrize("length", [5000, -4, 0])
def test_impossible_lengths_are_named_also_where_nothing_is_recorded(
    tokens: pathlib.Path, length: int
):
    (tokens / checksums.FILE).unlink()
    lengths = np.load(tokens / "passages" / "lengths.npy")
    lengths[7] = length
    np.save(tokens / "passages" / "lengths.npy", lengths)
    with pytest.raises(DataError, match=f"(?s)row 7 has length {length}, not 1 to "):
        TokenStore.open(tokens)


def test_a_store_of_an_earlier_version_opens(tokens: pathlib.Path):
    for path in tokens.rglob(checksums.FILE):
        path.unlink()
    assert len(TokenStore.open(tokens).queries("first", "train")) > 0
    assert verify(directory=str(tokens)) == 0


def test_large_artefacts_are_read_by_verify_alone(
    tokens: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checksums, "READ_ON_OPENING", 1000)
    flip(tokens / "passages" / "ids.npy")
    TokenStore.open(tokens)
    with pytest.raises(DataError, match=r"passages/ids\.npy"):
        verify(directory=str(tokens))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_embeddings_that_are_not_finite_are_refused_with_their_rows(
    tmp_path: pathlib.Path, value: float
):
    rows = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    index = build_index(embedded(tmp_path / "whole", rows), tmp_path / "index")
    assert (index.search(rows[:2], 40).rows >= 0).all()
    bad = rows.copy()
    bad[[3, 17], 1] = value
    with pytest.raises(DataError, match=r"passage embeddings: .* in 2 rows: 3, 17"):
        build_index(embedded(tmp_path / "bad", bad), tmp_path / "bad index")
    assert not (tmp_path / "bad index" / artifacts.METADATA).exists()
    with pytest.raises(DataError, match=r"query embeddings: .*: 3, 17"):
        index.search(bad[:20], 2)


def test_a_damaged_shard_run_and_index_are_refused(tmp_path: pathlib.Path):
    embedded(tmp_path / "e", np.ones((4, 2), np.float32))
    flip(tmp_path / "e" / "embeddings-00000-of-00001.npy")
    with pytest.raises(DataError, match=r"(?s)00001\.npy: damaged.*makes embeddings again"):
        Embeddings(tmp_path / "e")

    Bm25Index.build(TEXTS, tmp_path / "b", fingerprints={})
    flip(next((tmp_path / "b").glob("*data*.npy")))
    with pytest.raises(DataError, match=r"(?s)\.npy: damaged.*bm25 index again"):
        Bm25Index.open(tmp_path / "b")

    rows, scores = np.array([[2, 0]], np.int32), np.array([[2.0, 1.0]], np.float32)
    path = tmp_path / "r" / "t.test.trec"
    write_trec_run(path, Run(["q"], rows, scores), ids=IDS)
    assert read_trec_run(path, IDS.index).rows.tolist() == [[2, 0]]
    flip(path, 7)
    with pytest.raises(DataError, match=r"(?s)t\.test\.trec: damaged.*`taser search`"):
        read_trec_run(path, IDS.index)


def test_damaged_negatives_are_refused(tmp_path: pathlib.Path):
    metadata = {"collection_fingerprint": "c", "source": "s"}
    lists = {"query_ids": ["q"], "rows": [[1, 2]], "scores": [[2.0, 1.0]]}
    path = write_negatives(tmp_path, "t", "train", metadata=metadata, **lists)
    text = path.read_text()
    path.write_text(text.replace("[1, 2]", "[1, 3]"))
    with pytest.raises(DataError, match=r"(?s)t\.train\.jsonl: damaged.*`taser mine`"):
        read_negatives(tmp_path, "t", "train", ["q"])


def test_verify_on_the_command_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    for number in range(25):
        artifacts.write_json(tmp_path / "all" / f"{number}.json", {"n": number})
    shutil.copytree(tmp_path / "all", tmp_path / "copy")
    assert cli.run(["verify", str(tmp_path / "copy")]) == 0
    for path in (tmp_path / "copy").glob("*.json"):
        flip(path)
    assert cli.run(["verify", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "25 of 50 files" in said
    assert "and 5 more" in said
    assert "copy/0.json: other bytes" in said
    assert "all/0.json" not in said
    with pytest.raises(ConfigError, match="no such directory"):
        verify(directory=str(tmp_path / "none"))
    assert json.loads((tmp_path / "all" / "3.json").read_text()) == {"n": 3}
