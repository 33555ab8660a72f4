"""Errors a person can act on: what was found, where, what was expected and how to fix it."""

from __future__ import annotations

EXIT_USER_ERROR = 2
# sysexits.h's EX_TEMPFAIL, "try again": what launchers take as preempted, not failed.
EXIT_PREEMPTED = 75


class TaserError(Exception):
    """A problem in the user's input, configuration or machine, told in full.

    The command line prints it without a traceback and exits with `EXIT_USER_ERROR`.

    Example:
        >>> print(TaserError("answers is a string", where="train.jsonl:7, field 'answers'",
        ...                  expected="a list of strings", fix='write ["Paris"], not "Paris"'))
        train.jsonl:7, field 'answers': answers is a string
          expected: a list of strings
          fix: write ["Paris"], not "Paris"

    Args:
        found: what is wrong, in a few words, with the offending value.
        where: file:line, field, parameter or batch it was found in.
        expected: what would have been right.
        fix: what to do about it.
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


class FingerprintError(TaserError):
    """Artefacts of different models or collections that were put together."""


class StorageError(TaserError):
    """A disk that is full or a directory that cannot be written."""


class NonFiniteLossError(TaserError):
    """A loss or gradient that is NaN or infinite; the last good checkpoint is kept."""


class Preempted(Exception):
    """SIGTERM arrived; the state is saved and the same command goes on from it."""
