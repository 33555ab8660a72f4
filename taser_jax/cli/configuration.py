"""Resolves Gin files and flags into one checked configuration.

A command is one function, and its configuration is all that its bindings reach. So what a command
will use is known before it runs: a misspelled macro, an unknown name or an override without effect
is an error, never a silent default.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import graphlib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import gin

from taser_jax.cli import command_table, gin_files
from taser_jax.cli.command_table import at_home, fits, fix_of, shown
from taser_jax.storage.errors import ConfigError, did_you_mean
from taser_jax.storage.typed_files import check_ranges, is_enum

_PRETRAINED = "PRETRAINED"
# The class that loads the weights it names.
_WEIGHTS = "Pretrained"


@dataclasses.dataclass(frozen=True)
class GinFlags:
    """The Gin flags of a command line.

    Attributes:
        files: Gin files, later ones win.
        defaults: Gin files read before them unless they configure the whole command themselves;
            those of a project hold paths and names for all commands.
        bindings: (name, value as written) pairs; they win over files.
        search_paths: folders searched for Gin files beside the packaged ones.
        imports: modules that files may import beside those of this package.
    """

    files: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    bindings: tuple[tuple[str, str], ...] = ()
    search_paths: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A resolved and checked configuration.

    Attributes:
        function: the configured command; call it without arguments.
        text: the configuration that the command reaches, as Gin text (what `config.gin` holds).
        unused: bindings of files that this command could reach and does not.
        unset: macros still `%gin.REQUIRED`; empty unless they were allowed.
    """

    function: Callable[..., object]
    text: str
    unused: tuple[str, ...]
    unset: tuple[str, ...]


class _Unset(enum.Enum):
    UNSET = "what is still to be set in a dry run; commands get None"


