"""SIGTERM and Ctrl-C: training saves, then stops, on all hosts at the same step."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from taser_jax.storage.errors import Preempted

logger = logging.getLogger("taser")


class Stop:
    """A signal that asks training to save and stop.

    Attributes:
        error: raised once everything is saved.
    """

    def __init__(self) -> None:
        self.error: type[BaseException] = Preempted
        self._asked = threading.Event()

    def is_asked(self) -> bool:
        """Whether a signal has arrived."""
        return self._asked.is_set()

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: training saves and stops; rerunning the command resumes it."""
        self._asked.set()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """SIGINT, Ctrl-C: the first stops after the step and a save, the second at once."""
        if self.is_asked():
            raise KeyboardInterrupt
        self.error = KeyboardInterrupt
        self._asked.set()
        logger.info("training: saving after this step; press Ctrl-C again to stop without it")


def agree_to_stop(stop: Stop, step: int) -> bool:
    """True on every host once any of them received SIGTERM."""
    if jax.process_count() == 1:
        return stop.is_asked()
    return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def catch_signals() -> Iterator[Stop]:
    """Catches SIGTERM and SIGINT while the loop runs; only the main thread receives signals.

    On several hosts JAX itself catches SIGTERM, and SIGINT stops at once.
    """
    stop = Stop()
    one_host = jax.process_count() == 1
    if not one_host or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    former = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, stop.terminate),
        signal.SIGINT: signal.signal(signal.SIGINT, stop.interrupt),
    }
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
