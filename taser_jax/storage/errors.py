"""Actionable errors: what was found, where, what was expected, and how to fix it."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

EXIT_USER_ERROR = 2
# sysexits.h's EX_TEMPFAIL, "try again": launchers treat it as preempted, not failed.
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
# As if JAX had noticed first, which then aborts the process (SIGABRT): launchers see no difference.
EXIT_HOST_LOST = 134

_FULL_DISK = (
    "a directory that can be written, with room left on its disk",
    "free some space or choose another directory, then run the same command again",
)
_FORBIDDEN = (
    "a directory that can be written",
    "choose a directory you may write to, or change its permissions",
)
_A_DISK = ("a directory that can be renamed", "it is the root of a disk: name a directory in it")
_A_PATH = "the path of a file or directory that can exist"
# Numbers of failed reads and writes -> what is expected, and what to do.
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL_DISK),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO), _FORBIDDEN),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _FORBIDDEN),
    errno.ENAMETOOLONG: (
        _A_PATH,
        "choose a shorter name: each part of a path has at most 255 bytes",
    ),
    errno.ELOOP: (
        _A_PATH,
        "name the directory that the link is meant for: this one leads to itself",
    ),
    **dict.fromkeys((errno.EBUSY, errno.EXDEV), _A_DISK),
    errno.EMFILE: ("room for another open file", "allow more of them: ulimit -n 4096"),
}
_PARTIAL_WRITE = re.compile(r"\d+ requested and \d+ written")
_KINDS_OF_PATHS = "local paths and gs:// are read and written; copy the files to one of these"
# What other libraries say where something is absent -> in our words, and what to do.
_ABSENT = (
    (
        r"Unable to initialize backend '(\w+)'",
        "no {} is here, or another process has it",
        "set JAX_PLATFORMS=cpu to compute without it, or end the other process",
    ),
    (r"^'(\w+)://'", "{}:// is no kind of path", _KINDS_OF_PATHS),
    (r"File system scheme '(\w+)' not impl", "{}:// is no kind of path here", _KINDS_OF_PATHS),
    (
        r"Error executing an HTTP request: (.+)",
        "the bucket cannot be reached: {}",
        "check its name, the network, and `gcloud auth application-default login`",
    ),
    (
        r"[Ii]nstall (\w+) to access ",
        "paths of this kind need {} or TensorFlow, and neither is installed",
        "pip install {}, or tensorflow",
    ),
)
_LONGEST_SHOWN = 120


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation: of a checkout, or of the package."""
    checkout = pathlib.Path(__file__).resolve().parents[2]
    if (checkout / "setup.py").exists():
        return f"pip install --editable '{checkout}[{extra}]'"
    return f"pip install 'taser_jax[{extra}]'"


def check_known(
    names: Iterable[str], there: Iterable[str], *, where: str, what: str = "task"
) -> None:
    """Rejects tasks that the data do not have, or other names that are not there.

    Raises:
        ConfigError: naming both.
    """
    if unknown := sorted(set(names).difference(there)):
        fix = f"name some of {', '.join(sorted(there)) or '(none)'}"
        raise ConfigError(f"no {what} {', '.join(unknown)}", where=where, fix=fix)


def check_names_some(tasks: Sequence[str] | None) -> None:
    """Rejects a list of tasks without any; None means all.

    Raises:
        ConfigError: it is empty.
    """
    if tasks is not None and not tasks:
        fix = "name at least one task, or set None for all"
        raise ConfigError("a list without a task", where="TASKS", fix=fix)


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """Suggests the nearest choice; None if no choice is similar."""
    nearest = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else None


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
        problem: what is wrong in a few words, with the offending value.
        where: its location: file:line, field, parameter or batch.
        expected: what would be correct.
        fix: how to fix it.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem, self.where, self.expected, self.fix = problem, where, expected, fix
        # One line, also of a path with line ends.
        place = (where or "").replace("\n", "\\n")
        lines = [f"{place}: {problem}" if place else problem]
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
    config: object, name: str, *, is_valid: Callable[[Any], bool], expected: str
) -> None:
    """Raises `ConfigError`, naming the field, where a configuration's value is not valid."""
    value = getattr(config, name)
    if not is_valid(value):
        where = type(config).__name__
        raise ConfigError(f"{name} is {value!r}", where=where, expected=expected)


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


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str], *, doing: str = "write") -> Iterator[None]:
    """Turns failed writes into a `StorageError` that says what to do.

    Example:
        >>> with storage_errors("out"):  # doctest: +SKIP
        ...     write_everything("out")

    Args:
        path: what is being written, for the message.
        doing: what is being done, for the message.

    Raises:
        StorageError: for a full disk, a read-only or forbidden place, an exhausted quota, or a path
            that no file can have.
        ConfigError: there is no such accelerator, kind of path, bucket or package for it.
    """
    try:
        yield
    except TaserError:
        raise
    except Exception as error:
        for pattern, problem, fix in _ABSENT:
            if what := re.search(pattern, str(error)):
                raise ConfigError(
                    problem.format(what[1]), where=os.fspath(path), fix=fix.format(what[1])
                ) from error
        number = _number(error)
        if number not in _FIXES:
            raise
        # TensorStore's texts are long, and end with the system's.
        reason = str(error) if len(str(error)) <= _LONGEST_SHOWN else os.strerror(number or 0)
        if isinstance(error, OSError) and error.errno:
            named = f" ({error.filename})" if error.filename else ""
            reason = f"{error.strerror}{named}"
        expected, fix = _FIXES[number]
        raise StorageError(
            f"could not {doing}: {reason}", where=os.fspath(path), expected=expected, fix=fix
        ) from error


def _number(error: Exception) -> int | None:
    """The operating system's; NumPy, ArrayRecord and TensorFlow have it in the text alone."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    if _PARTIAL_WRITE.search(text):
        return errno.ENOSPC
    if "embedded null" in text:
        return errno.EISDIR
    return next((number for number in _FIXES if os.strerror(number).lower() in text.lower()), None)
