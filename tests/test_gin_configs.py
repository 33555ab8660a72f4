"""Every packaged Gin file resolves for its command."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from taser_jax import cli, configuration

RECIPES = {"train": ("runs/taser_base.gin", "runs/dpr_base.gin")}
PAIRS = sorted(
    {(name, command.gin_file) for name, command in cli.COMMANDS.items()}
    | {(name, path) for name, paths in RECIPES.items() for path in paths}
)


@pytest.mark.parametrize(("name", "gin_file"), PAIRS)
def test_it_resolves(name, gin_file):
    command = cli.COMMANDS[name]
    module = importlib.import_module(f"taser_jax.pipelines.{command.module}")
    function = getattr(module, command.function)
    flags = configuration.GinFlags(files=(gin_file,))
    resolved = configuration.resolve(
        function, configurables=module.CONFIGURABLES, flags=flags, allow_unset=True
    )
    # Commands that compare systems include the settings of each, whichever is taken.
    assert not resolved.unused or name in ("pipeline taser", "quickstart"), resolved.unused
    assert all(macro == macro.upper() for macro in resolved.unset)
    # What is required can be set by its macro, and then nothing is left open.
    bindings = tuple((macro, "something") for macro in resolved.unset)
    flags = dataclasses.replace(flags, bindings=bindings)
    again = configuration.resolve(function, configurables=module.CONFIGURABLES, flags=flags)
    assert again.unset == ()
