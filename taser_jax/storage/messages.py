"""Log lines and errors on stderr, readable beside progress bars and in a log file."""

from __future__ import annotations

import errno
import io
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import textwrap
import types

import tqdm.auto

# PCI vendor of TPUs, and devices of other accelerators that JAX looks for.
_GOOGLE = "0x1ae0"
_GPU_DEVICES = ("/proc/driver/nvidia", "/dev/kfd")


def set_up(*, verbose: bool) -> None:
    """Sends log lines to stderr, and keeps other libraries quiet unless `verbose`.

    Call it before JAX and TensorFlow are imported.

    Args:
        verbose: show what TensorFlow, XLA, libtpu and Orbax write as well.
    """
    handler = _Handler()
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(format="%(message)s", level=level, handlers=[handler], force=True)
    logging.getLogger("taser").setLevel(logging.DEBUG if verbose else logging.INFO)
    if verbose:
        return
    # Some libraries set their own loggers to DEBUG.
    handler.addFilter(
        lambda record: record.name.startswith("taser") or record.levelno >= logging.WARNING
    )
    # Orbax warns of every checkpoint without metrics, which is intended, and logs a failed save in
    # each of its threads; that error is raised, too.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.excepthook = _print_unless_of_a_closed_loop
    # At lower levels, TensorFlow reports oneDNN's fallbacks and a missing GPU as errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # libtpu, where installed, complains of missing TPUs; JAX would load it to find none.
    if not _has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def outlive_terminal() -> None:
    """Lets this process go on when its terminal is closed, or the pipe that it writes into.

    What it writes from then on is lost. Ctrl-C and SIGTERM still end it.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stdout = _lasting(sys.stdout)
        sys.stderr = _lasting(sys.stderr)


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same file, encoding and buffering as `stream`, written by a `_LastingFile`."""
    # No BufferedWriter between, which a signal's handler must not enter a second time.
    return io.TextIOWrapper(
        _LastingFile(stream.fileno(), "wb", closefd=False),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LastingFile(io.FileIO):
    """A file that becomes /dev/null, for libraries in C++ too, once nobody can read it."""

    def write(self, data: bytes) -> int:  # type: ignore[override]  # what TextIOWrapper gives
        written = 0
        try:
            while written < len(data):
                written += super().write(data[written:])
        except OSError as error:
            # A closed pipe, a closed terminal.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        return len(data)


def _print_unless_of_a_closed_loop(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """TensorStore tells an event loop of a failed write that Orbax has closed after the first."""
    if str(error) != "Event loop is closed":
        sys.__excepthook__(kind, error, trace)


def _has_accelerator() -> bool:
    """Whether there may be a TPU or a GPU; True in doubt, so that JAX looks for it."""
    vendors = pathlib.Path("/sys/bus/pci/devices").glob("*/vendor")
    return (
        "JAX_FORCE_TPU_INIT" in os.environ
        or any(map(os.path.exists, _GPU_DEVICES))
        or any(path.read_text().strip() == _GOOGLE for path in vendors)
    )


def say(text: str) -> None:
    """Writes lines to stderr, above a progress bar; a terminal's are wrapped at its width.

    Args:
        text: lines; the continuation of a wrapped line is indented by two columns.
    """
    if sys.stderr.isatty():
        text = wrapped(text, width=shutil.get_terminal_size().columns)
    tqdm.auto.tqdm.write(text, file=sys.stderr)


def wrapped(text: str, *, width: int) -> str:
    """Wraps lines at `width` columns; longer words are kept whole.

    Example:
        >>> print(wrapped("  fix: choose another directory", width=20))
          fix: choose
            another
            directory
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def plain(value: object) -> str:
    r"""A value as one line of Markdown in which no tag, link, code or column begins.

    Example:
        >>> plain("a|b\n[c](d) <e> [1, 2] < 3")
        'a\\|b [c\\](d) &lt;e> [1, 2] < 3'
    """
    text = re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", " ".join(str(value).split()))
    return re.sub(r"([|`]|\](?=[(\[:]))", r"\\\1", text)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)
