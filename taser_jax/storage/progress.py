"""What commands say on stderr: log lines, errors, and progress bars with the remaining time."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tqdm.auto

T = TypeVar("T")
logger = logging.getLogger("taser")
# Seconds between the lines that replace a bar where there is no terminal, and before one is drawn.
_LINE_PERIOD, _DELAY = 30.0, 0.5
_shows = threading.Event()
_shows.set()
# PCI vendor of TPUs, and devices of other accelerators that JAX looks for: NVIDIA's, also in
# containers and in WSL 2, and AMD's.
_GOOGLE = "0x1ae0"
_GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")


def silence() -> None:
    """Turns progress bars off, as on all hosts but host 0."""
    _shows.clear()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs the start of a phase and its duration."""
    logger.info("%s: started", name)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        logger.info("%s: stopped after %.1f s", name, time.monotonic() - start)
        raise
    logger.info("%s: done in %.1f s", name, time.monotonic() - start)


def track(
    items: Iterable[T], description: str, *, total: int | None = None, unit: str = "it"
) -> Iterable[T]:
    """Iterates with a progress bar that shows rate and remaining time."""
    return tqdm.auto.tqdm(items, total=total, unit=unit, **_looks(description, total))


def bar(description: str, *, total: int, initial: int = 0, unit: str = "it") -> tqdm.auto.tqdm:
    """A progress bar to update by hand; use as a context manager."""
    return tqdm.auto.tqdm(total=total, initial=initial, unit=unit, **_looks(description, total))


def _looks(description: str, total: int | None) -> dict[str, Any]:
    """Options of tqdm: a bar in a terminal; in a log file, a line every 30 seconds."""
    looks: dict[str, Any] = {"desc": description, "disable": not _shows.is_set()}
    if sys.stderr.isatty():
        # What is done at once has no bar, and a bar within another disappears when it is done.
        return {**looks, "mininterval": 0.5, "delay": _DELAY, "dynamic_ncols": True, "leave": None}
    count = "{n_fmt}" if total is None else "{n_fmt} of {total_fmt}, {remaining} left"
    return {
        **looks,
        "file": _Lines(),
        "mininterval": _LINE_PERIOD,
        "delay": _LINE_PERIOD,
        "bar_format": f"{{desc}}: {count}, {{rate_fmt}}{{postfix}}",
    }


class _Lines(io.StringIO):
    """Turns the states of a bar into lines of stderr."""

    def write(self, text: str) -> int:
        if line := text.strip("\r\n "):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        return len(text)


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
    # each of its threads and tasks; that error is raised, too.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    handler.addFilter(
        lambda record: record.name != "asyncio" or "/orbax/" not in record.getMessage()
    )
    sys.unraisablehook = _print_unless_of_a_closed_loop
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


def _print_unless_of_a_closed_loop(unraisable: sys.UnraisableHookArgs) -> None:
    """TensorStore tells an event loop of a failed write that Orbax has closed after the first."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _has_accelerator() -> bool:
    """Whether there may be a TPU or a GPU; True in doubt, so that JAX looks for it."""
    vendors = pathlib.Path("/sys/bus/pci/devices").glob("*/vendor")
    return (
        "JAX_FORCE_TPU_INIT" in os.environ
        or any(map(os.path.exists, _GPU_DEVICES))
        or any(path.read_text().strip() == _GOOGLE for path in vendors)
    )


def say(text: str) -> None:
    """Writes lines to stderr, above a progress bar."""
    tqdm.auto.tqdm.write(text, file=sys.stderr)


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of a table.

    Args:
        rows: its cells.
        left: number of first columns whose cells begin in line; those of the others end in line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:<{width}}}" for width in widths[:left]]
    forms += [f"{{:>{width}}}" for width in widths[left:]]
    return ["  ".join(forms).format(*row) for row in rows]


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
