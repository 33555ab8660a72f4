"""Tables of (regular expression, value) that match each parameter path exactly once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import jax
from jaxtyping import PyTree

from taser_jax.storage.errors import ConfigError

Value = TypeVar("Value")
Rules = Sequence[tuple[str, Value]]


def parameter_path(path: jax.tree_util.KeyPath) -> str:
    """A JAX key path as T5X writes it: "encoder/layers_0/attention/query/kernel"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def parameter_paths(params: PyTree) -> list[str]:
    """Paths of all parameters, in tree order."""
    return [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def assign(rules: Rules[Value], params: PyTree, *, table: str) -> PyTree:
    """Gives each parameter the value of the one rule that matches its whole path.

    Example:
        Rules ((".*/bias", 0.0), (".*/kernel", 0.1)) give {"mlp": {"bias": 0.0, "kernel": 0.1}}.

    Args:
        rules: (regular expression, value) pairs, matched against whole paths.
        params: parameters, arrays or abstract.
        table: the table's name, for error messages.

    Returns:
        A tree of values shaped as `params`.

    Raises:
        ConfigError: a parameter that no rule or several rules match, a rule that matches no
            parameter, or a malformed expression; each is named.
    """
    try:
        compiled = [(re.compile(pattern), value) for pattern, value in rules]
    except re.error as error:
        problem = f"{error.pattern!r} is no regular expression of Python's: {error}"
        raise ConfigError(problem, where=table, fix="correct the expression") from error
    used: set[str] = set()

    def value_of(path: jax.tree_util.KeyPath, _: object) -> Value:
        name = parameter_path(path)
        matching = [(regex, value) for regex, value in compiled if regex.fullmatch(name)]
        if len(matching) != 1:
            patterns = ", ".join(repr(regex.pattern) for regex, _ in matching)
            problem = f"parameter {name} matches {len(matching)} rules"
            if not matching:
                raise ConfigError(problem, where=table, fix="add a rule that covers it")
            fix = "narrow all but one of these rules"
            raise ConfigError(f"{problem}: {patterns}", where=table, fix=fix)
        used.add(matching[0][0].pattern)
        return matching[0][1]

    values = jax.tree_util.tree_map_with_path(value_of, params)
    for regex, _ in compiled:
        if regex.pattern not in used:
            paths = ", ".join(parameter_paths(params)[:3])
            problem = f"rule {regex.pattern!r} matches no parameter, such as {paths}"
            raise ConfigError(problem, where=table, fix="correct the expression or remove the rule")
    return values
