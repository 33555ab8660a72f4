"""Gin at the edge: flags and files in, one checked configuration out.

Every command is one function, and everything it can be configured with is reached from that
function's own bindings. So what a command will use is known before it runs, and a misspelled
macro, an unknown name or a binding that nothing uses is an error, not a silent default.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import difflib
import enum
import functools
import importlib.resources
import inspect
import os
import pathlib
import re
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin

from taser_jax.errors import ConfigError

_MACRO = "gin.macro"
_GIN_ERRORS = (ValueError, SyntaxError, AttributeError, TypeError, tokenize.TokenError)


@dataclasses.dataclass(frozen=True)
class GinFlags:
    """What the command line says about configuration.

    Attributes:
        files: Gin files, later ones win.
        bindings: (name, value as written) pairs; they win over files.
        search_paths: folders searched for Gin files beside the packaged ones.
    """

    files: tuple[str, ...] = ()
    bindings: tuple[tuple[str, str], ...] = ()
    search_paths: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A configuration that was read and checked.

    Attributes:
        function: the configured command; call it without arguments.
        text: the whole configuration as Gin text (what `config.gin` holds).
        unused: bindings of files that this command does not reach.
        unset: macros still `%gin.REQUIRED`; empty unless they were allowed.
    """

    function: Callable[..., Any]
    text: str
    unused: tuple[str, ...]
    unset: tuple[str, ...]


def gin_directory() -> pathlib.Path:
    """The folder of the Gin files: the installed package's, or the checkout's."""
    packaged = pathlib.Path(str(importlib.resources.files("taser_jax"))) / "gin_configs"
    checkout = pathlib.Path(__file__).resolve().parents[1] / "gin_configs"
    return packaged if packaged.is_dir() else checkout


def configurable(target: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a dataclass or function so that Gin may give enums by value and tuples as lists.

    Example:
        `ExpertConfig.routing = 'sequence'` arrives as `Routing.SEQUENCE`; a value that is none of
        the enum's raises a `ConfigError` that lists them.
    """
    construct = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(construct)

    @functools.wraps(target, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        converted = {
            name: _convert(value, hints.get(name), where=f"{target.__name__}.{name}")
            for name, value in kwargs.items()
        }
        return target(*args, **converted)

    # Gin reads parameter names from the signature and would follow __wrapped__ to a class.
    del build.__wrapped__
    build.__signature__ = inspect.signature(target)  # type: ignore[attr-defined]  # of functions
    return build


def _convert(value: Any, hint: Any, *, where: str) -> Any:
    """Value as the hint wants it: enum members from their values, tuples from lists."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    enums = [
        option for option in options if inspect.isclass(option) and issubclass(option, enum.Enum)
    ]
    if isinstance(value, str) and enums and str not in options:
        for kind in enums:
            if value in [member.value for member in kind]:
                return kind(value)
        choices = [member.value for kind in enums for member in kind]
        raise ConfigError(
            f"{value!r} is no such choice",
            where=where,
            expected=f"one of {', '.join(map(repr, choices))}",
            fix=_did_you_mean(value, choices) or "take one of those",
        )
    if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options):
        return tuple(value)
    return value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def resolve(
    function: Callable[..., Any],
    *,
    configurables: Iterable[Callable[..., Any]],
    flags: GinFlags,
    allow_unset: bool = False,
) -> Resolved:
    """Reads files and bindings for a command and checks every name in them.

    Args:
        function: the command's function; bindings name it as `<function name>.<parameter>`.
        configurables: dataclasses and functions that its bindings may refer to.
        flags: files and bindings of the command line.
        allow_unset: list macros that are still required instead of raising (for dry runs); what
            they would have set is then None.

    Raises:
        ConfigError: with the nearest real name where something is misspelled.
    """
    gin.clear_config(clear_constants=False)
    _register([function, *configurables])
    for path in (*flags.search_paths, str(gin_directory())):
        gin.add_config_file_search_path(path)
    with _files_only():
        for path in flags.files:
            _parse_file(path)
        for name, value in flags.bindings:
            _parse_binding(name, value)
    bindings = _all_bindings()
    used = _reachable(function.__name__, bindings)
    _check_macros(bindings)
    _check_command_line(flags.bindings, bindings, used, function.__name__)
    unset = _required(bindings, used)
    if unset and not allow_unset:
        raise ConfigError(
            f"{', '.join(unset)} not set",
            where=", ".join(flags.files) or "the command line",
            expected="a value",
            fix=" ".join(f"--gin.{name}=..." for name in unset),
        )
    for name in unset:
        gin.bind_parameter(f"{name}/gin.macro.value" if name.isupper() else name, None)
    unused = sorted(
        _binding_name(key, parameter)
        for key, parameters in bindings.items()
        for parameter in parameters
        if key not in used
    )
    return Resolved(
        function=gin.get_configurable(_selector(function)),
        text=gin.config_str(),
        unused=tuple(unused),
        unset=tuple(unset),
    )


