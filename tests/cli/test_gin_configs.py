"""Every packaged Gin file resolves for its command, and what has replaced former macros exists."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator

import pytest

from taser_jax.cli import command_table, configuration
from taser_jax.cli.command_table import load
from taser_jax.cli.gin_files import gin_directory
from taser_jax.storage.errors import ConfigError

RECIPES = {
    "train": (
        ("runs/taser_base.gin",),
        ("runs/dpr_base.gin",),
        ("runs/taser_base.gin", "models/bert_pretrained.gin"),
        ("runs/train.gin", "models/bert_tiny.gin", "models/shared.gin"),
        ("runs/train.gin", "models/modernbert_tiny.gin", "models/taser.gin"),
        ("runs/taser_base.gin", "models/routing_regularizer.gin"),
        ("runs/taser_base.gin", "models/taser_released.gin"),
        ("runs/taser_base.gin", "models/teacher.gin"),
        ("runs/train.gin", "models/t5_base.gin"),
        ("runs/train.gin", "models/t5_1_1_base.gin"),
        ("runs/train.gin", "models/sentence_t5.gin"),
        ("runs/train.gin", "models/t5_base.gin", "models/t5_pretrained.gin"),
        ("runs/train.gin", "models/t5_fusion.gin"),
        ("runs/train.gin", "models/bert_fusion.gin"),
        *(
            ("runs/taser_base.gin", f"optim/{combiner}.gin")
            for combiner in ("naive", "pcgrad", "cgd", "gradnorm", "tsage", "tsage_released")
        ),
    ),
    "tokenize": (("runs/kilt_full_tokenize.gin",),),
    "prepare": (
        ("runs/kilt_mini_prepare.gin",),
        ("runs/kilt_full_prepare.gin",),
        ("runs/muf_mini_prepare.gin",),
        ("runs/odqa_prepare.gin",),
        ("runs/open_qa_prepare.gin",),
    ),
    "evaluate": (("runs/entity_questions.gin",),),
    "pipeline taser": (
        ("runs/open_qa.gin",),
        ("runs/open_qa_pretrained.gin",),
        ("runs/open_qa_pretrained.gin", "runs/taser_claims.gin"),
        ("runs/odqa.gin",),
        ("runs/yardstick.gin",),
    ),
    "pipeline muf": (("runs/muf_wiki.gin",), ("runs/muf_mini.gin",)),
    "pipeline moma": (("runs/moma_mini.gin",), ("runs/moma_gate.gin",), ("runs/moma_base.gin",)),
    "pipeline ance": (
        ("runs/kilt_mini_ance.gin",),
        ("runs/kilt_mini_ance.gin", "optim/tsage.gin", "runs/kilt_mini_tsage.gin"),
        ("runs/taco_dr_kilt.gin",),
        ("runs/pydocs_ance.gin", "optim/tsage.gin"),
        *(
            ("runs/kilt_mini_ance.gin", f"optim/{other}.gin")
            for other in ("pcgrad", "cgd", "gradnorm")
        ),
    ),
    "quickstart": (("runs/quickstart_scratch.gin",),),
}
PAIRS = sorted(
    {(name, command.gin_files()) for name, command in command_table.COMMANDS.items()}
    | {(name, files) for name, recipes in RECIPES.items() for files in recipes}
)

FILES = sorted(str(path.relative_to(gin_directory())) for path in gin_directory().rglob("*.gin"))


def _lines(*gin_files: str) -> Iterator[str]:
    """Lines of files and of what they include."""
    for file in gin_files:
        for line in (gin_directory() / file).read_text(encoding="utf-8").splitlines():
            yield line
            if line.startswith("include"):
                yield from _lines(line.split("'")[1])


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
    again = configuration.resolve(function, flags=flags, recipe_of=recipe_of)
    assert again.unset == ()


def test_every_file_is_in_a_recipe_that_is_resolved():
    resolved = {pathlib.PurePath(file) for _, files in PAIRS for file in files}
    included = {
        pathlib.PurePath(line.split("'")[1])
        for _, files in PAIRS
        for line in _lines(*files)
        if line.startswith("include")
    }
    assert {pathlib.PurePath(file) for file in FILES} == resolved | included


def test_taser_base_is_short():
    """A reader of the paper's recipe opens at most five files, of 90 lines in all."""
    lines = list(_lines("runs/taser_base.gin"))
    assert len(lines) <= 90
    assert 1 + sum(line.startswith("include") for line in lines) <= 5


def test_a_macro_of_another_command_is_answered_with_the_nearest():
    files = command_table.COMMANDS["encode"].gin_files()
    flags = configuration.GinFlags(files=files, bindings=(("RUNS_DIR", "2"),))
    with pytest.raises(ConfigError, match=r"macro RUNS_DIR is set, but nothing(.|\n)*did you mean"):
        configuration.resolve(load("encode"), flags=flags)
