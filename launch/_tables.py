"""What the launchers know: TPUs, prices, states and errors of Google Cloud, and their own options.

Sources, read in November 2026: cloud.google.com/tpu/docs/runtimes (runtimes for JAX), .../docs/v4
and .../docs/v5p (types count TensorCores), .../docs/v5e and .../docs/v6e (types count chips),
.../docs/quota. TPU7x: "you must use Google Kubernetes Engine", .../docs/queued-resources.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

FINISHED, MEND, TIMED_OUT, AGAIN = 0, 2, 124, 75


class LaunchError(Exception):
    """The end of an attempt, or of the launcher: what was found and, in a second line, the fix.

    Args:
        text: both.
        status: AGAIN if a later attempt may succeed; any other is the launcher's exit status.
    """

    def __init__(self, text: str, status: int = MEND) -> None:
        super().__init__(text)
        self.status = status


class Kind(NamedTuple):
    """A kind of TPU.

    Attributes:
        cores: TensorCores of a chip, where types count these; otherwise 1.
        runtime: the version of a new TPU VM.
        price: US dollars for a chip and an hour on demand; None: no source gives one.
    """

    cores: int
    runtime: str
    price: float | None = None


# Prices: Austin et al., "How to Scale Your Model", jax-ml.github.io/scaling-book/applied-inference,
# which has them from Google's list. It has none of the other kinds.
PRICES_OF = "February 2025"
KINDS = {
    **dict.fromkeys(["v2", "v3", "v4"], Kind(2, "tpu-ubuntu2204-base")),
    "v5p": Kind(2, "v2-alpha-tpuv5", price=4.20),
    "v5litepod": Kind(1, "v2-alpha-tpuv5-lite", price=1.20),
    "v6e": Kind(1, "v2-alpha-tpuv6e"),
}

# What a launcher does about a state. It deletes what FAILED, and the error decides; it stops where
# it is to LEAVE something alone.
Move = enum.Enum("Move", "RUN WAIT CREATE REPLACE FAILED LEAVE")
BILLED, FREE = " and billed until you delete it", ", not billed"
# States of TPU VMs and of queued resources: what to do about them, and whether they cost money.
STATES = {
    **dict.fromkeys(["READY", "ACTIVE"], (Move.RUN, BILLED)),
    "ABSENT": (Move.CREATE, FREE),
    **dict.fromkeys(["PREEMPTED", "TERMINATED", "SUSPENDED"], (Move.REPLACE, FREE)),
    "FAILED": (Move.FAILED, FREE),
    "STOPPED": (Move.LEAVE, ", only its disks are billed"),
    **dict.fromkeys(["CREATING", "STARTING", "RESTARTING", "REIMAGING"], (Move.WAIT, BILLED)),
    **dict.fromkeys(["REPAIRING", "MAINTENANCE", "STOPPING", "DELETING"], (Move.WAIT, BILLED)),
    **dict.fromkeys(["HIDING", "UNHIDING"], (Move.WAIT, BILLED)),
}
# Errors that Google Cloud reports: what its report holds as words of their own, what they mean, and
# whether a later attempt may succeed. The first that fits counts: reports of quotas also say
# RESOURCE_EXHAUSTED, or code 8. The last one fits all.
ERRORS = (
    (r"per (?:minute|second)|rateLimitExceeded|RATE_LIMIT\w*", "too many requests", AGAIN),
    (r"(?:Quota(?: limit)? '[^']+' (?:has been )?(?:exceeded|exhausted)|[Qq]uota exceeded"
     r"|[Ii]nsufficient (?:\w+ )*quota|QUOTA_EXCEEDED|IN_USE_ADDRESSES)[^\n]*",
     "the project's quota is too small: {words}\n  fix: ask for more of it, or take another "
     "--zone, --type or price; --spot has its own, --internal_ip needs no address", MEND),
    (r"RESOURCE_EXHAUSTED|[Nn]o more capacity|[Ii]nsufficient (?:\w+ )?capacity|STOCKOUT"
     r"|\"code\": 8", "no capacity", AGAIN),
    (r"UNAVAILABLE|INTERNAL|[Ii]nternal error|DEADLINE_EXCEEDED|ABORTED|\"code\": (?:4|10|13|14)"
     r"|(?:[A-Za-z]*(?:[Cc]ode|[Ss]tatus|[Ee]rror)|HTTP)[\"=: (]*(?:429|50[0234])|timed out"
     r"|[Cc]onnection (?:reset|refused|aborted)|name resolution", "Google Cloud did not answer",
     AGAIN),
    (r"\w*", "gcloud refused: see its message above, fix it and start again\n  types of this zone: "
     "gcloud compute tpus tpu-vm accelerator-types list --zone={zone}; runtimes: versions list",
     MEND),
)  # fmt: skip


def refusal(report: str, zone: str, about: str = "") -> LaunchError:
    """What an error that Google Cloud reports means for an attempt.

    Example:
        After "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8" somebody must act.
    """
    rows = ((re.findall(rf"(?<!\w)(?:{row[0]})(?!\w)", report), *row[1:]) for row in ERRORS)
    words, meaning, status = next(row for row in rows if row[0])
    text = meaning.format(words=words[0].strip(' "'), zone=zone)
    return LaunchError(about + text, status)


def kind_of(type_: str) -> tuple[Kind | None, int]:
    """The row of a type and the chips of a slice; None and 0 where they are not known.

    Example:
        A slice of v4-32 has 16 chips.
    """
    name, _, size = type_.rpartition("-")
    kind = KINDS.get(name)
    return kind, int(size) // kind.cores if kind and size.isdecimal() else 0


def hourly_price(options: argparse.Namespace, is_on_demand: bool) -> tuple[float | None, str]:
    """US dollars for an hour of all slices, and how they are known; None: they are not.

    Example:
        One slice of v5litepod-16 costs 16 x 1.20 = 19.20 dollars on demand.
    """
    if options.price_per_hour:
        return options.price_per_hour, f"${options.price_per_hour:.2f} an hour, as you say"
    kind, chips = kind_of(options.type or "")
    if not (kind and kind.price and chips):
        return None, f"not known for {options.type}; give --price_per_hour=DOLLARS"
    total = kind.price * chips * (options.slices or 1)
    # The list has no other class; spot costs less, by zone and day.
    return total if is_on_demand else None, (
        f"about ${total:.2f} an hour on demand, by the list price of {PRICES_OF} "
        f"(${kind.price:.2f} a chip); --price_per_hour replaces it"
    )


def _variable(setting: str) -> str:
    """NAME=VALUE, or NAME for its value on this machine.

    Example:
        "HOME" is "HOME=/root".
    """
    name, equals, _ = setting.partition("=")
    if not (equals or name in os.environ):
        raise argparse.ArgumentTypeError(f"no such variable here; give --env={name}=VALUE")
    return setting if equals else f"{name}={os.environ[name]}"


TEXT: dict[str, Any] = {}
FLAG: dict[str, Any] = {"action": "store_true"}
COUNT: dict[str, Any] = {"type": int}
NUMBER: dict[str, Any] = {"type": float}
REST: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
# `hosts.sh` has no name to attach to.
ATTACH: dict[str, Any] = {"nargs": "?", "const": True}
DELETE: dict[str, Any] = {"choices": ("success", "always", "never")}
VARIABLES: dict[str, Any] = {"type": _variable, "action": "append", "default": []}
# Name -> (what argparse needs, its help).
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "name": (TEXT, "the TPU VM or queued resource; its slices are NAME-0, NAME-1, ..."),
    "attach": (ATTACH, "follow what runs there: it goes on while no launcher is connected"),
    "zone": (TEXT, "its zone"),
    "project": (TEXT, "its project (gcloud's own setting)"),
    "type": (TEXT, "of one slice, such as v4-32; tpu_vm.sh creates a TPU only if given"),
    "slices": (COUNT, "number of slices"),
    "max_run_duration": (TEXT, "flex-start: waits for capacity, and ends after, say, 10h"),
    "delete": (DELETE, "success, always (after failures, too) or never; see docs/pods.md"),
    "data": (TEXT, "gs://... or a shared directory, copied to the folder `data` of hosts"),
    "setup": (TEXT, "shell command for each host before the run, such as a mount"),
    "skip_install": (FLAG, "use the checkout that hosts have already, in ~/taser_jax"),
    "env": (VARIABLES, "a variable for taser (by default as here); repeatable"),
    "max_hours": (NUMBER, "after which the run and the launcher's TPU end (status 124)"),
    "retries": (COUNT | {"default": 100}, "after a preemption, or without capacity (100)"),
    "retry_seconds": (COUNT | {"default": 60}, "pause before each, and between two looks (60)"),
    "dry_run": (FLAG, "print the plan and the commands, run nothing"),
    "internal_ip": (FLAG, "no external addresses; installing needs Cloud NAT"),
    "iap": (FLAG, "ssh through Identity-Aware Proxy"),
    "price_per_hour": (NUMBER, "what all chips cost, if you know better than the table"),
    "version": (TEXT, "of a new TPU's runtime (by its type, as launch/_tables.py says)"),
    "spot": (FLAG, "cheaper; may be preempted at any time"),
    "reserved": (FLAG, "uses the project's reservations"),
    "reservation": (TEXT, "uses this reservation"),
    "labels": (TEXT, "of a new TPU"),
    "gcloud": (REST, "flags for gcloud's create command, up to --, such as --network=N"),
    "hosts": (TEXT, "names for ssh; the first is host 0, which the others reach"),
    "port": (COUNT | {"default": 8476}, "port of host 0 for JAX's coordinator (8476)"),
    "extra": (TEXT, "of the package to install, such as cuda (none)"),
    "nodes": (COUNT, "number of nodes; inside an allocation those of this step"),
    "slurm": (REST, "flags for srun, up to --"),
    "cluster": (TEXT, "made by `xpk cluster create`"),
    "workload": (TEXT, "new for each run"),
    "image": (TEXT, "built from this checkout and pushed; pods get it by its digest"),
    "skip_build": (FLAG, "use the image that is in the registry: IMAGE@sha256:..."),
    "grace_seconds": (COUNT | {"default": 300}, "between SIGTERM and the end of a pod (300)"),
    "xpk": (REST, "flags for `xpk workload create`, up to --"),
}  # fmt: skip
OF_NEW_TPUS = ("version", "spot", "reserved", "reservation", "labels", "gcloud")
NOT_GIVEN: Any = None
# Options that several launchers have.
ONCE = "env retries dry_run"
ALL = "env retries retry_seconds dry_run"
ON_HOSTS = f"attach data setup skip_install max_hours {ALL}"
ON_TPUS = f"project delete {ON_HOSTS} internal_ip iap price_per_hour {' '.join(OF_NEW_TPUS)}"
ON_GKE = f"slices zone project data max_hours price_per_hour skip_build grace_seconds xpk {ONCE}"


def parse(launcher: Any, script: str, words: Sequence[str]) -> None:
    """Gives a launcher its options, `command`, the words after the first `--`, and `refuse`.

    Raises:
        SystemExit: --help, or an option is unknown, is missing, or has a value that cannot be.
    """
    needed = launcher.needed.split()
    usage = " ".join([script, *(f"--{name}=..." for name in needed)])
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{usage} [options] -- COMMAND [FLAGS...]",
        description=inspect.cleandoc(launcher.__doc__),
        epilog="COMMAND is a taser command; the launcher adds --multihost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    launcher.refuse = parser.error
    for name in (*needed, *launcher.others.split()):
        kind, text = OPTIONS[name]
        parser.add_argument(f"--{name}", help=text, **kind)
    end = words.index("--") if "--" in words else len(words)
    parser.parse_args(words[:end], launcher)
    command = launcher.command = list(words[end + 1 :])
    for name, value in vars(launcher).items():
        if type(value) in (int, float) and not value > 0 and (name, value) != ("retries", 0):
            parser.error(f"--{name}: {value:g}, expected a positive number")
    if launcher.attach:
        launcher.retries = 0
        launcher.name = launcher.name if launcher.attach is True else launcher.attach
    for name in needed:
        if not getattr(launcher, name) and not (launcher.attach and name == "type"):
            parser.error(f"--{name} is missing")
    if bool(launcher.attach) == bool(command):
        parser.error("give a command, such as -- train --gin_file=runs/taser_base.gin, or --attach")
    if "--multihost" in command:
        parser.error("leave out --multihost; it is added")
    # Slices are replicas of the mesh, unless the command says otherwise.
    if launcher.slices > 1 and command[:1] == ["train"] and "MESH_REPLICA" not in " ".join(command):
        command.append(f"--gin.MESH_REPLICA={launcher.slices}")
    if launcher.dry_run:
        # Secrets are not shown.
        launcher.env = [f"{setting.partition('=')[0]}=..." for setting in launcher.env]


def warn(text: str) -> None:
    """Prints a warning."""
    print(f"warning: {text}", file=sys.stderr)


def flags(options: argparse.Namespace, *names: str) -> list[str]:
    """Options as the flags of another program.

    Example:
        With --max_run_duration=4h, "max_run_duration" is ["--max-run-duration=4h"].
    """
    values = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    return [flag if value is True else f"{flag}={value}" for flag, value in values.items() if value]
