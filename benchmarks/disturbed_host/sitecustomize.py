"""A slow disk or a wrong clock for one process: Python reads this at its start.

    PYTHONPATH=benchmarks/disturbed_host DISTURBED_DELAY=0.05 DISTURBED_CLOCK=-3600 taser ...

DISTURBED_DELAY: seconds that each file or folder takes that Python opens for writing, renames,
makes or removes. DISTURBED_CLOCK: seconds that Python's clock is ahead; files that Python renames
into place get times of that clock. What libraries in C++ write and which time they see is as ever.
"""

import builtins
import functools
import io
import os
import time
from collections.abc import Callable
from typing import Any

_CHANGES_FILES = ("mkdir", "rename", "replace", "remove", "unlink", "rmdir", "fsync", "utime")


def slow_down(seconds: float) -> None:
    """Makes every change of files take so many seconds more."""
    for name in _CHANGES_FILES:
        setattr(os, name, _after(seconds, getattr(os, name)))

    real_open = builtins.open

    def slow_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            time.sleep(seconds)
        return real_open(file, mode, *args, **kwargs)

    # pathlib calls io.open, everybody else the builtin.
    io.open = slow_open  # type: ignore[assignment] # on purpose
    builtins.open = slow_open  # type: ignore[assignment] # on purpose


def _after(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def later(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return later


def shift_clock(seconds: float) -> None:
    """Puts the clock of Python, and the times of files that it renames, so far ahead."""
    real_time, real_time_ns = time.time, time.time_ns
    time.time = lambda: real_time() + seconds
    time.time_ns = lambda: real_time_ns() + int(seconds * 1e9)
    for name in ("localtime", "gmtime"):
        setattr(time, name, _now_by_default(getattr(time, name)))
    real_strftime = time.strftime
    time.strftime = lambda form, at=None: real_strftime(form, at or time.localtime())
    for name in ("rename", "replace"):
        setattr(os, name, _dated(getattr(os, name)))


def _now_by_default(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda at=None: call(time.time() if at is None else at)


def _dated(rename: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rename)
    def dated(source: Any, target: Any, **kwargs: Any) -> None:
        rename(source, target, **kwargs)
        os.utime(target, (time.time(), time.time()))

    return dated


if "DISTURBED_CLOCK" in os.environ:
    shift_clock(float(os.environ["DISTURBED_CLOCK"]))
if "DISTURBED_DELAY" in os.environ:
    slow_down(float(os.environ["DISTURBED_DELAY"]))
