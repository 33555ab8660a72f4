"""The parser of command lines: a command, its flags and its bindings."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from taser_jax.cli.command_table import COMMANDS, Command
from taser_jax.cli.configuration import GinFlags
from taser_jax.storage.errors import ConfigError, did_you_mean

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
        is_synced: whether files reach the disk before they replace others.
    """

    command: str
    flags: GinFlags
    dry_run: bool = False
    multihost: bool = False
    coordinator_timeout: int = 300
    help: bool = False
    is_synced: bool = True


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
    flags.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="Gin file; may be given several times, later files win",
    )
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
        type=int,
        metavar="SECONDS",
        help="how long to wait for the other hosts (%(default)s)",
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
        flags.add_argument(
            flag, dest="bindings", action="append", type=functools.partial(_bound, macro)
        )
    for flag, binding in command.switches.items():
        flags.add_argument(flag, dest="bindings", action="append_const", const=binding)
    flagged, unknown = flags.parse_known_args([*_spelled_out(argv[len(words) :])])
    files, bindings = flagged.gin_file, flagged.bindings
    if given:
        bindings = [_argument(command, words, given), *bindings]
    elif command.argument and not command.optional and not (flagged.help or bindings):
        word = "DIRECTORY" if command.many else "NAME"
        raise ConfigError(
            f"`taser {name}` needs a {word.lower()}", fix=f"write `taser {name} {word}`"
        )
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]!r}", fix=_nearest_flag(unknown[0], name))
    return Arguments(
        command=name,
        flags=GinFlags(
            files=command.gin_files(files),
            defaults=(COMMANDS[command.recipe_of or name].gin_file,) if files else (),
            bindings=tuple(bindings),
            search_paths=tuple(flagged.gin_search_paths),
            imports=tuple(flagged.gin_import),
        ),
        dry_run=flagged.dry_run,
        multihost=flagged.multihost,
        coordinator_timeout=flagged.coordinator_timeout,
        is_synced=not flagged.no_fsync,
        help=flagged.help,
    )


def _bound(name: str, value: str) -> tuple[str, str]:
    return name, value


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
