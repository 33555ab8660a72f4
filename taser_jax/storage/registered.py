"""What modules offer to others: a system's part, or a function that Gin files may refer to."""

from __future__ import annotations

import collections
import importlib
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Offer = TypeVar("Offer")
Function = TypeVar("Function", bound=Callable[..., Any])

BUILDERS: dict[type, list[Callable[..., Any]]] = collections.defaultdict(list)
"""Type -> functions that make its values and that Gin files may refer to."""


def builds(function: Function) -> Function:
    """Lets Gin files refer to a function wherever they set what it returns.

    Example:
        `DualEncoderConfig.bert = @pretrained_bert()`
    """
    BUILDERS[typing.get_type_hints(function)["return"]].append(function)
    return function


class Registered(Generic[Offer]):
    """A place that a system's module fills, so that no core room imports a system.

    The module is imported when a configuration first asks for the place: a command that does not,
    loads none of it.

    Example:
        >>> DOUBLED: Registered[Callable[[int], int]] = Registered("twice")  # in core
        >>> DOUBLED.register(lambda number: 2 * number)  # in twice.py
        >>> DOUBLED.get()(21)  # in core
        42

    Args:
        module: name of the module that fills it.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._offer: Offer | None = None

    def register(self, offer: Offer) -> None:
        """Fills the place."""
        self._offer = offer

    def get(self) -> Offer:
        """What the module registers."""
        if self._offer is None:
            importlib.import_module(self._module)
        assert self._offer is not None, f"{self._module} registers nothing here"
        return self._offer
