"""Command lines of the launchers, parsed as their usage texts say."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from _usage import USAGE

MAY_BE_ZERO = ("retries",)


class LaunchError(Exception):
    """A problem to fix before anything runs: what was found and, in a second line, the fix."""


class UsageError(LaunchError):
    """A command line that cannot be."""


def options_of(usage: str) -> dict[str, tuple[str, str]]:
    """Name -> (what stands for its value, its text) of each option of a usage text.

    Example:
        "  --retries=N   new attempts (100)" has {"retries": ("N", "new attempts (100)")}.
    """
    options: dict[str, tuple[str, str]] = {}
    name = ""
    for line in usage.split("\n"):
        option = re.match(r"  --(\w+)(?:[= ](\S+))?(?:  +(.*))?$", line)
        if option:
            name = option[1]
            options[name] = (option[2] or "", option[3] or "")
        elif name and line.startswith(" " * 20):
            value, text = options[name]
            options[name] = (value, f"{text} {line.strip()}")
        else:
            name = ""
    return options


def parse(launcher: str, words: Sequence[str]) -> argparse.Namespace:
    """Options by name; `command` holds the words after `--`.

    Raises:
        UsageError: an option is unknown or has a value that cannot be.
        SystemExit: --help.
    """
    options = options_of(USAGE[launcher])
    values: dict[str, Any] = {name: _default(*option) for name, option in options.items()}
    values["command"] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word[2:].partition("=")
        if word in ("-h", "--help"):
            print(USAGE[launcher])
            raise SystemExit(0)
        if word == "--":
            values["command"], rest = rest, []
            continue
        if not word.startswith("--"):
            raise UsageError(f"unexpected argument '{word}'; put the command to run after --")
        takes, text = options.get(name, ("", ""))
        if name not in options or (equals and takes in ("", "FLAGS...")):
            raise UsageError(f"unknown option {word}")
        if takes == "FLAGS...":
            while rest and rest[0] != "--":
                values[name].append(rest.pop(0))
        elif takes:
            if not equals and rest and not rest[0].startswith("--"):
                equals, value = "=", rest.pop(0)
            if not value:
                lack = "has no value" if equals else f"needs a value: --{name}=..."
                raise UsageError(f"--{name} {lack}")
            if takes == "N":
                values[name] = _number(name, value)
            elif "may be repeated" in text:
                values[name].append(value)
            else:
                values[name] = value
        else:
            values[name] = True
    return argparse.Namespace(**values)


def _default(takes: str, text: str) -> object:
    if "may be repeated" in text or takes == "FLAGS...":
        return []
    number = re.search(r"\((\d+)\)$", text)
    return int(number[1]) if takes == "N" and number else ""


def _number(name: str, value: str) -> int:
    least = 0 if name in MAY_BE_ZERO else 1
    if not re.fullmatch(r"0|[1-9][0-9]*", value) or int(value) < least:
        raise UsageError(f"--{name} is '{value}', expected a number of at least {least}")
    return int(value)


def require(options: argparse.Namespace, *names: str) -> None:
    """Requires options that have no default."""
    for name in names:
        if not getattr(options, name):
            raise UsageError(f"--{name} is missing")


def require_program(options: argparse.Namespace, program: str, fix: str) -> None:
    """Requires a program, unless nothing is run."""
    if not options.dry_run and shutil.which(program) is None:
        raise LaunchError(f"{program} is not on the PATH\n  fix: {fix}")


def check_command(command: Sequence[str]) -> None:
    """Requires a taser command without --multihost, which launchers add."""
    if not command:
        raise UsageError("no command; for example: -- train --gin_file=runs/taser_base.gin")
    if "--multihost" in command:
        raise UsageError("leave out --multihost; it is added")


def warn_of_lost_results(command: Sequence[str]) -> None:
    """For launchers whose hosts share nothing but a bucket."""
    for word in command:
        if word.startswith("--gin.MODEL_DIR=") and not word.startswith("--gin.MODEL_DIR=gs://"):
            print(
                f"warning: {word} is on each host's own disk and is lost with the host; use gs://",
                file=sys.stderr,
            )


def with_mesh_replica(command: list[str], slices: int) -> list[str]:
    """Makes several slices replicas of the mesh, unless the command sets another axis."""
    given = re.search("MESH_REPLICA|across_slices", " ".join(command))
    if slices > 1 and command[0] == "train" and not given:
        return [*command, f"--gin.MESH_REPLICA={slices}"]
    return command


def environment(settings: Sequence[str]) -> list[str]:
    """Assignments of --env: NAME=VALUE, or NAME for its value on this machine.

    Example:
        ["A=1", "HOME"] is ["A=1", "HOME=/root"].
    """
    assignments = []
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UsageError(f"--env is '{setting}', expected NAME=VALUE or NAME")
        if not equals and name not in os.environ:
            raise UsageError(f"--env={name}: no such variable here; give --env={name}=VALUE")
        assignments.append(f"{name}={value if equals else os.environ[name]}")
    return assignments


def positive(options: argparse.Namespace, name: str) -> float | None:
    """The number of an option that may have decimals; None: not given."""
    text = getattr(options, name)
    if text and (not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0):
        raise UsageError(f"--{name} is '{text}', expected a positive number, for example 12.5")
    return float(text) if text else None
