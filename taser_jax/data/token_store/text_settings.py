"""Settings for texts before tokenisation; recorded, so that exports apply them too.

This module needs no TensorFlow: training machines read and write these settings.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

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
    """Whether a passage's title precedes its text.

    INCLUDE: as a text of its own, `[CLS] title [SEP] text [SEP]`, as in DPR.
    JOIN: in one text with it, `[CLS] title text [SEP]`, as sentence-transformers does.
    OMIT: not at all.
    """

    INCLUDE = "include"
    JOIN = "join"
    OMIT = "omit"

    def applied(
        self, titles: Sequence[str], texts: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Titles and texts as they become tokens.

        Example:
            >>> Titles.JOIN.applied(["Paris"], ["lies on the Seine."])
            ([''], ['Paris lies on the Seine.'])
        """
        if self is Titles.INCLUDE:
            return titles, texts
        if self is Titles.JOIN:
            texts = [
                f"{title} {text}" if title else text
                for title, text in zip(titles, texts, strict=True)
            ]
        return [""] * len(texts), texts


@dataclasses.dataclass(frozen=True)
class QuerySettings:
    """How a task's queries become tokens, besides vocabulary and length.

    Attributes:
        normalization: normalisation of the text.
        prompt: token ids between [CLS] and the text.
    """

    normalization: QueryNormalization = QueryNormalization.NONE
    prompt: tuple[int, ...] = ()
