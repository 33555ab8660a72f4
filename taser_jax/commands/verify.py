"""`taser verify`: reads every file whose checksum is recorded."""

from __future__ import annotations

import pathlib

from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger

_SHOWN = 20


def verify(*, directory: str) -> int:
    """Compares all files of the artefacts below a directory with the checksums recorded of them.

    Every artefact has a `checksums.txt` with the size and CRC-32 of its files: collections, token
    stores, negatives, embeddings, indexes, runs, models, checkpoints, stages and results. Other
    commands compare them whenever they open one, those of large files once per change.

    Args:
        directory: an artefact, or a folder of artefacts.

    Returns:
        Number of files compared.

    Raises:
        DataError: files that are missing, damaged or without a record; names them.
    """
    if not pathlib.Path(directory).is_dir():
        raise ConfigError("no such directory", where=directory, fix="give a folder of artefacts")
    checked = list(checksums.verify(directory))
    if not checked:
        raise DataError(
            "no artefact here, so nothing could be compared",
            where=directory,
            fix="give a folder of artefacts",
        )
    bad = [f"{path}: {problem}" for path, problem in checked if problem is not None]
    if bad:
        more = [f"and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        count = f"{len(bad)} of {len(checked):,} files are not what {checksums.FILE} has recorded"
        raise DataError(
            "\n    ".join([count, *bad[:_SHOWN], *more]),
            where=directory,
            fix="delete what is damaged and run the command that makes it again; keep files of "
            "your own elsewhere",
        )
    logger.info("%s: %s files are what was written", directory, f"{len(checked):,}")
    return len(checked)
