"""Gin files: where they are, what they say, and reading them and bindings into Gin's registry."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.resources
import inspect
import itertools
import os
import pathlib
import re
import textwrap
import tokenize
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TextIO

import gin
from gin import config_parser

from taser_jax.storage.errors import ConfigError, did_you_mean

_GIN_ERRORS = (
    *(ValueError, SyntaxError, AttributeError, TypeError, tokenize.TokenError),
    # From brackets nested a thousand deep, or as many files that include one another.
    RecursionError,
)
MACRO = "gin.macro"
# The macro whose value is a module that is imported.
TASK_MODULE = "MIXTURE_OR_TASK_MODULE"
# Packages whose modules Gin files may import; importing a module runs its code.
IMPORTABLE = ("taser_jax", "tasks")
# Parameters of commands that the command line fills in; no Gin file sets them.
FILLED_IN = frozenset({"config_text", "dry_run"})
# Columns of what is printed.
WIDTH = 80


def gin_directory() -> pathlib.Path:
    """The folder of packaged Gin files, of the installation or the checkout."""
    packaged = pathlib.Path(str(importlib.resources.files("taser_jax"))) / "gin_configs"
    checkout = pathlib.Path(__file__).resolve().parents[2] / "gin_configs"
    return packaged if packaged.is_dir() else checkout


def find_gin_file(path: str, search_paths: Sequence[str] = ()) -> pathlib.Path:
    """A Gin file of the working directory, the search paths or the package.

    Raises:
        ConfigError: there is none; suggests the nearest.
    """
    for folder in ("", *search_paths, str(gin_directory())):
        file = pathlib.Path(folder).expanduser() / os.path.expanduser(path)
        if file.is_file():
            return file
    names = packaged()
    raise ConfigError(
        "no such Gin file",
        where=path,
        expected=f"a path, or one of {', '.join(names)}",
        fix=did_you_mean(path.removeprefix("gin_configs/"), names) or "check the path",
    )


def read(gin_file: str) -> str:
    """The text of a packaged Gin file."""
    return (gin_directory() / gin_file).read_text(encoding="utf-8")


def bindings(gin_file: str) -> Iterator[tuple[str, str]]:
    """(name, value as text) of a packaged Gin file's bindings, and of those it includes."""
    pending = ""
    for line in read(gin_file).splitlines():
        line = line.split(" #")[0].rstrip() if not line.startswith("#") else ""
        if line.startswith("include "):
            yield from bindings(line.split(" ", 1)[1].strip("'\""))
            continue
        pending += line.strip() + (" " if line.endswith(",") else "")
        closed = all(pending.count(a) == pending.count(b) for a, b in ("()", "[]", "{}"))
        if pending and closed:
            left, _, right = pending.partition("=")
            yield left.strip(), re.sub(r", ?([\])}])", r"\1", right.strip())
            pending = ""


def packaged() -> list[str]:
    """Names of all packaged Gin files."""
    folder = gin_directory()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gin"))


def show_gin(file: str | None = None) -> None:
    """Prints a Gin file, or lists those at hand with what they are for.

    Args:
        file: a packaged file, such as models/taser.gin, or one of the working directory; None lists
            all of both.

    Raises:
        ConfigError: no such file; suggests the nearest.
    """
    if file is not None:
        print(find_gin_file(file).read_text(encoding="utf-8"), end="")
        return
    here = sorted(path.name for path in pathlib.Path().glob("*.gin"))
    names = [*here, *packaged()]
    width = max(map(len, names))
    for name in names:
        comment = first_comment(find_gin_file(name).read_text(encoding="utf-8"))
        shown = textwrap.shorten(comment, WIDTH - width - 4, placeholder=" …")
        print(f"  {name:<{width}}  {shown}")


