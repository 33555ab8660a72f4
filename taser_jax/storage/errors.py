"""Actionable errors: what was found, where, what was expected, and how to fix it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

EXIT_USER_ERROR = 2
# sysexits.h's EX_TEMPFAIL, "try again": launchers treat it as preempted, not failed.
EXIT_PREEMPTED = 75
# As if JAX had noticed first, which then aborts the process (SIGABRT): launchers see no difference.
EXIT_HOST_LOST = 134


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation: of a checkout, or of the package."""
    checkout = pathlib.Path(__file__).resolve().parents[2]
    if (checkout / "setup.py").exists():
        return f"pip install --editable '{checkout}[{extra}]'"
    return f"pip install 'taser_jax[{extra}]'"


class TaserError(Exception):
    """A problem with the user's input, configuration or machine, with a complete message.

    The command line prints it without a traceback and exits with `EXIT_USER_ERROR`.

    Example:
        >>> print(TaserError("answers is a string", where="train.jsonl:7, field 'answers'",
        ...                  expected="a list of strings", fix='write ["Paris"], not "Paris"'))
        train.jsonl:7, field 'answers': answers is a string
          expected: a list of strings
          fix: write ["Paris"], not "Paris"

    Args:
        found: the problem in a few words, with the offending value.
        where: its location: file:line, field, parameter or batch.
        expected: what would be correct.
        fix: how to fix it.
    """

    def __init__(
        self,
        found: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.found, self.where, self.expected, self.fix = found, where, expected, fix
        lines = [f"{where}: {found}" if where else found]
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))


class DataError(TaserError):
    """A file, line or record that cannot be used."""


class ConfigError(TaserError):
    """A Gin file, flag or combination of settings that cannot be used."""


def check_fields(
    config: object,
    *names: str,
    is_valid: Callable[[Any], bool],
    expected: str,
    fix: str | None = None,
) -> None:
    """Checks fields of a configuration.

    Raises:
        ConfigError: naming the first field whose value is not valid.
    """
    for name in names:
        value = getattr(config, name)
        if not is_valid(value):
            where = type(config).__name__
            raise ConfigError(f"{name} is {value!r}", where=where, expected=expected, fix=fix)


class FingerprintError(TaserError):
    """Artefacts of different models or collections that do not belong together."""


class StorageError(TaserError):
    """A full disk, or a directory that cannot be written."""


class BusyError(TaserError):
    """A directory that another process is writing."""


class NonFiniteLossError(TaserError):
    """A loss or gradient that is NaN or infinite; the last good checkpoint is kept."""


class HostLostError(Exception):
    """Another host ended or cannot be reached; rerunning the command on all hosts resumes."""


class Preempted(Exception):
    """SIGTERM arrived; the state is saved, and rerunning the command resumes from it."""
