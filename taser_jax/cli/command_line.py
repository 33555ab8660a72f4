"""Command lines: a command, its flags and bindings; and help, what can be set for a command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import functools
import hashlib
import inspect
import itertools
import os
import pathlib
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from taser_jax.cli.command_table import COMMANDS, Command, configurables_of, load
from taser_jax.cli.configuration import GinFlags
from taser_jax.cli.gin_files import FILLED_IN, WIDTH, bindings, gin_directory
from taser_jax.storage.errors import ConfigError, did_you_mean
from taser_jax.storage.publishing import cache_folder

_ALONE = """\
without a command:
  --show_gin [FILE]           list the Gin files at hand, or print one
  --version                   print the version
"""


class Arguments(argparse.Namespace):
    """A parsed command line, with the flags of every command under their names.

    Attributes:
        command: a key of COMMANDS.
        flags: its Gin files and bindings.
        dry_run: whether to check and print the configuration without computing anything.
        multihost: whether to join other hosts first.
        coordinator_timeout: seconds to wait for them.
        help: whether to print the command's help.
        no_fsync: whether files replace others before they have reached the disk.
    """

    command: str
    flags: GinFlags
    dry_run: bool
    multihost: bool
    coordinator_timeout: int
    help: bool
    no_fsync: bool


class _Parser(argparse.ArgumentParser):
    """Flags of every command; raises `ConfigError` with a fix, and accepts no abbreviated flags."""

    def __init__(self) -> None:
        super().__init__(
            usage="taser <command> [flags]",
            add_help=False,
            allow_abbrev=False,
            formatter_class=functools.partial(
                argparse.HelpFormatter, max_help_position=30, width=100
            ),
        )

    def error(self, message: str) -> NoReturn:
        missing = re.match(r"argument ([^:/]+).*: expected one argument", message)
        if missing:
            raise ConfigError(
                f"{missing.group(1)} has no value", fix=f"write {missing.group(1)}=VALUE"
            )
        raise ConfigError(message, fix="see `taser --help`")


def _flags() -> _Parser:
    """Flags of every command."""
    flags = _Parser()
    switch = functools.partial(flags.add_argument, action="store_true")
    several = functools.partial(flags.add_argument, action="append", default=[])
    several(
        "--gin_file", metavar="FILE", help="Gin file; may be given several times, later files win"
    )
    several(
        "--gin_bindings",
        dest="bindings",
        type=_binding,
        metavar="NAME=VALUE",
        help="sets a macro or a parameter; also --gin.NAME=VALUE; strings need no quotes",
    )
    several(
        "--gin_search_paths",
        action="extend",
        type=lambda value: value.split(","),
        metavar="A,B",
        help="further folders to search for Gin files",
    )
    several(
        "--gin_import",
        metavar="MODULE",
        help="module, or package of modules, that Gin files may import; importing runs its code",
    )
    switch(
        "--dry_run", "--dry-run", help="validate and describe the run without starting it (train)"
    )
    switch(
        "--multihost", help="join the other hosts first (TPU pods); every host runs this command"
    )
    flags.add_argument(
        "--coordinator_timeout",
        default=300,
        type=int,
        metavar="SECONDS",
        help="how long to wait for the other hosts (%(default)s)",
    )
    switch(
        "--no_fsync",
        help="do not wait for the disk: faster, and a power cut may cost what was just written",
    )
    switch("-v", "--verbose", help="show what TensorFlow, XLA and libtpu write as well")
    switch("-h", "--help", help="show what the command does and what can be set")
    return flags


def _binding(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def parse(argv: Sequence[str]) -> Arguments:
    """Splits the command line into the command and its flags.

    Example:
        `["pipeline", "muf", "--gin.DATA_DIR=data"]` is the command "pipeline muf" with one binding.

    Raises:
        ConfigError: an unknown command or flag, with the nearest known one.
    """
    words = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    name = next(
        (name for end in range(len(words), 0, -1) if (name := " ".join(words[:end])) in COMMANDS),
        None,
    )
    if name is None:
        raise _no_command(words)
    command, given = COMMANDS[name], words[len(name.split()) :]
    flags = _flags()
    for flag, macro in command.flags.items():
        bound = functools.partial(lambda name, value: (name, value), macro)
        flags.add_argument(flag, dest="bindings", action="append", type=bound)
    for flag, binding in command.switches.items():
        flags.add_argument(flag, dest="bindings", action="append_const", const=binding)
    arguments, unknown = flags.parse_known_args(
        [*_spelled_out(argv[len(words) :])], namespace=Arguments()
    )
    files, bindings = arguments.gin_file, arguments.bindings
    if given:
        bindings = [_argument(command, words, given), *bindings]
    elif command.argument and not command.optional and not (arguments.help or bindings):
        word = "DIRECTORY" if command.many else command.argument.rpartition(".")[2].upper()
        raise ConfigError(
            f"`taser {name}` needs a {word.lower()}", fix=f"write `taser {name} {word}`"
        )
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]!r}", fix=_nearest_flag(unknown[0], name))
    arguments.command = name
    arguments.flags = GinFlags(
        files=command.gin_files(files),
        defaults=(COMMANDS[command.recipe_of or name].gin_file,) if files else (),
        bindings=tuple(bindings),
        search_paths=tuple(arguments.gin_search_paths),
        imports=tuple(arguments.gin_import),
    )
    return arguments


def _argument(command: Command, words: Sequence[str], given: Sequence[str]) -> tuple[str, str]:
    """The binding of the words after a command."""
    if command.argument is None or (len(given) > 1 and not command.many):
        raise _no_command(words)
    if not command.many:
        return command.argument, given[0]
    return command.argument, repr([" ".join(given)] if command.joined else list(given))


def _no_command(words: Sequence[str]) -> ConfigError:
    written = " ".join(words)
    nearest = difflib.get_close_matches(written, COMMANDS, n=1, cutoff=0.4)
    return ConfigError(
        f"no command {written!r}",
        expected=f"one of {', '.join(COMMANDS)}",
        fix=f"did you mean `taser {nearest[0]}`?" if nearest else "run `taser --help`",
    )


def _nearest_flag(flag: str, name: str) -> str:
    command = COMMANDS[name]
    if command.argument and not flag.startswith("-"):
        return f"write it before the flags: `taser {name} {flag} ...`"
    flags = [*re.findall(r"--\w+", usage()), *command.flags, *command.switches]
    return did_you_mean(flag.partition("=")[0], flags) or f"see `taser {name} --help`"


def _spelled_out(arguments: Sequence[str]) -> Iterator[str]:
    """`--gin.NAME=VALUE` and `--gin.NAME VALUE` as `--gin_bindings=NAME=VALUE`."""
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        binds = flag.startswith("--gin.")
        if binds and not equals:
            value = next(rest, "")
        if not value and (binds or equals):
            raise ConfigError(f"{flag} has no value", fix=f"write {flag}=VALUE")
        yield f"--gin_bindings={flag.removeprefix('--gin.')}={value}" if binds else argument


def usage() -> str:
    """The flags of every command, as text."""
    return _flags().format_help()


def overview(group: str = "") -> str:
    """The flags, and the commands of a group, or all commands."""
    shown = {
        name: command for name, command in COMMANDS.items() if name.startswith(f"{group} ".lstrip())
    }
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    return f"{usage()}\n{_ALONE}\ncommands:\n" + "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Option:
    """What to write after `--gin.`.

    Attributes:
        name: a macro of the command's Gin file, or `function.parameter`.
        default: as Gin text; None where one is required.
        parameter: what a macro sets, as `Owner.parameter`; empty where nothing of the command's.
        meaning: from the docstring.
    """

    name: str
    default: str | None
    parameter: str
    meaning: str


def options(
    gin_file: str, function: Callable[..., object], configurables: Collection[Callable[..., object]]
) -> list[Option]:
    """The macros of a command's Gin file, then parameters that the file does not bind.

    Args:
        gin_file: a packaged file.
        function: the command's.
        configurables: what its bindings may refer to.
    """
    about = {function.__name__: entries(inspect.getdoc(function) or "", "Args")}
    about |= {c.__name__: entries(inspect.getdoc(c) or "", "Attributes") for c in configurables}
    explained = []
    for name, (value, parameter) in _macros(gin_file).items():
        owner, _, field = parameter.rpartition(".")
        default = None if value == "%gin.REQUIRED" else value
        explained.append(Option(name, default, parameter, about.get(owner, {}).get(field, "")))
    bound = dict(bindings(gin_file))
    for field, described in inspect.signature(function).parameters.items():
        full = f"{function.__name__}.{field}"
        if full not in bound and field not in FILLED_IN:
            meaning = about[function.__name__].get(field, "")
            explained.append(Option(full, shown_default(described.default), full, meaning))
    return explained


def _macros(gin_file: str) -> dict[str, tuple[str, str]]:
    """Macro -> (its value, what it sets first), of a Gin file and of those it includes."""
    values: dict[str, str] = {}
    targets: dict[str, str] = {}
    for left, right in bindings(gin_file):
        if left.isupper():
            values[left] = right
        elif right.startswith("%") and right != "%gin.REQUIRED":
            targets.setdefault(right[1:], left)
    # A macro that is only a part of another value is set for that value's sake.
    return {name: (value, targets.get(name, "")) for name, value in values.items()}


def entries(doc: str, section: str) -> dict[str, str]:
    """`name: text` entries of a section of a Google docstring."""
    body = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", doc, re.MULTILINE)
    _, *parts = re.split(r"^    (\w+): ", body.group(1) if body else "", flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {name: " ".join(meaning.split()) for name, meaning in pairs}


def description(doc: str) -> str:
    """A docstring up to its first section."""
    head = re.split(r"\n(?=(?:Args|Attributes|Example|Returns|Raises|Yields|Source):)", doc)[0]
    return head.strip()


def shown_default(value: object) -> str | None:
    """A default as text; None where one is required."""
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def command_help(name: str) -> str:
    """`help_text` of a command, from the user's cache where the sources have not changed since.

    Making it imports the command with its libraries, which takes seconds.
    """
    package = pathlib.Path(__file__).parents[1]
    sources = sorted([*package.rglob("*.py"), *gin_directory().rglob("*.gin")])
    times = "".join(f"{path} {path.stat().st_mtime_ns}\n" for path in sources)
    version = hashlib.sha256(times.encode()).hexdigest()
    file = cache_folder("help", f"{name}.txt")
    # A home directory may be missing, full or read-only.
    with contextlib.suppress(OSError):
        of_version, _, text = file.read_text(encoding="utf-8").partition("\n")
        if of_version == version:
            return text
    text = help_text(name)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(f"{version}\n{text}", encoding="utf-8")
        scratch.replace(file)
    return text


def help_text(name: str) -> str:
    """What a command does, and all that can be set for it."""
    command, function, configurables = COMMANDS[name], load(name), configurables_of(name)
    words = command.argument.rpartition(".")[2].upper() if command.argument else ""
    words = f" [{words}]" if command.optional else f" {words}" if words else ""
    about = description(inspect.getdoc(function) or "")
    usage = f"usage: taser {name}{words} [flags]"
    parts = [f"{usage}\n\ntaser {name}: {command.summary}\n\n{about}\n"]
    if command.flags or command.switches:
        own = [f"  {flag}=VALUE  sets {macro}\n" for flag, macro in command.flags.items()]
        own += [f"  {flag}  sets {macro} = {v}\n" for flag, (macro, v) in command.switches.items()]
        parts.append("".join(own))
    if explained := "".join(map(_explained, options(command.gin_file, function, configurables))):
        parts.append("After --gin. (in capitals: also a line of a Gin file), with the default:\n")
        parts.append(explained)
    if objects := sorted(target.__name__ for target in configurables):
        text = (
            "Objects, set as --gin.NAME.FIELD=VALUE (`python docs/generate_commands.py` writes a "
            f"page of all fields): {', '.join(objects)}."
        )
        parts.append(textwrap.fill(text, WIDTH) + "\n")
    parts.append(
        f"Without --gin_file it reads {' and then '.join(command.gin_files())}. "
        "`taser --show_gin` lists all Gin files, `taser --show_gin FILE` prints one."
    )
    return "\n".join(parts)


def _explained(option: Option) -> str:
    default = "required" if option.default is None else option.default
    sets = f" ({option.parameter})" if option.parameter not in ("", option.name) else ""
    meaning = textwrap.fill(
        f"{option.meaning}{sets}".strip(), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    return f"  {option.name} = {default}\n" + (meaning + "\n" if meaning else "")
