"""Checks that the time between SIGTERM and the end of a job is enough for a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator

from taser_jax.storage.errors import ConfigError

VARIABLE = "TASER_GRACE_SECONDS"
logger = logging.getLogger("taser")


class GraceWatch:
    """Measures the first save of a run, and warns where SIGTERM would leave too little time.

    After SIGTERM, training completes the step or validation in progress and then saves:

        needed = max(step, longest validation) + save

    Args:
        seconds: the time granted; None if unknown, and then nothing is measured.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._validation = 0.0

    @classmethod
    def from_environment(cls) -> GraceWatch:
        """A watch for the time that the launcher grants in the variable TASER_GRACE_SECONDS.

        Raises:
            ConfigError: it is not a number of seconds.
        """
        text = os.environ.get(VARIABLE)
        if text is None:
            return cls(None)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ConfigError(
                repr(text),
                where=f"environment variable {VARIABLE}",
                expected="seconds between SIGTERM and the end of the job, more than 0",
                fix="correct it, or unset it where the time is unknown",
            )
        return cls(seconds)

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Measures a validation, which runs to its end before training stops."""
        began = time.monotonic()
        yield
        self._validation = max(self._validation, time.monotonic() - began)

    @contextlib.contextmanager
    def saving(self, wait: Callable[[], None], *, step: float) -> Iterator[None]:
        """Measures the save that is started inside the `with`, if it is the run's first.

        Args:
            wait: waits for the end of the save.
            step: seconds per step.
        """
        granted, self._seconds = self._seconds, None
        began = time.monotonic()
        yield
        if granted is None:
            return
        wait()
        save = time.monotonic() - began
        needed = max(step, self._validation) + save
        if needed > granted:
            logger.warning(
                "after SIGTERM, training needs %.0f s (step %.1f s, validation %.1f s, save %.1f s)"
                " and has %.0f s: what was done since the last checkpoint would be lost. Grant "
                "more (--grace_seconds of launch/gke_xpk.sh), or save more often "
                "(CHECKPOINT_PERIOD)",
                *(math.ceil(needed), step, self._validation, save, granted),
            )
