"""A system's module fills the place that a core command reads."""

from __future__ import annotations

import sys
from collections.abc import Callable

from taser_jax.storage.registered import Registered


def test_the_module_that_fills_a_place_is_imported_when_it_is_asked_for(tmp_path, monkeypatch):
    place: Registered[Callable[[int], int]] = Registered("twice_for_a_test")
    sys_path = tmp_path / "twice_for_a_test.py"
    sys_path.write_text("import sys\nsys.place.register(lambda number: 2 * number)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "place", place, raising=False)
    assert "twice_for_a_test" not in sys.modules
    assert place.get()(21) == 42
