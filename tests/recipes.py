"""What a recipe gives a command, without running it."""

import copy
from typing import Any

import gin

from taser_jax.cli import configuration
from taser_jax.cli.command_table import load


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
    function = load(command)

    def resolve(bindings: tuple[tuple[str, str], ...]) -> configuration.Resolved:
        flags = configuration.GinFlags(files=gin_files, bindings=bindings)
        return configuration.resolve_command(command, flags, allow_unset=True)

    given = tuple(macros.items())
    resolve((*given, *((macro, "something") for macro in resolve(given).unset)))
    # Copying a reference calls what it refers to.
    return copy.deepcopy(gin.query_parameter(f"{function.__name__}.{parameter}"))
