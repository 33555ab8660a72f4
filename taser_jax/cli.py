"""`taser <command>`: every command is one Gin-configurable function."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from taser_jax import __version__, configuration, hosts
from taser_jax.errors import EXIT_PREEMPTED, EXIT_USER_ERROR, ConfigError, Preempted, TaserError
from taser_jax.gin_files import gin_directory

logger = logging.getLogger("taser")

USAGE = """\
usage: taser <command> [--gin_file=FILE]... [--gin.NAME=VALUE]... [--dry_run]

  --gin_file=FILE          Gin file; may be given several times, later files win
  --gin.NAME=VALUE         sets a macro or a parameter; strings need no quotes
  --gin_search_paths=A,B   more folders to look for Gin files in
  --dry_run                check and show everything, compute nothing (train)
  --multihost              join the other hosts first (TPU pods); every host runs this command
  --coordinator_timeout=S  seconds to wait for them (300)
  --help                   after a command: what it does and what can be set
"""


# Their files would be written by every host at once.
_ONE_HOST = ("prepare", "import", "ask", "export", "quickstart", "compile")
_VALUED = ("--gin_file", "--gin_bindings", "--gin_search_paths", "--coordinator_timeout")


@dataclasses.dataclass(frozen=True)
class Command:
    """One entry of the command line.

    Attributes:
        module: module in `taser_jax`; it lists what Gin may configure in CONFIGURABLES.
        function: its function.
        summary: one line for the list of commands.
        gin_file: the Gin file read when none is given.
        recipe: for a command that works on another's configuration, the Gin file read when none
            is given; `gin_file` is then always read after it.
        flags: flags of its own, each for a macro.
    """

    module: str
    function: str
    summary: str
    gin_file: str
    recipe: str | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def gin_files(self, given: Sequence[str] = ()) -> tuple[str, ...]:
        """Files to read, in order, where those given stand on the command line."""
        if self.recipe is None:
            return tuple(given) or (self.gin_file,)
        return (*(given or (self.recipe,)), self.gin_file)


COMMANDS: dict[str, Command] = {
    "prepare pydocs": Command(
        "commands.prepare",
        "prepare_pydocs",
        "build the built-in collection",
        "runs/prepare_pydocs.gin",
    ),
    "prepare dpr": Command(
        "commands.prepare",
        "prepare_dpr",
        "DPR's TSV, JSON and qa.csv files",
        "runs/prepare_dpr.gin",
    ),
    "prepare beir": Command(
        "commands.prepare", "prepare_beir", "a BEIR directory", "runs/prepare_beir.gin"
    ),
    "prepare tsv": Command(
        "commands.prepare", "prepare_tsv", "plain TSV passages and queries", "runs/prepare_tsv.gin"
    ),
    "prepare kilt": Command(
        "commands.prepare", "prepare_kilt", "KILT's passages and queries", "runs/prepare_kilt.gin"
    ),
    "vocab": Command(
        "commands.vocab", "vocab", "train a vocabulary on a collection", "runs/vocab.gin"
    ),
    "tokenize": Command(
        "commands.tokenize",
        "tokenize",
        "run SeqIO tasks once into a token store",
        "runs/tokenize.gin",
    ),
    "import": Command(
        "commands.import_model", "import_model", "pretrained weights as a model", "runs/import.gin"
    ),
    "train": Command("commands.train", "train", "train a dual encoder", "runs/train.gin"),
    "compile": Command(
        "commands.compile",
        "compile_recipe",
        "compile a recipe of train for a TPU pod, without one",
        "runs/compile.gin",
        recipe="runs/taser_base.gin",
        flags={"--topology": "TOPOLOGY"},
    ),
    "encode": Command("commands.encode", "encode", "embed the passages", "runs/encode.gin"),
    "index": Command("commands.index", "index", "build an exact or ScaNN index", "runs/index.gin"),
    "search": Command(
        "commands.search", "search", "search queries into a run file", "runs/search.gin"
    ),
    "bm25": Command("commands.bm25", "bm25", "search queries with BM25", "runs/bm25.gin"),
    "hybrid": Command(
        "commands.hybrid", "hybrid", "fuse a dense and a BM25 run", "runs/hybrid.gin"
    ),
    "mine": Command("commands.mine", "mine", "mine hard negatives", "runs/mine.gin"),
    "evaluate": Command("commands.evaluate", "evaluate", "score a run file", "runs/evaluate.gin"),
    "analyze": Command(
        "commands.analyze", "analyze", "which parameters serve which task", "runs/analyze.gin"
    ),
    "ask": Command("commands.ask", "ask", "answer typed questions from an index", "runs/ask.gin"),
    "export": Command(
        "commands.export", "export_model", "a model in other libraries' formats", "runs/export.gin"
    ),
    "pipeline taser": Command(
        "workflows.taser",
        "pipeline_taser",
        "train, mine, retrain, evaluate",
        "runs/pipeline_taser.gin",
    ),
    "pipeline ance": Command(
        "workflows.ance",
        "pipeline_ance",
        "warm up, then mine and train in turns",
        "runs/pipeline_ance.gin",
    ),
    "quickstart": Command(
        "workflows.quickstart", "quickstart", "BM25, DPR and TASER on pydocs", "runs/quickstart.gin"
    ),
}


@dataclasses.dataclass(frozen=True)
class _Arguments:
    command: str
    flags: configuration.GinFlags
    dry_run: bool = False
    multihost: bool = False
    coordinator_timeout: int = hosts.COORDINATOR_TIMEOUT
    help: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with the status that `run` returns."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: Sequence[str]) -> int:
    """Runs one command.

    Returns:
        0 when it finished, 2 for a problem the user can mend, 75 when SIGTERM preempted it and
        the same command will go on. Anything else is a defect and raises.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logger.setLevel(logging.INFO)
    # Orbax warns of every checkpoint that has no metrics, which is as it should be.
    logging.getLogger("absl").setLevel(logging.ERROR)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        if not argv or argv[0] in ("--help", "-h", "help"):
            print(_overview())
            return 0
        arguments = parse(argv)
        command = COMMANDS[arguments.command]
        if arguments.multihost:
            if arguments.command.startswith(_ONE_HOST):
                raise ConfigError(
                    f"`taser {arguments.command}` runs on one host",
                    where="--multihost",
                    fix="leave it out",
                )
            hosts.initialize(timeout=arguments.coordinator_timeout)
        module = importlib.import_module(f"taser_jax.{command.module}")
        function = getattr(module, command.function)
        if arguments.help:
            print(_help(arguments.command, command, function))
            return 0
        return _execute(module, function, arguments)
    except TaserError as error:
        print(f"error{_this_host()}: {_message(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Preempted as error:
        told = f"preempted{_this_host()}: {_message(error)}; run the same command to go on"
        print(told, file=sys.stderr)
        return EXIT_PREEMPTED
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130


def _this_host() -> str:
    """Whose error it is, where several hosts write to one terminal."""
    return f" on host {hosts.joined_as()}" if hosts.joined_as() is not None else ""


def _message(error: Exception) -> str:
    """What the error says, without the configurables that Gin adds as if they were a traceback."""
    return str(error).split("\n  In call to configurable ")[0]


def _execute(module: Any, function: Callable[..., Any], arguments: _Arguments) -> int:
    has_dry_run = "dry_run" in inspect.signature(function).parameters
    try:
        if arguments.dry_run and not has_dry_run:
            raise ConfigError(
                f"`taser {arguments.command}` has no dry run",
                where="--dry_run",
                fix="leave it out",
            )
        resolved = configuration.resolve(
            function,
            configurables=module.CONFIGURABLES,
            flags=arguments.flags,
            allow_unset=arguments.dry_run,
        )
    except ConfigError as error:
        # The other hosts would wait for this one to tell how it was started. They are told that it
        # differs; here the error itself says more.
        if arguments.multihost:
            with contextlib.suppress(ConfigError):
                hosts.require_same(_start(arguments, f"error: {error}"))
        raise
    if arguments.multihost:
        hosts.require_same(_start(arguments, resolved.text))
    if resolved.unused:
        logger.info("not used by this command: %s", ", ".join(resolved.unused))
    if resolved.unset:
        logger.info("still to be set: %s", ", ".join(resolved.unset))
    keywords: dict[str, Any] = {"dry_run": arguments.dry_run} if has_dry_run else {}
    if "config_text" in inspect.signature(function).parameters:
        keywords["config_text"] = resolved.text
    resolved.function(**keywords)
    return 0


def _start(arguments: _Arguments, configuration_text: str) -> dict[str, str]:
    """What all hosts must have been started with."""
    return {
        "command": f"{arguments.command} {arguments.dry_run}",
        "configuration": configuration_text,
        "package version": f"taser_jax {__version__}, jax {jax.__version__}",
    }


def parse(argv: Sequence[str]) -> _Arguments:
    """Splits the command line into the command and its flags.

    Example:
        `["prepare", "dpr", "--gin.DATA_DIR=data"]` is the command "prepare dpr" with one binding.

    Raises:
        ConfigError: an unknown command or flag, with the nearest known one.
    """
    words = []
    for argument in argv:
        if argument.startswith("-"):
            break
        words.append(argument)
    name = " ".join(words)
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        raise ConfigError(
            f"no command {name!r}",
            expected=f"one of {', '.join(COMMANDS)}",
            fix=f"did you mean `taser {nearest[0]}`?" if nearest else "run `taser --help`",
        )
    command = COMMANDS[name]
    files: list[str] = []
    bindings: list[tuple[str, str]] = []
    paths: list[str] = []
    timeout = hosts.COORDINATOR_TIMEOUT
    switches = {"--dry_run": False, "--multihost": False, "--help": False, "-h": False}
    rest = iter(argv[len(words) :])
    for argument in rest:
        flag, equals, value = argument.partition("=")
        flag = flag.replace("--dry-run", "--dry_run")
        if flag in switches and not equals:
            switches[flag] = True
            continue
        known = flag in _VALUED or flag in command.flags
        if not known and not flag.startswith("--gin."):
            raise ConfigError(f"unknown flag {argument!r}", fix=f"see:\n{USAGE}")
        if not equals:
            value = next(rest, "")
        if not value:
            raise ConfigError(f"{flag} has no value", fix=f"write {flag}=VALUE")
        if flag == "--gin_file":
            files.append(value)
        elif flag == "--gin_search_paths":
            paths.extend(value.split(","))
        elif flag == "--coordinator_timeout":
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"{flag} is {value!r}", expected="seconds, a whole number")
            timeout = int(value)
        elif flag in command.flags:
            bindings.append((command.flags[flag], value))
        elif flag == "--gin_bindings":
            left, _, right = value.partition("=")
            bindings.append((left.strip(), right.strip()))
        else:
            bindings.append((flag.removeprefix("--gin."), value))
    return _Arguments(
        command=name,
        flags=configuration.GinFlags(
            files=command.gin_files(files),
            bindings=tuple(bindings),
            search_paths=tuple(paths),
        ),
        dry_run=switches["--dry_run"],
        multihost=switches["--multihost"],
        coordinator_timeout=timeout,
        help=switches["--help"] or switches["-h"],
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return USAGE + "\ncommands:\n" + "\n".join(lines)


def _help(name: str, command: Command, function: Callable[..., Any]) -> str:
    path = gin_directory() / command.gin_file
    own = [f"  {flag}=VALUE  sets {macro}\n" for flag, macro in command.flags.items()]
    reads = " and then ".join(command.gin_files())
    return (
        f"taser {name}: {command.summary}\n\n{inspect.getdoc(function)}\n\n{''.join(own)}"
        f"Without --gin_file it reads {reads}:\n\n{path.read_text(encoding='utf-8')}"
    )


if __name__ == "__main__":
    main()
