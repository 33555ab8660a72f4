"""Stages without their work."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from taser_jax.commands.pipelines.stages import Stages

# What the functions of stages return, where a pipeline reads it.
OUTPUTS: Mapping[str, Any] = {
    "train": {"parameters": 1, "validation": {}, "steps_per_second": 1.0, "seconds": 1.0},
    "hybrid": {"code": 1.0},
    "import_model": 1,
}


def without_work(
    monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, Any] = types.MappingProxyType({})
) -> None:
    """Stages are recorded from here on, and their functions do nothing.

    Args:
        monkeypatch: undoes it.
        outputs: name of a function -> what it returns then, beside `OUTPUTS`.
    """
    run = Stages.run

    def record(stages: Stages, name: str, function: Callable[..., Any], /, **given: Any) -> Any:
        @functools.wraps(function)
        def do_nothing(**_: Any) -> Any:
            return {**OUTPUTS, **outputs}.get(function.__name__)

        return run(stages, name, do_nothing, **given)

    monkeypatch.setattr(Stages, "run", record)
