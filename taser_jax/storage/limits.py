"""Limits on the memory that one line or one array of a foreign file may take.

A few bytes of a compressed file, or a number in its header, can claim any amount of memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

from taser_jax.storage.errors import DataError
from taser_jax.storage.typed_files import Checked, Positive

_MIB, _GIB = 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Limits(Checked):
    """The limits; set by flags of every command, or by `use`.

    Attributes:
        line_mib: MiB of one line, or of one record of a JSON array.
        array_gib: GiB of one array of a checkpoint from elsewhere.
    """

    line_mib: Positive = 64
    array_gib: Positive = 16


_in_use = Limits()


@contextlib.contextmanager
def use(limits: Limits) -> Iterator[Limits]:
    """Sets the limits of all readers inside the `with`, in every thread.

    Example:
        >>> with use(Limits(line_mib=1024)) as limits:
        ...     limits.line_mib
        1024
    """
    global _in_use
    former, _in_use = _in_use, limits
    try:
        yield limits
    finally:
        _in_use = former


def line_bytes() -> int:
    """Maximum bytes of a line."""
    return _in_use.line_mib * _MIB


def line_too_long(path: str | os.PathLike[str], line: int) -> DataError:
    """The error for a line, or for one record of a JSON array, beyond the limit."""
    return DataError(
        f"longer than {_in_use.line_mib:,} MiB",
        where=f"{os.fspath(path)}:{line}",
        expected="lines within the limit: one passage, query or record each",
        fix="check that the file has line ends, and is what it should be; "
        "--max_line_mib=... allows more",
    )


def check_array(size: int, *, what: str, where: str) -> None:
    """Refuses an array beyond the limit.

    Args:
        size: its bytes.
        what: the array, for the message.
        where: the file and field that claim this size.

    Raises:
        DataError: it is beyond the limit.
    """
    if size > _in_use.array_gib * _GIB:
        raise DataError(
            f"{what} takes {size / _GIB:,.0f} GiB",
            where=where,
            expected=f"at most {_in_use.array_gib:,} GiB for one array",
            fix="check that the file is what it should be; --max_array_gib=... allows more",
        )
