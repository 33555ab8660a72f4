"""Options of a TPU that is to be created: what fits together, and gcloud's flags for it."""

from __future__ import annotations

import argparse
import getpass
import re

from _options import UsageError

# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]
ON_DEMAND = "on demand"
# Options that only a TPU to be created has.
OF_NEW_TPUS = (
    *("version", "spot", "reserved", "reservation", "network", "subnetwork", "service_account"),
    *("labels", "data_disk", "gcloud"),
)


def price_class(options: argparse.Namespace) -> str:
    """Checks what a new TPU is to have; returns its class of price."""
    if not options.type:
        for name in OF_NEW_TPUS:
            if getattr(options, name):
                raise UsageError(f"--{name} applies to a TPU that is created: give its --type")
    classes = {
        "spot": "spot: may be preempted at any time",
        "reserved": "reserved",
        "reservation": f"reserved: {options.reservation}",
        "max_run_duration": f"flex-start: each attempt is ended after {options.max_run_duration}",
    }
    chosen = [text for name, text in classes.items() if getattr(options, name)]
    if len(chosen) > 1:
        raise UsageError("choose one of --spot, --reserved, --reservation and --max_run_duration")
    if bool(options.network) != bool(options.subnetwork):
        raise UsageError(
            "--network and --subnetwork go together: "
            "a network of one's own has no default subnetwork"
        )
    for label in filter(None, options.labels.split(",")):
        if not re.fullmatch(r"[a-z][-a-z0-9_]{0,62}=[-a-z0-9_]{0,63}", label):
            raise UsageError(
                f"--labels has '{label}', expected KEY=VALUE of lower-case letters, digits, "
                "- and _, the key from a letter on"
            )
    return chosen[0] if chosen else ON_DEMAND


def creation_flags(options: argparse.Namespace) -> list[str]:
    """Flags of gcloud's create commands."""
    labels = f"--labels=launcher={LAUNCHED_BY}" + (f",{options.labels}" if options.labels else "")
    flags = {
        "--spot": options.spot,
        "--reserved": options.reserved,
        f"--reservation={options.reservation}": options.reservation,
        "--provisioning-model=flex-start": options.max_run_duration,
        f"--max-run-duration={options.max_run_duration}": options.max_run_duration,
        f"--network={options.network}": options.network,
        f"--subnetwork={options.subnetwork}": options.subnetwork,
        "--internal-ips": options.internal_ip,
        f"--service-account={options.service_account}": options.service_account,
    }
    disks = [f"--data-disk={disk}" for disk in options.data_disk]
    return [flag for flag, given in flags.items() if given] + [*disks, labels, *options.gcloud]
