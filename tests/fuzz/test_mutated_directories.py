"""Directories from elsewhere with one mutated file: each is read or refused with a message."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import orbax.checkpoint as ocp
import pytest
from legacy_t5x import write_legacy
from mutations import mutated
from sentence_models import save_bert_pieces

from taser_jax.data.text.vocabularies import load_vocabulary, train_vocabulary
from taser_jax.interop.t5x import read_t5x
from taser_jax.storage.errors import TaserError

TARGET = {
    "token_embedder": {"embedding": np.arange(35, dtype=np.float32).reshape(7, 5)},
    "encoder": {"encoder_norm": {"scale": np.array([1.5, -2], np.float32)}},
}
TEXTS = ["the capital of norway", "a quick brown fox jumps over lazy dogs", "who mixes five boxes?"]


def legacy(directory: pathlib.Path) -> None:
    write_legacy(directory, TARGET)


def orbax(directory: pathlib.Path) -> None:
    ocp.PyTreeCheckpointer().save(directory, {"target": TARGET})


def vocabulary(kind: str) -> Callable[[pathlib.Path], None]:
    def make(directory: pathlib.Path) -> None:
        if kind == "wordpiece":
            train_vocabulary(TEXTS * 9, size=70, output_dir=directory)
        else:
            save_bert_pieces(directory, TEXTS * 9, 70)

    return make


def use_vocabulary(path: pathlib.Path) -> None:
    found = load_vocabulary(path)
    (ids,) = found.encode(["the capital Ω 中 <extra_id_0>"])
    assert all(0 <= one < found.size for one in ids)


Act = Callable[[pathlib.Path], object]
# Name -> (what writes the directory, what reads it or one of its files, that file).
DIRECTORIES: dict[str, tuple[Act, Act, str | None]] = {
    "t5x": (legacy, read_t5x, None),
    "t5x orbax": (orbax, read_t5x, None),
    "wordpiece": (vocabulary("wordpiece"), use_vocabulary, None),
    "sentencepiece": (vocabulary("sentencepiece"), use_vocabulary, None),
    # Without vocabulary.json, which would say that it was changed.
    "vocab.txt": (vocabulary("wordpiece"), use_vocabulary, "vocab.txt"),
    "sentencepiece.model": (vocabulary("sentencepiece"), use_vocabulary, "sentencepiece.model"),
}


@pytest.mark.parametrize("cases", [20, pytest.param(1000, marks=pytest.mark.release)])
@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_with_a_mutated_file_is_read_or_refused(
    name: str, cases: int, tmp_path: pathlib.Path
):
    make, read, only = DIRECTORIES[name]
    directory = tmp_path / "made"
    make(directory)
    read(directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if only is not None:
        files = [directory / only]
    rng = np.random.default_rng([len(name), *name.encode(), cases])
    refused = 0
    for _ in range(cases):
        path = files[rng.integers(len(files))]
        content = path.read_bytes()
        changed = mutated(content, rng)
        path.write_bytes(changed)
        try:
            read(directory if only is None else path)
        except TaserError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}, {path.name}: {changed[:2000]!r}") from error
        path.write_bytes(content)
    assert refused
