"""The launchers: `python3 launch/launch.py tpu_vm --help`. Each launch/*.sh starts one of them.

They run on a laptop: Python 3.9, the standard library, and the programs that they call.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType

import _tables as tables
from _hosts import ROOT, Hosts, Report, ask
from _pods import Pod, Slices
from _tables import LaunchError, UsageError, flags, parse, parser_of, warn

CONTAINER = "/taser_jax/launch/_container.sh"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20")


class _Machines(Hosts):
    r"""Runs taser on a list of machines, by ssh, which must not ask for a password.

      launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens
      launch/hosts.sh --hosts=a.example.org,b.example.org --attach      follows what runs there

    Exit statuses are those of launch/tpu_vm.sh.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, options.hosts.split(","), ssh="install OpenSSH")
        extra = f"[{options.extra}]" if options.extra else ""
        self.install = f"cd taser_jax && . launch/_environment.sh && use_environment '{extra}'"

    def plan(self) -> list[str]:
        first = f"{len(self.nodes)} hosts, {self.nodes[0]} first"
        return [f"{first}; nothing is created, so nothing is deleted", *super().plan()]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        return ["scp", *SSH_OPTIONS, "-q", file, f"{node}:{name}"]

    def connect_words(self, node: str, command: str) -> list[str]:
        return ["ssh", *SSH_OPTIONS, "-o", "ServerAliveInterval=30", node, command]

    def variables(self, node: str) -> list[str]:
        return [
            f"JAX_COORDINATOR_ADDRESS={self.nodes[0].rpartition('@')[2]}:{self.options.port}",
            f"JAX_NUM_PROCESSES={len(self.nodes)}",
            f"JAX_PROCESS_ID={self.nodes.index(node)}",
        ]

    def is_there(self) -> bool:
        words = [self.connect_words(node, "true") for node in self.nodes]
        return not any(subprocess.run(each).returncode for each in words)


