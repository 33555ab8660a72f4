"""The data that SeqIO tasks use: set around their use, so that registration needs no data."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from taser_jax.data.text.vocabularies import Vocabulary
from taser_jax.storage.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class DataContext:
    """The data folder and vocabulary that tasks use."""

    data_dir: str
    vocabulary: Vocabulary


_CONTEXT: contextvars.ContextVar[DataContext | None] = contextvars.ContextVar("data", default=None)


@contextlib.contextmanager
def use_data(*, data_dir: str, vocabulary: Vocabulary) -> Iterator[DataContext]:
    """Sets the collections' folder and the vocabulary that tasks use inside the `with`."""
    context = DataContext(str(data_dir), vocabulary)
    token = _CONTEXT.set(context)
    try:
        yield context
    finally:
        _CONTEXT.reset(token)


def data_in_use() -> DataContext | None:
    """The values of the innermost enclosing `use_data`; None outside of any."""
    return _CONTEXT.get()


def require_data() -> DataContext:
    """The values of the innermost enclosing `use_data`.

    Raises:
        ConfigError: there is no enclosing `use_data`.
    """
    context = data_in_use()
    if context is None:
        raise ConfigError(
            "no data and vocabulary are set",
            expected="tasks to be used inside `with use_data(data_dir=..., vocabulary=...)`",
        )
    return context
