"""Stages without their work, and a check that each argument of a stage belongs to its record."""

import copy
import dataclasses
import enum
import functools
import inspect
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from small_world import never

from taser_jax.commands.pipelines.stages import NO_INPUTS, Stages
from taser_jax.storage.errors import ConfigError

Calls = dict[str, tuple[str, Callable[..., Any], dict[str, Any]]]
"""Name of a function -> the first stage that ran it, the function and its arguments."""

# What the functions of stages return, where a pipeline reads it.
OUTPUTS: Mapping[str, Any] = {
    "train": {"parameters": 1, "validation": {}, "steps_per_second": 1.0, "seconds": 1.0},
    "hybrid": {"code": 1.0},
    "import_model": 1,
}


def without_work(
    monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, Any] = types.MappingProxyType({})
) -> Calls:
    """Stages are recorded from here on, and their functions do nothing.

    Args:
        monkeypatch: undoes it.
        outputs: name of a function -> what it returns then, beside `OUTPUTS`.

    Returns:
        The calls, which grow as stages run.
    """
    calls: Calls = {}
    run = Stages.run

    def record(stages: Stages, name: str, function: Callable[..., Any], /, **given: Any) -> Any:
        @functools.wraps(function)
        def do_nothing(**_: Any) -> Any:
            return {**OUTPUTS, **outputs}.get(function.__name__)

        calls.setdefault(function.__name__, (name, never(function), given))
        return run(stages, name, do_nothing, **given)

    monkeypatch.setattr(Stages, "run", record)
    return calls


def check_every_argument(directory: pathlib.Path, calls: Calls) -> None:
    """Changes each argument, with its fields; the finished stage is refused by that name."""
    for name, function, given in calls.values():
        signature = inspect.signature(function)
        bound = signature.bind(**given)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        for argument, value in arguments.items():
            for setting, other in _changes(argument, value):
                changed = arguments | {argument: other}
                if setting.rpartition(".")[2] in NO_INPUTS or argument in NO_INPUTS:
                    Stages(directory).run(name, function, **changed)
                    continue
                with pytest.raises(ConfigError) as error:
                    Stages(directory).run(name, function, **changed)
                assert setting in str(error.value), (name, setting)


def _changes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A setting's path, and the value with that setting changed; one for each leaf."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for setting, other in _changes(f"{name}.{field.name}", getattr(value, field.name)):
                changed = copy.copy(value)
                # Whether the settings fit together is not asked here.
                object.__setattr__(changed, field.name, other)
                yield setting, changed
    elif isinstance(value, dict):
        for key, part in value.items():
            for setting, other in _changes(f"{name}.{key}", part):
                yield setting, value | {key: other}
    elif isinstance(value, list | tuple):
        yield name, [*value, "another"]
    elif isinstance(value, int | float):
        yield name, value + 1
    else:
        yield name, f"{value.value if isinstance(value, enum.Enum) else value}-another"