class _Slurm(Hosts):
    r"""Runs taser on Slurm, one process per node, from this checkout on a shared file system.

      launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens

    The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
    Exit statuses are those of launch/tpu_vm.sh. To end a run after a time: --slurm --time=10:00:00
    """

    goes_on = False
    # Slurm reports the nodes that it has lost or taken back. It also calls a step CANCELLED whose
    # other processes it ends after a failure.
    losses = r"(?i)node[ _]fail|preempt|allocation .*revoked"

    def __init__(self, options: argparse.Namespace) -> None:
        options.skip_install = True
        super().__init__(options, ["Slurm"], srun="run this on a node of the Slurm cluster")

    def plan(self) -> list[str]:
        nodes = f"{self.options.nodes} nodes of a Slurm cluster, one process each"
        return [f"{nodes}; Slurm frees them at the end", *super().plan()]

    def run_words(self, node: str) -> list[str]:
        options = self.options
        # A process that fails ends the others, so that none waits for it. Each prints its status.
        # Slurm sends SIGTERM to the shell alone, and a signal ends a `wait`.
        script = (
            '"$@" & taser=$!; trap "kill -TERM $taser" TERM; wait "$taser"; status=$?; '
            'while kill -0 "$taser" 2>/dev/null; do wait "$taser"; status=$?; done; '
            'echo "taser-status $status on $(hostname)"; exit $status'
        )
        environment = ["env", *options.env] if options.env else []
        taser = os.environ.get("TASER", str(ROOT / ".venv/bin/taser"))
        return [
            *("srun", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
            *(*options.slurm, "bash", "-c", script, "taser", *environment, taser),
            *(*options.command, "--multihost"),
        ]


class _Workload(Hosts):
    r"""Runs taser as a workload on a GKE cluster made by xpk, which restarts it.

      launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 \
        --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 --data=gs://BUCKET/tokens -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser \
        --gin.TOKEN_STORE=data

    Each restart copies --data again, since its pods are new, and --max_hours ends each start.
    `train` gets --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does.
    """

    goes_on, end = False, "the cluster has the workload"

    def __init__(self, options: argparse.Namespace) -> None:
        options.skip_install = options.skip_build
        super().__init__(options, ["GKE"], xpk="pip install xpk")
        # The cluster does what launchers do elsewhere.
        self.retries = self.max_hours = 0
        self.image = options.image
        if not options.skip_build:
            self.needs["docker"] = "install it, or build the image elsewhere and give --skip_build"
            parent, slash, name = self.image.rpartition("/")
            self.repository = parent + slash + name.partition(":")[0]
            self.image = f"{self.repository}@sha256:DIGEST"
        elif "@sha256:" not in self.image:
            warn(f"{self.image} may name another image at a restart; use IMAGE@sha256:DIGEST")

    def plan(self) -> list[str]:
        options, slices = self.options, self.options.slices or 1
        delete = shlex.join(["xpk", "workload", "delete", *flags(options, "workload", "cluster")])
        return [
            f"workload {options.workload} on cluster {options.cluster}: {slices} "
            f"slice{'s' * (slices > 1)} of {options.type}, image {options.image}",
            "price: that of the cluster's nodes, or what --xpk asks for (--spot, "
            f"--reservation=NAME, --flex); {tables.hourly_price(options, tables.ON_DEMAND)[1]}",
            f"retries: {options.retries}, by the cluster; {options.grace_seconds} s to save before "
            "a pod ends",
            f"deletion: nodes are billed while the cluster has them. The workload's: {delete}",
        ]

    def creation(self) -> list[list[str]]:
        """Builds and pushes the image of this checkout, and asks for its digest."""
        if self.options.skip_build:
            return []
        folder, image = f"{self.options.scratch}/taser_jax", self.options.image
        recipe = ("--platform=linux/amd64", f"--file={folder}/launch/Dockerfile", f"--tag={image}")
        return [
            ["mkdir", "-p", folder],
            ["tar", "-xzf", self.archive, "-C", folder],
            ["docker", "build", *recipe, folder],
            ["docker", "push", image],
            ["docker", "image", "inspect", image],
        ]

    def make_ready(self) -> None:
        if not self.options.skip_build:
            *steps, inspection = self.creation()
            for words in steps:
                status = subprocess.run(words).returncode
                if status:
                    raise LaunchError(f"{shlex.join(words)} failed with status {status}", status)
            self.image = self._digest(inspection)

    def preparation(self, node: str) -> list[list[str]]:
        return []

    def follow(self, node: str) -> Report:
        # No host reports: xpk ends when the cluster has the workload.
        return Report(statuses=[self.show(self.run_words(node))])

    def _digest(self, inspection: list[str]) -> str:
        """The name of the image by its digest: a tag may get another image between restarts.

        Example:
            r/taser:1 is r/taser@sha256:0123...

        Raises:
            LaunchError: docker does not know it.
        """
        status, output, errors = ask(inspection)
        for description in json.loads(output) if status == 0 else ():
            for digest in description.get("RepoDigests") or ():
                if digest.partition("@")[0] == self.repository:
                    return digest
        raise LaunchError(
            f"docker has no digest of {self.options.image} after its push {errors.strip()}\n"
            "  fix: give --image=IMAGE@sha256:DIGEST and --skip_build"
        )

    def run_words(self, node: str) -> list[str]:
        options, settings = self.options, self.options.env
        if options.max_hours:
            # Its status, 124, is not one that xpk restarts.
            kill = f"--kill-after={options.grace_seconds}"
            settings = [*settings, "timeout", kill, f"{options.max_hours:g}h"]
        pod = ["bash", CONTAINER, options.data or "", *options.command, "--multihost"]
        # A missing program would end the shell with 127, for which xpk would restart it.
        start = f"test -e {CONTAINER} || exit 2; {shlex.join(['exec', 'env', *settings, *pod])}"
        return [
            *("xpk", "workload", "create", *flags(options, "cluster", "workload")),
            *(f"--tpu-type={options.type}", f"--num-slices={options.slices or 1}"),
            *flags(options, "zone", "project"),
            # What ends with 75 was preempted.
            *(f"--docker-image={self.image}", f"--max-restarts={options.retries}"),
            "--restart-on-exit-codes=75",
            f"--termination-grace-period-seconds={options.grace_seconds}",
            *(*options.xpk, f"--command={start}"),
        ]


FLOWS: dict[str, Callable[[argparse.Namespace], Hosts]] = dict(
    tpu_vm=Pod, tpu_multislice=Slices, hosts=_Machines, slurm=_Slurm, gke_xpk=_Workload
)

# A terminal that is closed turns what is printed to it into an error, before anything is deleted.
TERMINALS = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]


def _stop(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        for name in TERMINALS:
            setattr(sys, name, io.StringIO())
    sys.exit(tables.TIMED_OUT if number == signal.SIGALRM else 128 + number)


def main(words: Sequence[str]) -> int:
    """Runs a launcher; returns its exit status."""
    name = words[0]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        # Under nohup, a terminal that closes ends nothing.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    parser = parser_of(name, inspect.cleandoc(FLOWS[name].__doc__ or ""))
    try:
        options = parse(name, parser, words[1:])
        with tempfile.TemporaryDirectory() as options.scratch:
            return FLOWS[name](options).run()
    except LaunchError as error:
        usage = f"\n\n{parser.format_help()}" if isinstance(error, UsageError) else ""
        print(f"error: {error}{usage}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