def _selector(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__name__}"


def _register(targets: Iterable[Callable[..., Any]]) -> None:
    for target in targets:
        try:
            gin.get_configurable(_selector(target))
        except ValueError:
            gin.external_configurable(
                configurable(target), name=target.__name__, module=target.__module__
            )


@contextlib.contextmanager
def _files_only() -> Iterator[None]:
    """Has Gin look for files in folders alone.

    It would also take `models/x.gin` for a file of a Python package `models`: it logs an error
    where there is none, and fails where the working directory has a folder of that name.
    """
    # Gin has no public way to take a reader away.
    former = gin.config._FILE_READERS[:]
    gin.config._FILE_READERS[:] = [(open, os.path.isfile)]
    try:
        yield
    finally:
        gin.config._FILE_READERS[:] = former


def _parse_file(path: str) -> None:
    try:
        gin.parse_config_file(path)
    except OSError as error:
        names = sorted(
            str(found.relative_to(gin_directory())) for found in gin_directory().rglob("*.gin")
        )
        raise ConfigError(
            "no such Gin file",
            where=path,
            expected=f"a path, or one of {', '.join(names)}",
            fix=_did_you_mean(path.removeprefix("gin_configs/"), names) or "check the path",
        ) from error
    except _GIN_ERRORS as error:
        raise _readable(error, where=path) from error


def _parse_binding(name: str, value: str) -> None:
    try:
        gin.parse_config(f"{name} = {literal(value)}")
    except _GIN_ERRORS as error:
        raise _readable(error, where=f"--gin.{name}={value}") from error


def literal(value: str) -> str:
    """A value as Gin text: literals, @references and %macros as they are, all else a string.

    Example:
        >>> literal("1e-5"), literal("models/first"), literal("[1, 2]")
        ('1e-5', "'models/first'", '[1, 2]')
    """
    if value.startswith(("@", "%")):
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value if _holds_references(value) else repr(value)
    kinds = (str, int, float, list, tuple, dict, types.NoneType)
    return value if isinstance(found, kinds) else repr(value)


def _holds_references(value: str) -> bool:
    """Whether it is a list, tuple or dictionary with @references or %macros in it."""
    if not value.startswith(("[", "(", "{")):
        return False
    try:
        gin.config.parse_value(value)
    except _GIN_ERRORS:
        return False
    return True


def _readable(error: Exception, *, where: str) -> ConfigError:
    """Gin's message with the nearest real name."""
    message = " ".join(str(error).split())
    known = _known_parameters()
    unknown = re.search(r"No configurable matching (?:reference )?'@?([^'()]+)", message)
    parameter = re.search(r"[Cc]onfigurable '([\w.]+)'.*?parameter named '(\w+)'", message)
    if parameter:
        owner, name = parameter.group(1).split(".")[-1], parameter.group(2)
        return ConfigError(
            f"{owner} has no parameter {name!r}",
            where=where,
            expected=f"one of {', '.join(known.get(owner, ()))}",
            fix=_did_you_mean(name, known.get(owner, ())) or "take one of those",
        )
    if unknown:
        name = unknown.group(1)
        return ConfigError(
            f"unknown name {name!r}",
            where=where,
            expected=f"one of {', '.join(sorted(known))}, or a macro in capitals",
            fix=_did_you_mean(name.split(".")[-1], known) or "check the spelling",
        )
    return ConfigError(message, where=where, fix="correct the Gin syntax or the name")


