"""A system fills the place that a core command reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taser_jax.storage.errors import ConfigError
from taser_jax.storage.registered import Registered


def test_what_a_system_registers_is_what_a_command_gets():
    place: Registered[Callable[[int], int]] = Registered("DOCUMENTS_DIR")
    with pytest.raises(
        ConfigError, match="DOCUMENTS_DIR: it is given, and no system that reads it is loaded"
    ):
        place.get()
    place.register(lambda number: 2 * number)
    assert place.get()(21) == 42
