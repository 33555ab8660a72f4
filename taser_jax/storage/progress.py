"""Progress bars with the remaining time, and log lines at the start and end of each phase."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import tqdm.auto

T = TypeVar("T")
logger = logging.getLogger("taser")
# Seconds between the lines that replace a bar where there is no terminal.
_LINE_PERIOD = 30.0
_shows = threading.Event()
_shows.set()


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
        # A bar within another disappears when it is done.
        return {**looks, "mininterval": 0.5, "dynamic_ncols": True, "leave": None}
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