def configurable(target: Callable[..., object]) -> Callable[..., object]:
    """Wraps a dataclass or function so that Gin may give enums by value and tuples as lists.

    Example:
        `ExpertConfig.routing = 'sequence'` arrives as `Routing.SEQUENCE`; a value that is none of
        the enum's raises a `ConfigError` that lists them.
    """
    # A dataclass's own hints, since those of `__init__` are not found where a field is inherited.
    is_fields = dataclasses.is_dataclass(target) or not inspect.isclass(target)
    hints = typing.get_type_hints(target if is_fields else target.__init__)

    @functools.wraps(target, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        converted = {
            name: _convert(value, hints.get(name), where=f"{target.__name__}.{name}")
            for name, value in kwargs.items()
        }
        if not inspect.isclass(target):
            # A dry run gives None for what is still to be set.
            check_ranges(target, {n: v for n, v in converted.items() if v is not None})
        try:
            return target(*args, **converted)
        except (AttributeError, TypeError, ConfigError) as error:
            unset = [name for name in converted if _is_unset(converted[name], hints.get(name))]
            # A command's own errors say more.
            if not unset or (isinstance(error, ConfigError) and not inspect.isclass(target)):
                raise
            where = ", ".join(_with_macro(f"{target.__name__}.{name}") for name in unset)
            fix = "set it in a Gin file or on the command line"
            raise ConfigError("not set", where=where, fix=fix) from error

    # Gin reads parameter names from the signature and would follow __wrapped__ to a class.
    del build.__wrapped__
    build.__signature__ = inspect.signature(target)  # type: ignore[attr-defined]  # of functions
    return build


def _convert(value: Any, hint: Any, *, where: str) -> Any:
    """Converts a value to its type hint: values to enum members, lists to tuples; expands `~`."""
    if value is _Unset.UNSET:
        return None
    value = at_home(value)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    enums = list(filter(is_enum, options))
    if isinstance(value, str) and enums and str not in options:
        for kind in enums:
            if value in [member.value for member in kind]:
                return kind(value)
        choices = [member.value for kind in enums for member in kind]
        problem, expected = f"{value!r} is not a choice", f"one of {', '.join(map(repr, choices))}"
        nearest = did_you_mean(value, choices) or "use one of those"
        raise ConfigError(problem, where=where, expected=expected, fix=nearest)
    if hint is not None and not fits(value, hint):
        expected, fix = shown(hint), fix_of(value, hint)
        raise ConfigError(f"{value!r}", where=_with_macro(where), expected=expected, fix=fix)
    if isinstance(value, list) and any(typing.get_origin(option) is tuple for option in options):
        return tuple(value)
    return value


def _is_unset(value: Any, hint: Any) -> bool:
    """Whether a dry run gave None for what must be set."""
    return value is None and hint is not None and not fits(None, hint)


def _with_macro(parameter: str) -> str:
    """`Owner.parameter`, and the macro that sets it."""
    owner, name = parameter.split(".")
    macros = {
        macro
        for (_, selector), values in _all_bindings().items()
        if selector.split(".")[-1] == owner and name in values
        for macro in gin_files.macros(values[name])
    }
    return " = ".join([parameter, *(f"%{macro}" for macro in sorted(macros))])


def resolve_command(name: str, flags: GinFlags, *, allow_unset: bool = False) -> Resolved:
    """As `resolve`, for a command, whose files may configure other commands too."""
    recipe_of = command_table.COMMANDS[name].recipe_of
    return resolve(
        command_table.load(name),
        flags=flags,
        allow_unset=allow_unset,
        recipe_of=command_table.load(recipe_of) if recipe_of else None,
        elsewhere=command_table.configurable_names(),
    )


def resolve(
    function: Callable[..., object],
    *,
    flags: GinFlags,
    allow_unset: bool = False,
    recipe_of: Callable[..., object] | None = None,
    elsewhere: Collection[str] = frozenset(),
) -> Resolved:
    """Reads files and bindings for a function and checks every name in them.

    Args:
        function: bindings name it as `<function name>.<parameter>`.
        flags: files and bindings of the command line.
        allow_unset: list macros that are still required instead of raising (for dry runs); what
            they would have set is then None.
        recipe_of: another command's function: bindings that only it reaches are not `unused`.
        elsewhere: functions and objects of all commands; files may configure them too.

    Raises:
        ConfigError: with the nearest real name where something is misspelled.
    """
    functions = [function, *([recipe_of] if recipe_of else [])]
    targets = [*functions, *command_table.configurables(*functions)]
    _register(targets)
    name = functions[-1].__name__
    reader = gin_files.GinReader(flags.search_paths, elsewhere, flags.imports)
    reader.read_files(flags.files)
    bound = {
        parameter
        for (_, selector), values in _all_bindings().items()
        if selector.split(".")[-1] == name
        for parameter in values
    }
    parameters = inspect.signature(function).parameters.values()
    needed = {each.name for each in parameters if each.default is inspect.Parameter.empty}
    # `ask.task = 'faq'` in a project's file is a setting beside the defaults; a recipe that binds
    # all that is needed stands for them.
    if flags.defaults and not (bound and (recipe_of or needed - gin_files.FILLED_IN <= bound)):
        reader.read_files([*flags.defaults, *flags.files])
    for setting, value in flags.bindings:
        reader.read_binding(setting, value)
    bindings = _all_bindings()
    used = _reachable(function.__name__, bindings)
    reader.check_modules(used)
    _check_pretrained(bindings, used, targets, command=function.__name__)
    _check_macros(bindings, reader.referenced, given={macro for macro, _ in flags.bindings})
    _check_command_line(flags.bindings, bindings, used, function.__name__)
    unset = _required(bindings, used)
    if unset and not allow_unset:
        where, fix = ", ".join(flags.files) or "the command line", " ".join(map(_how_to_set, unset))
        raise ConfigError(f"{', '.join(unset)} not set", where=where, fix=fix)
    for setting in unset:
        parameter = f"{setting}/gin.macro.value" if setting.isupper() else setting
        gin.bind_parameter(parameter, _Unset.UNSET)
    reached = used | _reachable(name, bindings)
    own = {_selector(target) for target in targets}
    return Resolved(
        function=gin.get_configurable(_selector(function)),
        text=_text(reached),
        unused=_unused(bindings, reached, own),
        unset=tuple(unset),
    )


def _text(reached: set[_Key]) -> str:
    """Bindings as Gin text, without those of other commands and of objects that are not used."""
    whole = gin.config._CONFIG
    try:
        gin.config._CONFIG = {key: whole[key] for key in whole if key in reached}
        return gin.config_str()
    finally:
        gin.config._CONFIG = whole


def _unused(bindings: _Bindings, reached: set[_Key], own: set[str]) -> tuple[str, ...]:
    """Bindings of the command's own objects that it does not reach, and their macros."""
    own_values = [values for (_, selector), values in bindings.items() if selector in own]
    macros = gin_files.macros(own_values)
    return tuple(
        sorted(
            _binding_name(key, parameter)
            for key, parameters in bindings.items()
            for parameter in parameters
            if key not in reached and (key[1] in own or key[0] in macros)
        )
    )


def _selector(target: Callable[..., object]) -> str:
    return f"{target.__module__}.{target.__name__}"


def _register(targets: Iterable[Callable[..., object]]) -> None:
    for target in targets:
        try:
            gin.get_configurable(_selector(target))
        except ValueError:
            gin.external_configurable(
                configurable(target), name=target.__name__, module=target.__module__
            )


_Key = tuple[str, str]
_Bindings = Mapping[_Key, Mapping[str, Any]]


def _all_bindings() -> _Bindings:
    # Gin has no public way to list bindings with their references.
    return {key: dict(values) for key, values in gin.config._CONFIG.items()}


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
                for scope, target in gin_files.references(value):
                    calls.append((scope or active, target))
    return used


def _check_macros(bindings: _Bindings, referenced: set[str], *, given: Collection[str]) -> None:
    """Rejects unknown macros, and macros of other commands on the command line."""
    leads_to = {
        scope: gin_files.macros(values)
        for (scope, selector), values in bindings.items()
        if selector == gin_files.MACRO
    }
    try:
        bound = set(graphlib.TopologicalSorter(leads_to).static_order()) & leads_to.keys()
    except graphlib.CycleError as error:
        problem, fix = "macros that refer to one another in a circle", "give one of them a value"
        where = " = ".join(f"%{name}" for name in reversed(error.args[1]))
        raise ConfigError(problem, where=where, fix=fix) from error
    for name in sorted(referenced - bound):
        problem = f"%{name} is referred to but never given a value"
        fix = did_you_mean(name, bound) or f"set --gin.{name}=..."
        raise ConfigError(problem, where=f"%{name}", fix=fix)
    # A project's file sets macros for all commands.
    for name in sorted(bound - referenced - (gin_files.packaged_macros() - set(given))):
        usable = referenced if name in given else referenced | gin_files.packaged_macros()
        problem = f"macro {name} is set, but nothing refers to it"
        expected = f"one of {', '.join(sorted(referenced))}" if referenced else "no macro here"
        fix = did_you_mean(name, usable) or "check the spelling, or remove it"
        raise ConfigError(problem, where=name, expected=expected, fix=fix)


def _check_pretrained(
    bindings: _Bindings, used: set[_Key], targets: Iterable[Callable[..., object]], *, command: str
) -> None:
    """Rejects a configuration that names pretrained weights without loading them."""
    loads = any(target.__name__ == _WEIGHTS for target in targets)
    # A command may take the name itself.
    loaded = any(selector.split(".")[-1] == _WEIGHTS for _, selector in used) or any(
        _PRETRAINED in gin_files.macros(values)
        for (_, selector), values in bindings.items()
        if selector.split(".")[-1] == command
    )
    if (_PRETRAINED, gin_files.MACRO) in bindings and loads and not loaded:
        raise ConfigError(
            f"{_PRETRAINED} is set, but nothing loads it: this would start from random weights",
            where=_PRETRAINED,
            fix=f"include models/bert_pretrained.gin or models/t5_pretrained.gin after what sets "
            f"TrainingConfig.pretrained otherwise, or leave {_PRETRAINED} out",
        )


def _check_command_line(
    given: Sequence[tuple[str, str]], bindings: _Bindings, used: set[_Key], command: str
) -> None:
    reached = {_binding_name(key, parameter) for key in used for parameter in bindings[key]}
    for name, value in given:
        scope, slash, selector = name.rpartition("/")
        # Modules before a class's name may be left out.
        if scope + slash + ".".join(selector.split(".")[-2:]) not in reached:
            problem, where = f"`{command}` never uses {name}", f"--gin.{name}={value}"
            expected = f"one of {', '.join(sorted(reached))}"
            fix = did_you_mean(name, reached) or "remove it"
            raise ConfigError(problem, where=where, expected=expected, fix=fix)


def _required(bindings: _Bindings, used: set[_Key]) -> list[str]:
    """Names of used bindings that are still `%gin.REQUIRED`."""
    return sorted(
        _binding_name(key, parameter)
        for key in used
        for parameter, value in bindings[key].items()
        if isinstance(value, gin.config.ConfigurableReference) and repr(value) == "%gin.REQUIRED"
    )


def _how_to_set(name: str) -> str:
    """What to add to the command line: a packaged model, or a value."""
    return "--gin_file=models/taser.gin" if name == "MODEL" else f"--gin.{name}=..."


def _binding_name(key: _Key, parameter: str) -> str:
    scope, selector = key
    if selector == gin_files.MACRO:
        return scope
    name = f"{selector.split('.')[-1]}.{parameter}"
    return f"{scope}/{name}" if scope else name
