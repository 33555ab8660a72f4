"""Log lines and errors on stderr, readable beside progress bars and in a log file."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import sys
import textwrap

import tqdm.auto

from taser_jax.storage import quiet_import

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
    logging.getLogger("taser").setLevel(logging.INFO)
    if verbose:
        return
    # Some libraries set their own loggers to DEBUG.
    handler.addFilter(
        lambda record: record.name.startswith("taser") or record.levelno >= logging.WARNING
    )
    # Orbax warns about every checkpoint without metrics, which is intended.
    logging.getLogger("absl").setLevel(logging.ERROR)
    # At lower levels, TensorFlow reports oneDNN's fallbacks and a missing GPU as errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" not in sys.modules:
        quiet_import.quiet_import("tensorflow")
    # libtpu, where installed, complains of missing TPUs; JAX would load it to find none.
    if not _has_accelerator():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


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


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)
