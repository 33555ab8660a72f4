"""Progress bars with the remaining time, and log lines at the start and end of each phase."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import tqdm.auto

T = TypeVar("T")
logger = logging.getLogger("taser")
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
    return tqdm.auto.tqdm(
        items,
        desc=description,
        total=total,
        unit=unit,
        mininterval=0.5,
        disable=not _shows.is_set(),
    )


def bar(description: str, *, total: int, initial: int = 0, unit: str = "it") -> tqdm.auto.tqdm:
    """A progress bar to update by hand; use as a context manager."""
    return tqdm.auto.tqdm(
        desc=description,
        total=total,
        initial=initial,
        unit=unit,
        mininterval=0.5,
        disable=not _shows.is_set(),
    )
