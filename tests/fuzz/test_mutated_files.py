"""Mutated files of every format: each is read or refused with a message, never a traceback.

`launch/test.sh` takes a sample; the slow run has more than 20,000 cases.
"""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from formats import FORMATS
from mutations import mutated

from taser_jax.storage.errors import TaserError

SAMPLE, MANY = 25, 1300


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
            records = read(path)
        except TaserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}: {changed!r}") from error
        else:
            if name in ("beir corpus", "kilt queries"):
                # Lines in are lines out: the others were named.
                assert len(records) == sum(bool(line.strip()) for line in changed.split(b"\n"))
    assert refused
