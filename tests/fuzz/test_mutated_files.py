"""Mutated files of every format: each is read or refused with a message, never a traceback.

`launch/test.sh` takes a sample; the slow run has more than 20,000 cases.
"""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
import tiny_training
from formats import FORMATS
from mutations import mutated

from taser_jax.cli import main as cli
from taser_jax.data.token_store.negatives import read_negatives, write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage import checksums
from taser_jax.storage.errors import TaserError

SAMPLE, MANY = 25, 1300
GIN = b"TRAIN_STEPS = 3\nLoopConfig.log_period = 5\n# a comment\nTASKS = ['a', 'b']\n"


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(MANY, marks=pytest.mark.release)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_or_refused(name: str, cases: int, tmp_path: pathlib.Path):
    file, content, read = FORMATS[name]
    path = tmp_path / file
    path.write_bytes(content)
    read(path)
    rng = np.random.default_rng([len(name), *name.encode(), cases])
    refused = 0
    for _ in range(cases):
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            found = read(path)
        except TaserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        else:
            if name in ("beir corpus", "beir queries", "kilt queries"):
                # Lines in are lines out: the others were named.
                assert len(found) == sum(bool(line.strip()) for line in changed.split(b"\n"))
    assert refused


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(600, marks=pytest.mark.release)])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_mutated_token_store_is_read_or_refused(
    recorded: bool, cases: int, tmp_path: pathlib.Path
):
    tiny_training.write_token_store(tmp_path / "whole")
    rng = np.random.default_rng([cases, recorded])
    files = sorted(
        path.relative_to(tmp_path / "whole")
        for path in (tmp_path / "whole").rglob("*")
        if path.is_file() and path.name != checksums.FILE
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "changed")
    if not recorded:
        (tmp_path / "changed" / checksums.FILE).unlink()
    for _ in range(cases):
        name = files[rng.integers(len(files))]
        content = (tmp_path / "whole" / name).read_bytes()
        changed = mutated(content, rng)
        (tmp_path / "changed" / name).write_bytes(changed)
        refused = False
        try:
            store = TokenStore.open(tmp_path / "changed")
            for entry in store.metadata.queries:
                store.queries(entry.task, entry.split)
        except TaserError:
            refused = True
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        assert refused or not recorded or changed == content, (name, changed)
        (tmp_path / "changed" / name).write_bytes(content)


@pytest.mark.parametrize("cases", [SAMPLE, pytest.param(MANY, marks=pytest.mark.release)])
def test_mutated_negatives_are_read_or_refused(cases: int, tmp_path: pathlib.Path):
    path = write_negatives(
        tmp_path,
        "t",
        "train",
        query_ids=["q0", "q1"],
        rows=[[1, 2], [0]],
        scores=[[2.0, 1.0], [0.5]],
        metadata={"collection_fingerprint": "c", "source": "s"},
    )
    content = path.read_bytes()
    (tmp_path / checksums.FILE).unlink()
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            read_negatives(tmp_path, "t", "train", ["q0", "q1"])
        except TaserError:
            pass
        except Exception as error:
            raise AssertionError(repr(changed)) from error


@pytest.mark.parametrize("cases", [5, pytest.param(200, marks=pytest.mark.release)])
def test_a_mutated_gin_file_is_refused(cases: int, tmp_path: pathlib.Path, capsys):
    path = tmp_path / "x.gin"
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        path.write_bytes(mutated(GIN, rng))
        # Required paths are missing in any case.
        assert cli.run(["evaluate", f"--gin_file={path}"]) == 2, path.read_bytes()
        capsys.readouterr()
