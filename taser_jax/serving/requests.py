"""Bodies of requests: what they may hold, checked before anything is computed."""

from __future__ import annotations

import base64
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np

MAX_TEXTS, MAX_K, MAX_CHARACTERS = 64, 1000, 20_000

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARACTERS)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]


class BadRequestError(Exception):
    """A body that cannot be answered; the message names the field."""


class SearchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /search`.

    Attributes:
        query: one query, or several.
        k: passages per query.
        task: task whose prompt is used, where tasks differ.
        hybrid: whether BM25's scores are added; None does so where the server has them.
    """

    query: Text | Texts
    k: Annotated[int, msgspec.Meta(ge=1, le=MAX_K)] = 10
    task: str | None = None
    hybrid: bool | None = None

    @property
    def texts(self) -> list[str]:
        """One or several, as a list."""
        return [self.query] if isinstance(self.query, str) else self.query


class EmbeddingsRequest(msgspec.Struct):
    """`POST /v1/embeddings`, as OpenAI's clients send it; other fields are ignored.

    Attributes:
        input: one text, or several.
        model: any name; one that ends in "-passage" embeds passages, every other one queries.
        encoding_format: numbers, or their float32 bytes in base64.
        dimensions: must be the model's where given.
    """

    input: Text | Texts
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def texts(self) -> list[str]:
        """One or several, as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


Body = TypeVar("Body", SearchRequest, EmbeddingsRequest)


def parse(body: bytes, kind: type[Body]) -> Body:
    """A body as what it should be.

    Raises:
        BadRequestError: it is not; names the field.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(str(error)) from None
    if not all(map(str.strip, request.texts)):
        raise BadRequestError("a text is empty")
    return request


def encoded(embedding: np.ndarray, encoding_format: str) -> str | list[float]:
    """An embedding as the request wants it."""
    numbers = embedding.astype("<f4")
    if encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    return numbers.tolist()
