"""`taser <command>`: every command is one Gin-configurable function."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from taser_jax import __version__
from taser_jax.cli import configuration
from taser_jax.cli.command_line import Arguments, command_help, overview, parse
from taser_jax.cli.command_table import load
from taser_jax.cli.gin_files import show_gin
from taser_jax.storage import errors, progress, publishing
from taser_jax.storage.progress import logger

# Commands that do not coordinate hosts: each host would write the same files.
_ONE_HOST = (
    *("init", "prepare", "import", "ask", "serve", "export", "push", "verify"),
    *("compare", "pipeline moma", "quickstart", "compile", "plan"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with the status that `run` returns."""
    progress.outlive_terminal()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        status = run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        status = errors.EXIT_INTERRUPTED
    except Exception:
        if _this_host():
            traceback.print_exc()
            _leave(1)
        raise
    # Ctrl-C while Python ends would print a traceback that says nothing.
    signal.signal(signal.SIGINT, _end)
    _leave(status)
    if status == errors.EXIT_INTERRUPTED:
        # Threads that still compute would crash as Python ends.
        sys.stdout.flush()
        _end()
    sys.exit(status)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    """Ctrl-C: the first ends what is being done, one meanwhile the process."""
    signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = functools.partial(_interrupt_again, sys.unraisablehook)
    raise KeyboardInterrupt


def _interrupt_again(
    former: Callable[[sys.UnraisableHookArgs], object], lost: sys.UnraisableHookArgs
) -> None:
    """Where a finaliser or a callback of the garbage collector has swallowed the first, another."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        former(lost)
        return
    sys.unraisablehook = former
    signal.signal(signal.SIGINT, _interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def _end(*_: object) -> None:
    # What is left unfinished, the next command removes.
    os._exit(errors.EXIT_INTERRUPTED)


def run(argv: Sequence[str]) -> int:
    """Runs one command.

    Returns:
        0 when it finished, 2 for a problem the user can mend, 75 when SIGTERM preempted it and
        the same command will resume, 134 when another host is lost. Any other exception is a
        defect and propagates.
    """
    progress.set_up(verbose=not {"-v", "--verbose"}.isdisjoint(argv))
    try:
        if not argv or argv[0] in ("--help", "-h", "help"):
            print(overview())
            return 0
        if argv[0] == "--version":
            print(f"taser_jax {__version__}")
            return 0
        if argv[0] == "--show_gin":
            show_gin(*argv[1:2])
            return 0
        if argv[0] == "pipeline" and argv[1:] in (["--help"], ["-h"]):
            print(overview(argv[0]))
            return 0
        arguments = parse(argv)
        if arguments.help:
            print(command_help(arguments.command))
            return 0
        if arguments.multihost:
            if arguments.command.startswith(_ONE_HOST):
                raise errors.ConfigError(
                    f"`taser {arguments.command}` runs on one host",
                    where="--multihost",
                    fix="leave it out",
                )
            from taser_jax.devices import hosts

            hosts.initialize(timeout=arguments.coordinator_timeout)
        function = load(arguments.command)
        lost = hosts.naming_lost_hosts() if arguments.multihost else contextlib.nullcontext()
        # Commands name what they write; this is for the rest.
        rest = errors.storage_errors(f"taser {arguments.command}", doing="read or write")
        synced = publishing.syncing(not arguments.no_fsync)
        with synced, lost, rest:
            return _execute(function, arguments)
    except errors.TaserError as error:
        progress.say(f"error{_this_host()}: {_message(error)}")
        return errors.EXIT_USER_ERROR
    except errors.Preempted as error:
        progress.say(f"preempted{_this_host()}: {_message(error)}; rerun the command to resume")
        return errors.EXIT_PREEMPTED
    except errors.HostLostError as error:
        progress.say(
            f"error{_this_host()}: {_message(error)}\n"
            "  expected: all hosts to work until the command ends\n"
            "  fix: read what the other hosts said last; if one was lost or killed, rerun the "
            "command on all hosts to resume"
        )
        return errors.EXIT_HOST_LOST
    except KeyboardInterrupt as error:
        outcome = str(error) or "finished work is kept"
        progress.say(f"interrupted: {outcome}; rerun the command to resume")
        return errors.EXIT_INTERRUPTED


def _leave(status: int) -> None:
    hosts = sys.modules.get("taser_jax.devices.hosts")
    if hosts:
        hosts.leave(status)


def _this_host() -> str:
    """Names this host in messages, since several hosts may write to one terminal."""
    hosts = sys.modules.get("taser_jax.devices.hosts")
    host = hosts.joined_as() if hosts else None
    return "" if host is None else f" on host {host}"


def _message(error: Exception) -> str:
    """The error's message, without the list of configurables that Gin appends."""
    return str(error).split("\n  In call to configurable ")[0]


def _execute(function: Callable[..., object], arguments: Arguments) -> int:
    parameters = inspect.signature(function).parameters
    has_dry_run = "dry_run" in parameters
    try:
        if arguments.dry_run and not has_dry_run:
            raise errors.ConfigError(
                f"`taser {arguments.command}` has no dry run", where="--dry_run", fix="leave it out"
            )
        resolved = configuration.resolve_command(
            arguments.command, arguments.flags, allow_unset=arguments.dry_run
        )
    except errors.ConfigError as error:
        # The other hosts wait for this one's command line. They learn that it differs; here the
        # error itself says more.
        if arguments.multihost:
            with contextlib.suppress(errors.ConfigError):
                _require_same_start(arguments, f"error: {error}")
        raise
    if arguments.multihost:
        _require_same_start(arguments, resolved.text)
    if resolved.unused:
        logger.info("not used by this command: %s", ", ".join(resolved.unused))
    if resolved.unset:
        logger.info("still to be set: %s", ", ".join(resolved.unset))
    keywords: dict[str, Any] = {"dry_run": arguments.dry_run} if has_dry_run else {}
    if "config_text" in parameters:
        keywords["config_text"] = resolved.text
    resolved.function(**keywords)
    return 0


def _require_same_start(arguments: Arguments, configuration_text: str) -> None:
    """Checks that all hosts run the same command with the same configuration and versions."""
    from taser_jax.devices import hosts

    jax_version = importlib.metadata.version("jax")
    hosts.require_same(
        {
            "command": f"{arguments.command} {arguments.dry_run}",
            "configuration": configuration_text,
            "package version": f"taser_jax {__version__}, jax {jax_version}",
        }
    )


if __name__ == "__main__":
    main()
