"""What a recipe gives a command, without running it."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import gin

from taser_jax.cli import configuration
from taser_jax.cli import main as cli
from taser_jax.cli.command_line import configurable_names


def value(command: str, parameter: str, *gin_files: str, **macros: str) -> Any:
    """One of the arguments that a command would be called with.

    Example:
        `value("pipeline ance", "setting", "runs/kilt_mini_ance.gin")` is its `Setting`.

    Args:
        command: as typed, without `taser`.
        parameter: of the command's function.
        gin_files: the recipe, in its order.
        macros: as on the command line; those that are required and not given are text.
    """
    entry = cli.COMMANDS[command]
    module = importlib.import_module(f"taser_jax.{entry.module}")
    function = getattr(module, entry.function)

    def resolve(bindings: tuple[tuple[str, str], ...]) -> configuration.Resolved:
        flags = configuration.GinFlags(files=gin_files, bindings=bindings)
        return configuration.resolve(
            function,
            configurables=module.CONFIGURABLES,
            flags=flags,
            allow_unset=True,
            elsewhere=configurable_names(),
        )

    given = tuple(macros.items())
    resolve((*given, *((macro, "something") for macro in resolve(given).unset)))
    # Copying a reference calls what it refers to.
    return copy.deepcopy(gin.query_parameter(f"{function.__name__}.{parameter}"))
