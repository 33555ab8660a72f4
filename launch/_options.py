"""Command lines of the launchers: which options each has, and what fits together."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class LaunchError(Exception):
    """A problem to fix before anything runs: what was found and, in a second line, the fix."""


class UsageError(LaunchError):
    """A command line that cannot be."""


def _text(value: str) -> str:
    if not value:
        raise argparse.ArgumentTypeError("has no value")
    return value


def _count(value: str, least: int) -> int:
    if not re.fullmatch("0|[1-9][0-9]*", value) or int(value) < least:
        raise argparse.ArgumentTypeError(f"'{value}', expected a number of at least {least}")
    return int(value)


def _amount(value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", value) or float(value) == 0:
        raise argparse.ArgumentTypeError(f"'{value}', expected a positive number, such as 12.5")
    return float(value)


TEXT: dict[str, Any] = {"type": _text}
LIST: dict[str, Any] = {"type": _text, "action": "append", "default": []}
FLAG: dict[str, Any] = {"action": "store_true"}
REST: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
COUNT: dict[str, Any] = {"type": functools.partial(_count, least=1), "default": 0}
AMOUNT: dict[str, Any] = {"type": _amount}
# Name -> (what stands for its value, what it is, its help).
OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "name": ("NAME", TEXT, "the TPU VM or queued resource; its slices are NAME-0, NAME-1, ..."),
    "attach": ("NAME", TEXT, "follow what runs there: it goes on while no launcher is connected"),
    "zone": ("ZONE", TEXT, "its zone"),
    "project": ("PROJECT", TEXT, "its project (gcloud's own setting)"),
    "type": ("TYPE", TEXT, "type of one slice, such as v4-32, v5litepod-64 or, on GKE, tpu7x-8; "
             "tpu_vm.sh creates a TPU that does not exist only if it is given"),
    "slices": ("N", COUNT, "number of slices"),
    "max_run_duration": ("TIME", TEXT, "flex-start: waits for capacity, and ends after this time, "
                         "for example 10h"),
    "delete": ("WHEN", TEXT, "when to delete a TPU that the launcher created: success (after the "
               "command has finished), always (also after a failure and Ctrl-C) or never. Default: "
               "success if all that the command writes, the MODEL_DIR of `train`, goes to a bucket "
               "and is there at the end, otherwise never"),
    "data": ("PLACE", TEXT, "gs://... or a shared directory, copied to the folder `data` of each "
             "host before the first step: --gin.TOKEN_STORE=data"),
    "setup": ("COMMAND", TEXT, "shell command for each host before the run, such as a mount"),
    "skip_install": ("", FLAG, "use the checkout that hosts have already, in ~/taser_jax"),
    "env": ("NAME[=VALUE]", LIST, "a variable for taser on each host; without VALUE, its value "
            "here; may be repeated"),
    "max_hours": ("HOURS", AMOUNT, "end the run after this time, with a TPU that the launcher "
                  "created unless --delete=never; the exit status is 124"),
    "retries": ("N", {**COUNT, "type": functools.partial(_count, least=0), "default": 100},
                "new attempts after a preemption or a lost host, or without capacity (100)"),
    "retry_seconds": ("N", {**COUNT, "default": 60}, "pause before each, and between checks of "
                      "what is starting (60)"),
    "dry_run": ("", FLAG, "print the plan and the commands, run nothing"),
    "internal_ip": ("", FLAG, "no external addresses; installing needs Cloud NAT"),
    "iap": ("", FLAG, "ssh through Identity-Aware Proxy"),
    "price_per_hour": ("DOLLARS", AMOUNT, "what all chips cost, if you know better than the table"),
    "version": ("VERSION", TEXT, "of a new TPU's runtime (by its type, as launch/_tables.py says)"),
    "spot": ("", FLAG, "cheaper; may be preempted at any time"),
    "reserved": ("", FLAG, "uses the project's reservations"),
    "reservation": ("NAME", TEXT, "uses this reservation"),
    "network": ("NETWORK", TEXT, "of a new TPU, with --subnetwork"),
    "subnetwork": ("SUBNETWORK", TEXT, "of a new TPU"),
    "service_account": ("EMAIL", TEXT, "account of the hosts, for example to read a bucket"),
    "labels": ("KEY=VALUE,...", TEXT, "of a new TPU"),
    "data_disk": ("source=DISK,mode=read-only", LIST, "attached, not mounted; may be repeated"),
    "gcloud": ("FLAGS", REST, "flags for gcloud's create command, up to --"),
    "hosts": ("HOST,...", TEXT, "names for ssh; the first is host 0, which the others reach"),
    "port": ("N", {**COUNT, "default": 8476}, "port of host 0 for JAX's coordinator (8476)"),
    "extra": ("EXTRA", TEXT, "the package's extra to install: cuda or tpu (none)"),
    "nodes": ("N", COUNT, "number of nodes; inside an allocation those of this step"),
    "slurm": ("FLAGS", REST, "flags for srun, up to --"),
    "cluster": ("CLUSTER", TEXT, "made by `xpk cluster create`"),
    "workload": ("NAME", TEXT, "up to 40 lower-case letters, digits and dashes; new for each run"),
    "image": ("IMAGE", TEXT, "built from this checkout and pushed; pods get it by its digest"),
    "skip_build": ("", FLAG, "use the image that is in the registry: IMAGE@sha256:..."),
    "grace_seconds": ("N", {**COUNT, "default": 300}, "between SIGTERM and the end of a pod (300)"),
    "xpk": ("FLAGS", REST, "flags for `xpk workload create`, up to --"),
}  # fmt: skip


OF_NEW_TPUS = (
    *("version", "spot", "reserved", "reservation", "network", "subnetwork", "service_account"),
    *("labels", "data_disk", "gcloud"),
)
_RETRIES = ("retries", "retry_seconds", "dry_run")
_ON_HOSTS = ("data", "setup", "skip_install", "env", "max_hours", *_RETRIES)
_ON_TPU = (
    *("project", "delete", *_ON_HOSTS, "internal_ip", "iap", "price_per_hour"),
    *OF_NEW_TPUS,
)
# Name -> (options that each run needs, all options).
LAUNCHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tpu_vm": ("--name=NAME --zone=ZONE", ("name", "attach", "zone", "type", *_ON_TPU)),
    "tpu_multislice": (
        "--name=NAME --zone=ZONE --type=TYPE --slices=N",
        ("name", "attach", "zone", "type", "slices", "max_run_duration", *_ON_TPU),
    ),
    "hosts": ("--hosts=HOST,HOST,...", ("hosts", "attach", "port", "extra", *_ON_HOSTS)),
    "slurm": ("--nodes=N", ("nodes", "env", *_RETRIES, "slurm")),
    "gke_xpk": (
        "--cluster=CLUSTER --workload=NAME --type=TYPE --image=IMAGE",
        (
            *("cluster", "workload", "type", "image", "skip_build", "slices", "zone", "project"),
            *("data", "env", "max_hours", "price_per_hour", "retries", "grace_seconds", "dry_run"),
            "xpk",
        ),
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parser_of(launcher: str, about: str) -> argparse.ArgumentParser:
    """The parser of a launcher's options, of what stands before `--`."""
    needed, names = LAUNCHERS[launcher]
    parser = _Parser(
        usage=f"launch/{launcher}.sh {needed} [options] -- COMMAND [FLAGS...]",
        description=about,
        epilog="COMMAND is a taser command; the launcher adds --multihost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name in names:
        value, kind, text = OPTIONS[name]
        # Hosts have names of their own: there is none to attach to.
        kind = FLAG if (launcher, name) == ("hosts", "attach") else kind
        shown = {} if kind is FLAG else {"metavar": value}
        parser.add_argument(f"--{name}", help=text, **kind, **shown)
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Options by name; `command` holds the words after the first `--`.

    Raises:
        UsageError: an option is unknown, is missing, or has a value that cannot be.
        SystemExit: --help.
    """
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    for word in unknown:
        if word.startswith("-"):
            raise UsageError(f"unknown option {word}")
        raise UsageError(f"unexpected argument '{word}'; put the command to run after --")
    options.command = list(words[end + 1 :])
    return options


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
    given = "MESH_REPLICA" in " ".join(command)
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
