"""What is done to texts before they are tokenised; recorded, so that exports do the same.

Without TensorFlow: training machines read and write these settings.
"""

from __future__ import annotations

import dataclasses
import enum


class QueryNormalization(enum.Enum):
    """What is done to a query before it is tokenised.

    CURLY_APOSTROPHE: ’ becomes ', as in DPR's `normalize_question`.
    """

    NONE = "none"
    CURLY_APOSTROPHE = "curly_apostrophe"


class Titles(enum.Enum):
    """Whether a passage's title is put before its text."""

    INCLUDE = "include"
    OMIT = "omit"


@dataclasses.dataclass(frozen=True)
class QuerySettings:
    """How a task's queries become tokens, besides vocabulary and length.

    Attributes:
        normalization: what is done to the text.
        prompt: token ids between [CLS] and the text.
    """

    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: tuple[int, ...] = ()
