"""What the launchers know: TPUs, prices, states and errors of Google Cloud, and their own options.

Sources, read in November 2026: cloud.google.com/tpu/docs/runtimes (runtimes for JAX), .../docs/v4
and .../docs/v5p (types count TensorCores), .../docs/v5e and .../docs/v6e (types count chips),
.../docs/quota. TPU7x: "you must use Google Kubernetes Engine", .../docs/queued-resources.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

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


class UsageError(LaunchError):
    """A command line that cannot be."""


class Kind(NamedTuple):
    """A kind of TPU.

    Attributes:
        cores: TensorCores of a chip, where types count these; otherwise 1.
        runtime: the version of a new TPU VM.
        quota: how its quotas' names begin.
        price: US dollars for a chip and an hour on demand; None: no source gives one.
    """

    cores: int
    runtime: str | None
    quota: str
    price: float | None = None


# Prices: Austin et al., "How to Scale Your Model", jax-ml.github.io/scaling-book/applied-inference,
# which has them from Google's list. It has none of the other kinds.
PRICES_OF = "February 2025"
KINDS = {
    "v2": Kind(2, "tpu-ubuntu2204-base", "TPUV2"),
    "v3": Kind(2, "tpu-ubuntu2204-base", "TPUV3"),
    "v4": Kind(2, "tpu-ubuntu2204-base", "TPUV4"),
    "v5p": Kind(2, "v2-alpha-tpuv5", "TPUV5P", price=4.20),
    "v5litepod": Kind(1, "v2-alpha-tpuv5-lite", "TPUV5sLitepod", price=1.20),
    "v6e": Kind(1, "v2-alpha-tpuv6e", "TPUV6E"),
}
# Options that choose another class of prices.
ON_DEMAND = "on demand"
PRICE_CLASSES = {
    "spot": "spot: may be preempted at any time",
    "reserved": "reserved",
    "reservation": "reserved: {reservation}",
    "max_run_duration": "flex-start: each attempt is ended after {max_run_duration}",
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
# RESOURCE_EXHAUSTED, or code 8.
ERRORS = (
    (r"per (?:minute|second)|rateLimitExceeded|RATE_LIMIT\w*", "too many requests", AGAIN),
    (
        r"(?:Quota(?: limit)? '[^']+' (?:has been )?(?:exceeded|exhausted)|[Qq]uota exceeded"
        r"|[Ii]nsufficient (?:\w+ )*quota|QUOTA_EXCEEDED|IN_USE_ADDRESSES)[^\n]*",
        "the project's quota is too small: {words}\n  fix: ask for more of it, or take another "
        "--zone, --type or price; --spot has its own, --internal_ip needs no address",
        MEND,
    ),
    (
        r"RESOURCE_EXHAUSTED|[Nn]o more capacity|[Ii]nsufficient (?:\w+ )?capacity|STOCKOUT"
        r"|\"code\": 8",
        "no capacity",
        AGAIN,
    ),
    (
        r"UNAVAILABLE|INTERNAL|[Ii]nternal error|DEADLINE_EXCEEDED|ABORTED"
        r"|\"code\": (?:4|10|13|14)"
        r"|(?:[A-Za-z]*(?:[Cc]ode|[Ss]tatus|[Ee]rror)|HTTP)[\"=: (]*(?:429|50[0234])"
        r"|timed out|[Cc]onnection (?:reset|refused|aborted)|name resolution",
        "Google Cloud did not answer",
        AGAIN,
    ),
)


def refusal(report: str, zone: str, about: str = "") -> LaunchError:
    """What an error that Google Cloud reports means for an attempt.

    Example:
        After "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8" somebody must act.
    """
    for pattern, meaning, status in ERRORS:
        words = re.search(rf"(?<!\w)(?:{pattern})(?!\w)", report)
        if words:
            return LaunchError(about + meaning.format(words=words.group().strip(' "')), status)
    types = f"gcloud compute tpus tpu-vm accelerator-types list --zone={zone}"
    return LaunchError(
        f"{about}gcloud refused: see its message above, fix it and start again\n"
        f"  types of this zone: {types}; runtimes: versions list"
    )


def kind_of(type_: str, version: str | None) -> Kind:
    """The row of a type.

    Raises:
        UsageError: a TPU VM of this type cannot be, or has no known runtime and is given none.
    """
    kind, _, size = type_.rpartition("-")
    row = KINDS.get(kind, Kind(1, version, "TPU"))
    if kind in ("tpu7x", "v7x"):
        wrong = ": there are no TPU VMs of TPU7x; use launch/gke_xpk.sh"
    elif not re.fullmatch("[a-z0-9]+-[1-9][0-9]*", type_):
        wrong = ", expected KIND-SIZE, for example v5litepod-16"
    elif not row.runtime:
        names = " ".join(f"{name}-N" for name in KINDS)
        wrong = f"; known are {names}. For another, give --version=RUNTIME"
    elif int(size) % row.cores:
        wrong = f", expected an even number of cores: {kind} has two to a chip"
    else:
        return row
    raise UsageError(f"--type is '{type_}'{wrong}")


def hourly_price(options: argparse.Namespace, price_class: str) -> tuple[float | None, str]:
    """US dollars for an hour of all slices, and how they are known; None: they are not.

    Example:
        One slice of v5litepod-16 costs 16 x 1.20 = 19.20 dollars on demand.
    """
    given, (kind, _, size) = options.price_per_hour, (options.type or "").rpartition("-")
    if given:
        return given, f"${given:.2f} an hour, as you say"
    price = KINDS[kind].price if kind in KINDS else None
    if price is None or not size.isdecimal():
        return None, f"not known for {kind}; give --price_per_hour=DOLLARS"
    total = price * int(size) / KINDS[kind].cores * (options.slices or 1)
    # The list has no other class; spot costs less, by zone and day.
    return total if price_class == ON_DEMAND else None, (
        f"about ${total:.2f} an hour on demand, by the list price of {PRICES_OF} "
        f"(${price:.2f} a chip); --price_per_hour replaces it"
    )


def _checked(pattern: str, expected: str, make: Callable[[str], Any] = str) -> dict[str, Any]:
    """An option with a value that fits a pattern."""

    def read(value: str) -> Any:
        if not re.fullmatch(pattern, value):
            raise argparse.ArgumentTypeError(f"'{value}', expected {expected}")
        return make(value)

    return {"type": read}


def _variable(setting: str) -> str:
    """NAME=VALUE, or NAME for its value on this machine.

    Example:
        "HOME" is "HOME=/root".
    """
    name, equals, _ = setting.partition("=")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"no such variable here; give --env={name}=VALUE")
    return setting if equals else f"{name}={os.environ[name]}"


def _count(default: int, least: int = 1) -> dict[str, Any]:
    pattern = "[1-9][0-9]*" if least else "0|[1-9][0-9]*"
    return {**_checked(pattern, f"a number of at least {least}", int), "default": default}


TEXT = _checked("(?s).+", "a value")
AMOUNT = _checked(r"(?=.*[1-9])\d+(\.\d+)?", "a positive number, such as 12.5", float)
FLAG: dict[str, Any] = {"action": "store_true", "default": False}
MANY: dict[str, Any] = {"action": "append", "default": []}
REST: dict[str, Any] = {"nargs": argparse.REMAINDER, "default": []}
# "KEY=VALUE" of letters that Google Cloud allows.
_LABEL = "[a-z][-a-z0-9_]{0,62}=[-a-z0-9_]{0,63}"
LABELS = _checked(
    f"{_LABEL}(,{_LABEL})*",
    "KEY=VALUE,... of lower-case letters, digits, - and _, each key from a letter on",
)
DELETE = _checked("always|success|never", "always, success or never")
VARIABLES = {**_checked(r"(?s)[A-Za-z_]\w*(=.*)?", "NAME=VALUE or NAME", _variable), **MANY}
HOSTS = _checked(r"[^,\s]+(,[^,\s]+)*", "names with commas between them")
# xpk refuses longer names, but only after the image has been built.
WORKLOAD = _checked(
    "[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?", "up to 40 lower-case letters, digits and dashes"
)
# Name -> (what it is, what stands for its value, its help).
OPTIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "name": (TEXT, "NAME", "the TPU VM or queued resource; its slices are NAME-0, NAME-1, ..."),
    "attach": (TEXT, "NAME", "follow what runs there: it goes on while no launcher is connected"),
    "zone": (TEXT, "ZONE", "its zone"),
    "project": (TEXT, "PROJECT", "its project (gcloud's own setting)"),
    "type": (TEXT, "TYPE", "of one slice, such as v4-32; tpu_vm.sh creates a TPU only if given"),
    "slices": (_count(0), "N", "number of slices"),
    "max_run_duration": (TEXT, "TIME", "flex-start: waits for capacity, and ends after, say, 10h"),
    "delete": (DELETE, "WHEN", "the launcher's TPU: success (after the command has finished), "
               "always (also after failures), never; default: success for a model in a bucket"),
    "data": (TEXT, "PLACE", "gs://... or a shared directory, copied to the folder `data` of hosts"),
    "setup": (TEXT, "COMMAND", "shell command for each host before the run, such as a mount"),
    "skip_install": (FLAG, "", "use the checkout that hosts have already, in ~/taser_jax"),
    "env": (VARIABLES, "NAME[=VALUE]", "a variable for taser (by default as here); repeatable"),
    "max_hours": (AMOUNT, "HOURS", "after which the run and the launcher's TPU end (status 124)"),
    "retries": (_count(100, least=0), "N", "after a preemption, or without capacity (100)"),
    "retry_seconds": (_count(60), "N", "pause before each, and between looks at a state (60)"),
    "dry_run": (FLAG, "", "print the plan and the commands, run nothing"),
    "internal_ip": (FLAG, "", "no external addresses; installing needs Cloud NAT"),
    "iap": (FLAG, "", "ssh through Identity-Aware Proxy"),
    "price_per_hour": (AMOUNT, "DOLLARS", "what all chips cost, if you know better than the table"),
    "version": (TEXT, "VERSION", "of a new TPU's runtime (by its type, as launch/_tables.py says)"),
    "spot": (FLAG, "", "cheaper; may be preempted at any time"),
    "reserved": (FLAG, "", "uses the project's reservations"),
    "reservation": (TEXT, "NAME", "uses this reservation"),
    "network": (TEXT, "NETWORK", "of a new TPU, with --subnetwork"),
    "subnetwork": (TEXT, "SUBNETWORK", "of a new TPU"),
    "service_account": (TEXT, "EMAIL", "account of the hosts, for example to read a bucket"),
    "labels": (LABELS, "KEY=VALUE,...", "of a new TPU"),
    "data_disk": ({**TEXT, **MANY}, "source=DISK", "attached, not mounted; repeatable"),
    "gcloud": (REST, "FLAGS", "flags for gcloud's create command, up to --"),
    "hosts": (HOSTS, "HOST,...", "names for ssh; the first is host 0, which the others reach"),
    "port": (_count(8476), "N", "port of host 0 for JAX's coordinator (8476)"),
    "extra": (_checked("cuda|tpu", "cuda or tpu"), "EXTRA", "of the package to install (none)"),
    "nodes": (_count(0), "N", "number of nodes; inside an allocation those of this step"),
    "slurm": (REST, "FLAGS", "flags for srun, up to --"),
    "cluster": (TEXT, "CLUSTER", "made by `xpk cluster create`"),
    "workload": (WORKLOAD, "NAME", "new for each run"),
    "image": (TEXT, "IMAGE", "built from this checkout and pushed; pods get it by its digest"),
    "skip_build": (FLAG, "", "use the image that is in the registry: IMAGE@sha256:..."),
    "grace_seconds": (_count(300), "N", "between SIGTERM and the end of a pod (300)"),
    "xpk": (REST, "FLAGS", "flags for `xpk workload create`, up to --"),
}  # fmt: skip
OF_NEW_TPUS = (
    "version spot reserved reservation network subnetwork service_account labels data_disk gcloud"
)
_ALL = "env retries retry_seconds dry_run"
_ON_HOSTS = f"attach data setup skip_install max_hours {_ALL}"
_ON_TPU = f"project delete {_ON_HOSTS} internal_ip iap price_per_hour {OF_NEW_TPUS}"
_ON_GKE = "slices zone project data max_hours price_per_hour skip_build grace_seconds"
# Name -> (options that each run needs, others).
LAUNCHERS = {
    "tpu_vm": ("name zone", f"type {_ON_TPU}"),
    "tpu_multislice": ("name zone type slices", f"max_run_duration {_ON_TPU}"),
    "hosts": ("hosts", f"port extra {_ON_HOSTS}"),
    "slurm": ("nodes", f"slurm {_ALL}"),
    "gke_xpk": ("cluster workload type image", f"{_ON_GKE} xpk env retries dry_run"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parser_of(launcher: str, about: str) -> argparse.ArgumentParser:
    """The parser of a launcher's options, of what stands before `--`."""
    needed, others = (names.split() for names in LAUNCHERS[launcher])
    usage = " ".join(f"--{name}={OPTIONS[name][1]}" for name in needed)
    parser = _Parser(
        usage=f"launch/{launcher}.sh {usage} [options] -- COMMAND [FLAGS...]",
        description=about,
        epilog="COMMAND is a taser command; the launcher adds --multihost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(**{name: kind.get("default") for name, (kind, *_) in OPTIONS.items()})
    for name in (*needed, *others):
        kind, value, text = OPTIONS[name]
        # Hosts have names of their own: there is none to attach to.
        kind = FLAG if (launcher, name) == ("hosts", "attach") else kind
        shown: dict[str, Any] = {} if kind is FLAG else {"metavar": value}
        parser.add_argument(f"--{name}", help=text, **kind, **shown)
    return parser


def parse(launcher: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """Options of all launchers by name, and `command`, the words after the first `--`.

    Raises:
        UsageError: an option is unknown, is missing, or has a value that cannot be.
        SystemExit: --help.
    """
    needed, others = (names.split() for names in LAUNCHERS[launcher])
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    command = options.command = list(words[end + 1 :])
    if options.attach:
        options.name, options.retries = options.attach, 0
    for name in needed:
        if not getattr(options, name) and not (options.attach and name == "type"):
            raise UsageError(f"--{name} is missing")
    if options.attach and command:
        raise UsageError("--attach follows the command that runs; leave out another")
    if not options.attach and not command:
        raise UsageError("no command; for example: -- train --gin_file=runs/taser_base.gin")
    if "--multihost" in command:
        raise UsageError("leave out --multihost; it is added")
    if "project" in others:
        # The hosts share nothing but buckets.
        for word in command:
            if re.match("--gin.MODEL_DIR=(?!gs://)", word):
                warn(f"{word} is on each host's own disk and is lost with the host; use gs://")
    # Slices are replicas of the mesh, unless the command says otherwise.
    given = "MESH_REPLICA" in " ".join(command)
    if options.slices > 1 and command[:1] == ["train"] and not given:
        command.append(f"--gin.MESH_REPLICA={options.slices}")
    if options.dry_run:
        # Secrets are not shown.
        options.env = [f"{setting.partition('=')[0]}=..." for setting in options.env]
    return options


def warn(text: str) -> None:
    """Prints a warning."""
    print(f"warning: {text}", file=sys.stderr)


def flags(options: argparse.Namespace, *names: str) -> list[str]:
    """Options as the flags of another program.

    Example:
        With --service_account=a@b, "service_account" is ["--service-account=a@b"].
    """
    words = []
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value is True:
            words.append(flag)
        elif value:
            words += [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return words
