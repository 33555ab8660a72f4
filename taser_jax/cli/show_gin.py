"""`taser gin`: the Gin files at hand."""

from __future__ import annotations

import pathlib

from taser_jax.cli.command_options import listed, packaged
from taser_jax.cli.gin_files import find_gin_file


def show_gin(*, file: str | None = None) -> None:
    """Prints a Gin file, or lists those at hand with what they are for.

    Args:
        file: a packaged file, such as models/taser.gin, or one of the working directory; None lists
            all of both.

    Raises:
        ConfigError: no such file; suggests the nearest.
    """
    if file is not None:
        print(find_gin_file(file).read_text(encoding="utf-8"), end="")
        return
    here = sorted(path.name for path in pathlib.Path().glob("*.gin"))
    print(listed([*here, *packaged()]), end="")


CONFIGURABLES = ()
