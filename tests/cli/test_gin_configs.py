"""Every packaged Gin file resolves for its command, and what has replaced former macros exists."""

import dataclasses
import re
from collections.abc import Iterator

import pytest

from taser_jax.cli import command_table, configuration
from taser_jax.cli.command_table import load
from taser_jax.cli.gin_files import gin_directory, packaged

FILES = packaged()
# Command and recipe -> files that are read after it.
TOGETHER = {
    ("train", "runs/taser_base"): [
        *("models/bert_pretrained", "models/routing_regularizer", "models/taser_released"),
        *("optim/naive", "optim/pcgrad", "optim/cgd", "optim/gradnorm"),
        *("optim/tsage", "optim/tsage_released"),
    ],
    ("train", "runs/train"): [
        *("models/bert_tiny models/shared", "models/modernbert_tiny models/taser"),
        *("models/t5_base", "models/t5_1_1_base", "models/sentence_t5", "models/t5_fusion"),
        *("models/bert_fusion", "models/t5_base models/t5_pretrained"),
    ],
    ("pipeline moma", "runs/moma_mini"): [""],
    ("pipeline taser", "runs/open_qa_pretrained"): ["runs/taser_claims"],
    ("pipeline ance", "runs/pydocs_ance"): ["optim/tsage"],
    ("pipeline ance", "runs/kilt_mini_ance"): [
        *("optim/tsage runs/kilt_mini_tsage", "optim/pcgrad", "optim/cgd", "optim/gradnorm")
    ],
}


def _text(file: str) -> str:
    return (gin_directory() / file).read_text(encoding="utf-8")


def _included(file: str) -> list[str]:
    return re.findall("^include '(.*)'", _text(file), re.MULTILINE)


def _files(*gin_files: str) -> Iterator[str]:
    """Files, and all that they include."""
    for file in gin_files:
        yield file
        yield from _files(*_included(file))


def _lines(*gin_files: str) -> list[str]:
    return [line for file in _files(*gin_files) for line in _text(file).splitlines()]


def _pairs() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each command with its files, each recipe by itself, and those that are read together."""
    names = {command.function: name for name, command in command_table.COMMANDS.items()}
    # The last two are read with another file alone.
    parts = {part for file in FILES for part in _included(file)}
    parts |= {"runs/pydocs_ance.gin", "runs/taser_claims.gin"}
    for name, command in command_table.COMMANDS.items():
        parts.add(command.gin_file)
        yield name, command.gin_files()
    for file in FILES:
        if file not in parts:
            bound = {line.partition(".")[0] for line in _lines(file)}
            yield from ((names[function], (file,)) for function in bound & names.keys())
    for (name, recipe), others in TOGETHER.items():
        for files in others:
            yield name, tuple(f"{file}.gin" for file in (recipe, *files.split()))


PAIRS = sorted(set(_pairs()))


@pytest.mark.parametrize(("name", "gin_files"), PAIRS)
def test_it_resolves(name, gin_files):
    recipe_of = command_table.COMMANDS[name].recipe_of
    function, recipe_of = load(name), load(recipe_of) if recipe_of else None
    flags = configuration.GinFlags(files=gin_files)
    resolved = configuration.resolve(function, flags=flags, allow_unset=True, recipe_of=recipe_of)
    assert not resolved.unused
    # What is required is documented, can be set by its name, and then nothing is left open.
    comments = [line for line in _lines(*gin_files) if line.startswith("#")]
    for name in resolved.unset:
        assert re.search(rf"\b{re.escape(name.split('/')[-1])}\b", "\n".join(comments)), name
    bindings = tuple((name, "something") for name in resolved.unset)
    flags = dataclasses.replace(flags, bindings=bindings)
    assert configuration.resolve(function, flags=flags, recipe_of=recipe_of).unset == ()


def test_every_file_is_in_a_recipe_that_is_resolved():
    assert set(FILES) == {file for _, files in PAIRS for file in _files(*files)}


def test_taser_base_is_short():
    """A reader of the paper's recipe opens at most five files, of 90 lines in all."""
    assert len(_lines("runs/taser_base.gin")) <= 90
    assert len(list(_files("runs/taser_base.gin"))) <= 5