def first_comment(text: str) -> str:
    """The first sentence of a Gin file's first comment; empty without one."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=[.;])\s", comment, maxsplit=1)[0].rstrip(".;:")


class _Delegate(gin.config.ParserDelegate):
    """Makes references, and notices those to other commands' configurables."""

    def __init__(self, elsewhere: Collection[str]) -> None:
        super().__init__()
        self._elsewhere = elsewhere
        self.has_skipped = False

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> object:
        name = scoped_selector.rpartition("/")[2]
        if _is_only_elsewhere(name, self._elsewhere):
            self.has_skipped = True
            return None
        return super().configurable_reference(scoped_selector, evaluate)


def _is_only_elsewhere(selector: str, elsewhere: Collection[str]) -> bool:
    """Whether other commands know a name, and this one does not."""
    if selector.split(".")[-1] not in elsewhere:
        return False
    try:
        gin.get_configurable(selector)
    except ValueError:
        return True
    return False


class GinReader:
    """Reads files in the order given; later bindings win, also those of an included file.

    Args:
        search_paths: folders searched for files after the working directory and before the
            packaged ones.
        elsewhere: names that only other commands know; file bindings that use them are skipped.
        imports: modules that files may import beside those of `IMPORTABLE`.

    Attributes:
        referenced: macros that any binding refers to, overridden bindings included.
    """

    def __init__(
        self,
        search_paths: Sequence[str] = (),
        elsewhere: Collection[str] = frozenset(),
        imports: Sequence[str] = (),
    ) -> None:
        self._search_paths = search_paths
        self._elsewhere = elsewhere
        self._imports = (*IMPORTABLE, *imports)
        # The module of tasks that a file names last, and where; None if the command line does.
        self._task_module: tuple[str, str] | None = None
        self.referenced: set[str] = set()

    def read_files(self, paths: Sequence[str]) -> None:
        """Reads files, with nothing bound before."""
        gin.clear_config(clear_constants=False)
        self._task_module, self.referenced = None, set()
        for path in paths:
            self.read_file(path)

    def read_file(self, path: str, included_by: tuple[str, ...] = ()) -> None:
        """Reads a file and its includes.

        Raises:
            ConfigError: a missing file, a malformed line, or an import of a module that files may
                not import.
        """
        if path in included_by:
            raise ConfigError("a Gin file includes itself", where=" > ".join((*included_by, path)))
        # Some editors put a byte order mark first.
        with find_gin_file(path, self._search_paths).open(encoding="utf-8-sig") as text:
            self._read(text, (*included_by, path), self._elsewhere)

    def read_binding(self, name: str, value: str) -> None:
        """Reads one binding of the command line."""
        self._read(f"{name} = {literal(value)}", (f"--gin.{name}={value}",))

    def _read(
        self, text: TextIO | str, files: tuple[str, ...], elsewhere: Collection[str] = frozenset()
    ) -> None:
        delegate = _Delegate(elsewhere)
        try:
            for statement in config_parser.ConfigParser(text, delegate):
                match statement:
                    case config_parser.BindingStatement(selector=selector, arg_name=parameter):
                        of_another = parameter and _is_only_elsewhere(selector, elsewhere)
                        if not of_another and not delegate.has_skipped:
                            self._bind(statement, files)
                        delegate.has_skipped = False
                    case config_parser.IncludeStatement(filename=filename):
                        self.read_file(filename, files)
                    case config_parser.ImportStatement(module=module, location=location):
                        self._import(module, where=f"{files[-1]}:{location.line_num}")
        except _GIN_ERRORS as error:
            raise _readable(error, where=files[-1]) from error

    def _import(self, module: str, *, where: str) -> None:
        """Imports a module that files may import.

        Raises:
            ConfigError: they may not, or there is no such module.
        """
        self._check_importable(module, where)
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"cannot import {error.name!r}",
                where=where,
                fix="correct the name, or run from the folder it is in with PYTHONPATH=.",
            ) from error

    def _check_importable(self, module: str, where: str) -> None:
        if not any(f"{module}.".startswith(f"{allowed}.") for allowed in self._imports):
            fix = f"if you trust the file and the module: --gin_import={module}"
            raise ConfigError(
                f"import of {module!r}, which runs the code of that module",
                where=where,
                expected=f"modules of {', '.join(self._imports)}",
                fix="remove it: our names need none" if module.startswith("__gin__.") else fix,
            )

    def check_modules(self, used: Collection[tuple[str, str]]) -> None:
        """Refuses a module of tasks that a file names, and that files may not import.

        Args:
            used: keys of the bindings that the command reads.

        Raises:
            ConfigError: naming the line.
        """
        if self._task_module is not None and (TASK_MODULE, MACRO) in used:
            self._check_importable(*self._task_module)

    def _bind(self, statement: config_parser.BindingStatement, files: tuple[str, ...]) -> None:
        scope, selector, parameter, value, location = statement
        macro = "" if parameter else f"{scope}/{selector}".lstrip("/")
        gin.bind_parameter(
            (macro, MACRO, "value") if macro else (scope, selector, parameter), value
        )
        if macro == TASK_MODULE:
            is_of_file = value is not None and not files[0].startswith("--gin.")
            where = f"{files[-1]}:{location.line_num}"
            self._task_module = (value, where) if is_of_file else None
        self.referenced |= macros(value)


