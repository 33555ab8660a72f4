"""The interface between training and its source of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from taser_jax.data.batches.padding import OtherTexts
from taser_jax.models.batch import Batch


@runtime_checkable
class Stream(Protocol):
    """The batches of every step, for one task or for each: a pure function of seed and step."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what decides a step's rows and tokens; the number of hosts does not."""

    @property
    def batches_per_epoch(self) -> dict[str, int]:
        """Task -> batches in one pass over it."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every query has been seen."""

    def batches(self, step: int) -> dict[str, Batch]:
        """This host's share of the step's batches, by task."""

    def on_texts(self, states: OtherTexts) -> Stream:
        """The same batches, with states of frozen blocks in place of tokens."""

    def query_rows(self, step: int) -> Mapping[str, np.ndarray]:
        """Rows of the queries in the step's global batches, by task."""