def _known_parameters() -> dict[str, list[str]]:
    """Configurable name -> its parameters, for those registered by this module."""
    known = {}
    for selector, entry in gin.config._REGISTRY.items():
        if selector.startswith("gin."):
            continue
        known[selector.split(".")[-1]] = list(inspect.signature(entry.wrapped).parameters)
    return known


def _did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    nearest = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else None


_Key = tuple[str, str]
_Bindings = Mapping[_Key, Mapping[str, Any]]


def _all_bindings() -> _Bindings:
    # Gin has no public way to list bindings with their references.
    return {key: dict(values) for key, values in gin.config._CONFIG.items()}


def _references(value: Any) -> Iterator[_Key]:
    """(scope, selector) of every reference inside a binding's value."""
    for reference in gin.config.iterate_references({"value": value}):
        yield reference.config_key


def _reachable(root: str, bindings: _Bindings) -> set[_Key]:
    """Keys of the bindings that calling the root may read, following references and macros.

    As Gin evaluates them: a call under scope a/b reads the bindings of a/b, a and no scope; a
    reference without a scope is called under its caller's, one with a scope (a macro's is its
    name) under its own.
    """
    used: set[_Key] = set()
    calls = collections.deque(("", key[1]) for key in bindings if key[1].split(".")[-1] == root)
    seen: set[_Key] = set()
    while calls:
        call = calls.popleft()
        if call in seen:
            continue
        seen.add(call)
        active, selector = call
        for key in bindings:
            if key[1] != selector or not (active + "/").startswith(key[0] + "/" if key[0] else ""):
                continue
            used.add(key)
            for value in bindings[key].values():
                for scope, target in _references(value):
                    calls.append((scope or active, target))
    return used


def _check_macros(bindings: _Bindings) -> None:
    bound = [scope for scope, selector in bindings if selector == _MACRO]
    referenced = {
        scope
        for values in bindings.values()
        for scope, selector in _references(values)
        if selector == _MACRO
    }
    for name in sorted(referenced - set(bound)):
        raise ConfigError(
            f"%{name} is referred to but never given a value",
            fix=_did_you_mean(name, bound) or f"set --gin.{name}=...",
        )
    for name in bound:
        if name not in referenced:
            raise ConfigError(
                f"macro {name} is set, but nothing refers to it",
                where=name,
                expected=f"one of {', '.join(sorted(referenced))}",
                fix=_did_you_mean(name, referenced) or "check the spelling, or remove it",
            )


def _check_command_line(
    given: Sequence[tuple[str, str]], bindings: _Bindings, used: set[_Key], command: str
) -> None:
    reached = [_binding_name(key, parameter) for key in used for parameter in bindings[key]]
    for name, value in given:
        short = name.split("/")[-1].split(".")
        if len(short) > 1:
            parts = (name.rpartition("/")[0], short[-2], short[-1])
            hits = [
                key
                for key in used
                if key[0] == parts[0]
                and key[1].split(".")[-1] == parts[1]
                and parts[2] in bindings[key]
            ]
        else:
            hits = [key for key in used if key == (name, _MACRO)]
        if not hits:
            raise ConfigError(
                f"`{command}` never uses {name}",
                where=f"--gin.{name}={value}",
                expected=f"one of {', '.join(sorted(reached))}",
                fix=_did_you_mean(name, reached) or "remove it",
            )


def _required(bindings: _Bindings, used: set[_Key]) -> list[str]:
    """Names of used bindings that are still `%gin.REQUIRED`."""
    return sorted(
        _binding_name(key, parameter)
        for key in used
        for parameter, value in bindings[key].items()
        if isinstance(value, gin.config.ConfigurableReference) and repr(value) == "%gin.REQUIRED"
    )


def _binding_name(key: _Key, parameter: str) -> str:
    scope, selector = key
    if selector == _MACRO:
        return scope
    name = f"{selector.split('.')[-1]}.{parameter}"
    return f"{scope}/{name}" if scope else name
