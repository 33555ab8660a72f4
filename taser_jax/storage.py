"""Writing that fails is told as what it is: a full disk or a place that cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from taser_jax.errors import StorageError

_STORAGE_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
    }
)
# ArrayRecord and TensorFlow report a failed write by its text, not by an OSError.
_STORAGE_MESSAGES = (
    "no space left",
    "permission denied",
    "read-only file system",
    "quota exceeded",
    "not a directory",
    "file too large",
)


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns a full disk or an unwritable directory into a `StorageError` that says so.

    Example:
        >>> with storage_errors("out"):  # doctest: +SKIP
        ...     write_everything("out")

    Args:
        path: what is being written; named in the message.

    Raises:
        StorageError: for a full disk, a read-only or forbidden place, an exhausted quota.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if error.errno not in _STORAGE_ERRNOS:
            raise
        raise _storage_error(path, error.strerror or str(error), error.errno) from error
    except Exception as error:
        if not any(message in str(error).lower() for message in _STORAGE_MESSAGES):
            raise
        raise _storage_error(path, str(error), None) from error


def _storage_error(path: str | os.PathLike[str], reason: str, number: int | None) -> StorageError:
    full = number in (errno.ENOSPC, errno.EDQUOT) or "no space" in reason.lower()
    return StorageError(
        f"could not write: {reason}",
        where=os.fspath(path),
        expected="a directory that can be written, with room left on its disk",
        fix="free some space or choose another directory, then run the same command again"
        if full
        else "choose a directory you may write to, or change its permissions",
    )