def references(value: Any) -> Iterator[tuple[str, str]]:
    """(scope, selector) of every reference inside a value; a macro's scope is its name."""
    for reference in gin.config.iterate_references({"value": value}):
        yield reference.config_key


def macros(value: object) -> set[str]:
    """Names of the macros that a value refers to."""
    return {scope for scope, kind in references(value) if kind == MACRO}


@functools.cache
def packaged_macros() -> frozenset[str]:
    """Macros of all packaged files."""
    texts = (path.read_text(encoding="utf-8") for path in gin_directory().rglob("*.gin"))
    return frozenset(
        name for text in texts for name in re.findall(r"^([A-Z][A-Z0-9_]*) = ", text, re.MULTILINE)
    )


def literal(value: str) -> str:
    """A value as Gin text: literals, @references and %macros unchanged, anything else a string.

    Example:
        >>> literal("1e-5"), literal("models/first"), literal("[1, 2]")
        ('1e-5', "'models/first'", '[1, 2]')
    """
    if value.startswith(("@", "%")):
        return value
    try:
        parsed = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value if _holds_references(value) else repr(value)
    kinds = (str, int, float, list, tuple, dict, types.NoneType)
    return value if isinstance(parsed, kinds) else repr(value)


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
    """Turns Gin's error into a `ConfigError` that suggests the nearest known name."""
    message = " ".join(str(error).split())
    configurables = _known_parameters()
    unknown = re.search(r"No configurable matching (?:reference )?'@?([^'()]+)", message)
    parameter = re.search(r"[Cc]onfigurable '([\w.]+)'.*?parameter named '(\w+)'", message)
    if parameter:
        owner, name = parameter.group(1).split(".")[-1], parameter.group(2)
        return ConfigError(
            f"{owner} has no parameter {name!r}",
            where=where,
            expected=f"one of {', '.join(configurables.get(owner, ()))}",
            fix=did_you_mean(name, configurables.get(owner, ())) or "use one of those",
        )
    if unknown:
        name = unknown.group(1)
        return ConfigError(
            f"unknown name {name!r}",
            where=where,
            expected=f"one of {', '.join(sorted(configurables))}, or a macro in capitals",
            fix=did_you_mean(name.split(".")[-1], configurables) or "check the spelling",
        )
    return ConfigError(message, where=where, fix="correct the Gin syntax or the name")


def _known_parameters() -> dict[str, list[str]]:
    """Configurable name -> its parameters, for those registered with Gin."""
    return {
        selector.split(".")[-1]: list(inspect.signature(entry.wrapped).parameters)
        for selector, entry in gin.config._REGISTRY.items()
        if not selector.startswith("gin.")
    }
