"""Settings for texts before tokenisation; recorded, so that exports apply them too.

This module needs no TensorFlow: training machines read and write these settings.
"""

from __future__ import annotations

import dataclasses
import enum

# The ids of a token store depend on this version as well as on its settings; it is raised when
# formatting changes. 2: passages get the ids of Hugging Face's tokenizers also where a title is
# blank or longer than half the passage.
PREPROCESSING_VERSION = 2


class QueryNormalization(enum.Enum):
    """Normalisation of a query before tokenisation.

    CURLY_APOSTROPHE: ’ becomes ', as in DPR's `normalize_question`.
    """

    NONE = "none"
    CURLY_APOSTROPHE = "curly_apostrophe"


class Titles(enum.Enum):
    """Whether a passage's title precedes its text."""

    INCLUDE = "include"
    OMIT = "omit"


@dataclasses.dataclass(frozen=True)
class QuerySettings:
    """How a task's queries become tokens, besides vocabulary and length.

    Attributes:
        normalization: normalisation of the text.
        prompt: token ids between [CLS] and the text.
    """

    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: tuple[int, ...] = ()
