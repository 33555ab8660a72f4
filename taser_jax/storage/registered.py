"""What core commands need of a system, registered by the system's modules."""

from __future__ import annotations

from typing import Generic, TypeVar

from taser_jax.storage.errors import ConfigError

Offer = TypeVar("Offer")


class Registered(Generic[Offer]):
    """A place that a system fills when its module is imported, so that no core room imports it.

    Example:
        >>> DOUBLED: Registered[Callable[[int], int]] = Registered("twice.number")  # core
        >>> DOUBLED.register(lambda number: 2 * number)  # taser_jax/systems
        >>> DOUBLED.get()(21)  # core
        42

    Args:
        parameter: the parameter or macro that asks for what is registered.
    """

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._offer: Offer | None = None

    def register(self, offer: Offer) -> None:
        """Fills the place."""
        self._offer = offer

    def get(self) -> Offer:
        """What was registered.

        Raises:
            ConfigError: nothing was.
        """
        if self._offer is None:
            raise ConfigError(
                "it is given, and no system that reads it is loaded",
                where=self._parameter,
                fix="run `taser`, which loads it, or import its modules of taser_jax.systems first",
            )
        return self._offer
