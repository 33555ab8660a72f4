"""The parser of command lines: a command, its flags and its bindings."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from argcomplete.completers import FilesCompleter

from taser_jax.cli.command_table import COMMANDS, GROUPS
from taser_jax.cli.configuration import GinFlags
from taser_jax.cli.gin_files import gin_directory
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.limits import Limits

_ALONE = """\
without a command:
  --show_gin [FILE]           list the Gin files at hand, or print one
  --version                   print the version
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        command: a key of COMMANDS.
        flags: its Gin files and bindings.
        dry_run: whether to check and print the configuration without computing anything.
        multihost: whether to join other hosts first.
        coordinator_timeout: seconds to wait for them.
        help: whether to print the command's help.
        limits: limits on the memory for lines and arrays of files.
        is_synced: whether files reach the disk before they replace others.
    """

    command: str
    flags: GinFlags
    dry_run: bool = False
    multihost: bool = False
    coordinator_timeout: int = 300
    help: bool = False
    limits: Limits = Limits()
    is_synced: bool = True


class _Parser(argparse.ArgumentParser):
    """Raises `ConfigError` with a fix, and accepts no abbreviated flags."""

    def __init__(self, prog: str, **options: Any) -> None:
        layout = functools.partial(argparse.HelpFormatter, max_help_position=30, width=100)
        super().__init__(
            prog, add_help=False, allow_abbrev=False, formatter_class=layout, **options
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
    flags = _Parser("taser <command>", usage="taser <command> [flags]")
    files = flags.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="Gin file; may be given several times, later files win",
    )
    setattr(files, "completer", _complete_gin_file)  # noqa: B010  # argcomplete reads it
    flags.add_argument(
        "--gin_bindings",
        dest="bindings",
        action="append",
        default=[],
        type=_binding,
        metavar="NAME=VALUE",
        help="sets a macro or a parameter; also --gin.NAME=VALUE; strings need no quotes",
    )
    flags.add_argument(
        "--gin_search_paths",
        action="extend",
        default=[],
        type=lambda value: value.split(","),
        metavar="A,B",
        help="further folders to search for Gin files",
    )
    flags.add_argument(
        "--gin_import",
        action="append",
        default=[],
        metavar="MODULE",
        help="module, or package of modules, that Gin files may import; importing runs its code",
    )
    flags.add_argument(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="validate and describe the run without starting it (train)",
    )
    flags.add_argument(
        "--multihost",
        action="store_true",
        help="join the other hosts first (TPU pods); every host runs this command",
    )
    flags.add_argument(
        "--coordinator_timeout",
        default=Arguments.coordinator_timeout,
        type=functools.partial(_whole, flag="--coordinator_timeout"),
        metavar="SECONDS",
        help="how long to wait for the other hosts (%(default)s)",
    )
    for field, what in (
        ("line_mib", "MiB of one line or JSON record of a file"),
        ("array_gib", "GiB of one array of a checkpoint from elsewhere"),
    ):
        flags.add_argument(
            f"--max_{field}",
            default=getattr(Limits, field),
            type=functools.partial(_whole, flag=f"--max_{field}"),
            metavar="N",
            help=f"most {what} (%(default)s)",
        )
    flags.add_argument(
        "--no_fsync",
        action="store_true",
        help="do not wait for the disk: faster, and a power cut may cost what was just written",
    )
    flags.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show what TensorFlow, XLA and libtpu write as well",
    )
    flags.add_argument(
        "-h", "--help", action="store_true", help="show what the command does and what can be set"
    )
    return flags


def _binding(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def _bound(name: str, value: str) -> tuple[str, str]:
    return name, value


def _whole(text: str, *, flag: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < 1:
        raise ConfigError(f"{flag} is {text!r}", expected="a whole number, 1 or more")
    return int(text)


def _complete_gin_file(prefix: str, **_: object) -> list[str]:
    """Completes packaged Gin files and those of the working directory."""
    packaged = gin_directory()
    names = [str(path.relative_to(packaged)) for path in packaged.rglob("*.gin")]
    return [*(name for name in names if name.startswith(prefix)), *FilesCompleter()(prefix)]


def parser() -> argparse.ArgumentParser:
    """The parser of all commands and flags, also used for shell completion."""
    flags = _flags()
    top = _Parser("taser")
    verbs = {"": top.add_subparsers()}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in verbs:
            verbs[group] = verbs[""].add_parser(group, help=GROUPS[group]).add_subparsers()
        one = verbs[group].add_parser(word, parents=[flags], help=command.summary)
        for flag, macro in command.flags.items():
            one.add_argument(
                flag,
                dest="bindings",
                action="append",
                type=functools.partial(_bound, macro),
            )
        for flag, binding in command.switches.items():
            one.add_argument(flag, dest="bindings", action="append_const", const=binding)
    return top


def parse(argv: Sequence[str]) -> Arguments:
    """Splits the command line into the command and its flags.

    Example:
        `["pipeline", "muf", "--gin.DATA_DIR=data"]` is the command "pipeline muf" with one binding.

    Raises:
        ConfigError: an unknown command or flag, with the nearest known one.
    """
    words = list(itertools.takewhile(lambda argument: not argument.startswith("-"), argv))
    rest = argv[len(words) :]
    of_words = COMMANDS.get(" ".join(words[:-1]))
    if of_words and words[-1] in of_words.recipes:
        rest = [f"--gin_file={of_words.recipes[words.pop()]}", *rest]
    name, bindings = _with_argument(words)
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        raise ConfigError(
            f"no command {name!r}",
            expected=f"one of {', '.join(COMMANDS)}",
            fix=f"did you mean `taser {nearest[0]}`?" if nearest else "run `taser --help`",
        )
    found, unknown = parser().parse_known_args([*name.split(), *_spelled_out(rest)])
    command = COMMANDS[name]
    if command.argument and not command.optional and not (found.help or bindings or found.bindings):
        word = "DIRECTORY" if COMMANDS[name].many else "NAME"
        raise ConfigError(
            f"`taser {name}` needs a {word.lower()}", fix=f"write `taser {name} {word}`"
        )
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]!r}", fix=_nearest_flag(unknown[0], name))
    return Arguments(
        command=name,
        flags=GinFlags(
            files=COMMANDS[name].gin_files(found.gin_file),
            defaults=(COMMANDS[name].base or COMMANDS[name].gin_file,) if found.gin_file else (),
            bindings=(*bindings, *found.bindings),
            search_paths=tuple(found.gin_search_paths),
            imports=tuple(found.gin_import),
        ),
        dry_run=found.dry_run,
        multihost=found.multihost,
        coordinator_timeout=found.coordinator_timeout,
        limits=Limits(found.max_line_mib, found.max_array_gib),
        is_synced=not found.no_fsync,
        help=found.help,
    )


def _nearest_flag(flag: str, name: str) -> str:
    command = COMMANDS[name]
    known = [*re.findall(r"--\w+", usage()), *command.flags, *command.switches]
    nearest = difflib.get_close_matches(flag.partition("=")[0], known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"see `taser {name} --help`"


def _with_argument(words: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The command that words name, and the binding of what follows it."""
    if " ".join(words) in COMMANDS:
        return " ".join(words), []
    for name, several in COMMANDS.items():
        if several.many and several.argument and words[:1] == [name] and len(words) > 1:
            rest = [" ".join(words[1:])] if several.joined else words[1:]
            return name, [(several.argument, repr(rest))]
    command = COMMANDS.get(" ".join(words[:-1]))
    if command is None or command.argument is None:
        return " ".join(words), []
    return " ".join(words[:-1]), [(command.argument, words[-1])]


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
    shown = {name: one for name, one in COMMANDS.items() if name.startswith(f"{group} ".lstrip())}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
    return f"{usage()}\n{_ALONE}\ncommands:\n" + "\n".join(lines)
