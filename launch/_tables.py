"""What the launchers know of Google Cloud: kinds of TPU, prices, states and errors.

Sources, read in November 2026: cloud.google.com/tpu/docs/runtimes (runtimes for JAX), .../docs/v4
and .../docs/v5p (types count TensorCores), .../docs/v5e and .../docs/v6e (types count chips),
.../docs/quota. TPU7x: "you must use Google Kubernetes Engine", .../docs/queued-resources.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

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
# Options that choose a class of prices.
PRICE_CLASSES = {
    "spot": "spot: may be preempted at any time",
    "reserved": "reserved",
    "reservation": "reserved: {reservation}",
    "max_run_duration": "flex-start: each attempt is ended after {max_run_duration}",
}


class Move(enum.Enum):
    """What a launcher does about a state."""

    RUN = "run"
    WAIT = "wait"
    CREATE = "create"
    REPLACE = "delete and create"
    FAILED = "delete; the error decides"
    LEAVE = "leave alone and stop"


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


def refusal(report: str, zone: str) -> LaunchError:
    """What an error that Google Cloud reports means for an attempt.

    Example:
        After "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8" somebody must act.
    """
    for pattern, meaning, status in ERRORS:
        words = re.search(rf"(?<!\w)(?:{pattern})(?!\w)", report)
        if words:
            return LaunchError(meaning.format(words=words.group().strip(' "')), status)
    return LaunchError(
        "gcloud refused: see its message above, fix it and start again\n  types of this zone: "
        f"gcloud compute tpus tpu-vm accelerator-types list --zone={zone}; runtimes: versions list"
    )


def hourly_price(type_: str, slices: int, given: float | None) -> tuple[float | None, str]:
    """US dollars for an hour of slices, and how they are known; None: they are not.

    Example:
        One slice of v5litepod-16 costs 16 x 1.20 = 19.20 dollars on demand.
    """
    kind, _, size = type_.rpartition("-")
    if given:
        return given, f"${given:.2f} an hour, as you say"
    price = KINDS[kind].price if kind in KINDS else None
    if price is None:
        return None, f"not known for {kind}; give --price_per_hour=DOLLARS"
    total = price * int(size) / KINDS[kind].cores * slices
    return total, (
        f"about ${total:.2f} an hour on demand, by the list price of {PRICES_OF} "
        f"(${price:.2f} a chip); --price_per_hour replaces it"
    )
