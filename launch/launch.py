"""The launchers: `python3 launch/launch.py tpu_vm --help`. Each launch/*.sh starts one of them.

They run on a laptop: Python 3.9, the standard library, and the programs that they call.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType

import _tables as tables
from _hosts import ROOT, Hosts, ask
from _pods import Pod, Slices
from _tables import LaunchError, flags, warn

CONTAINER = "/taser_jax/launch/_container.sh"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=30")


class _Machines(Hosts):
    r"""Runs taser on a list of machines, by ssh, which must not ask for a password.

      launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens
      launch/hosts.sh --hosts=a.example.org,b.example.org --attach      follows what runs there

    Exit statuses are those of launch/tpu_vm.sh.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, options.hosts.split(","))
        extra = f"[{options.extra}]" if options.extra else ""
        self.install = f"cd taser_jax && . launch/_environment.sh && use_environment '{extra}'"

    def plan(self) -> list[str]:
        first = f"{len(self.nodes)} hosts, {self.nodes[0]} first"
        return [f"{first}; nothing is created, so nothing is deleted", *super().plan()]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        return ["scp", *SSH_OPTIONS, "-q", file, f"{node}:{name}"]

    def connect_words(self, node: str, command: str) -> list[str]:
        return ["ssh", *SSH_OPTIONS, node, command]

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

    def __init__(self, options: argparse.Namespace) -> None:
        options.skip_install = True
        super().__init__(options, ["Slurm"])

    def plan(self) -> list[str]:
        nodes = f"{self.options.nodes} nodes of a Slurm cluster, one process each"
        return [f"{nodes}; Slurm frees them at the end", *super().plan()]

    def run_words(self, node: str) -> list[str]:
        options = self.options
        # A process that fails ends the others, so that none waits for it. Slurm sends SIGTERM to
        # the shell alone, which passes it on.
        srun = ("srun", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
        environment = ["env", *options.env] if options.env else []
        taser = os.environ.get("TASER", str(ROOT / ".venv/bin/taser"))
        task = ("bash", str(ROOT / "launch/_task.sh"), *environment, taser)
        return [*srun, *options.slurm, *task, *options.command, "--multihost"]


class _Workload(Hosts):
    r"""Runs taser as a workload on a GKE cluster made by xpk, which restarts it.

      launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 \
        --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 --data=gs://BUCKET/tokens -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser \
        --gin.TOKEN_STORE=data

    Each restart copies --data again, since its pods are new, and --max_hours ends each start.
    `train` gets --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does. The launcher ends when the
    cluster has the workload.
    """

    goes_on = False

    def __init__(self, options: argparse.Namespace) -> None:
        options.skip_install = options.skip_build
        super().__init__(options, ["GKE"])
        # xpk refuses longer names, but only after the image has been built.
        if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", options.workload):
            options.refuse("--workload: expected up to 40 lower-case letters, digits and dashes")
        # The cluster does what launchers do elsewhere.
        self.retries = self.max_hours = 0
        self.image = options.image
        if not options.skip_build:
            self.image = f"{self._repository()}@sha256:DIGEST"
        elif "@sha256:" not in self.image:
            warn(f"{self.image} may name another image at a restart; use IMAGE@sha256:DIGEST")

    def plan(self) -> list[str]:
        options, slices = self.options, self.options.slices or 1
        delete = shlex.join(["xpk", "workload", "delete", *flags(options, "workload", "cluster")])
        return [
            f"workload {options.workload} on cluster {options.cluster}: {slices} "
            f"slice{'s' * (slices > 1)} of {options.type}, image {options.image}",
            "price: that of the cluster's nodes, or what --xpk asks for (--spot, "
            f"--reservation=NAME, --flex); {tables.hourly_price(options, True)[1]}",
            f"retries: {options.retries}, by the cluster; {options.grace_seconds} s to save before "
            "a pod ends",
            f"deletion: nodes are billed while the cluster has them. The workload's: {delete}",
        ]

    def preparation(self, node: str) -> list[list[str]]:
        """Builds and pushes the image of this checkout."""
        if self.options.skip_build:
            return []
        folder, image = f"{self.options.scratch}/taser_jax", self.options.image
        recipe = ("--platform=linux/amd64", f"--file={folder}/launch/Dockerfile", f"--tag={image}")
        unpack = ["tar", "-xzf", self.archive, "-C", folder]
        build = ["docker", "build", *recipe, folder]
        return [["mkdir", "-p", folder], unpack, build, ["docker", "push", image]]

    def follow(self, node: str) -> tuple[list[int], int]:
        if not self.options.skip_build:
            self.image = self._digest()
        # No host reports: xpk ends when the cluster has the workload.
        return [self.show(self.run_words(node))], 0

    def _digest(self) -> str:
        """The name of the image by its digest: a tag may get another image between restarts.

        Example:
            r/taser:1 is r/taser@sha256:0123...

        Raises:
            LaunchError: docker does not know it.
        """
        digests = "--format={{range .RepoDigests}}{{println .}}{{end}}"
        _, output, errors = ask(["docker", "image", "inspect", digests, self.options.image])
        for name in output.split():
            if name.startswith(f"{self._repository()}@"):
                return name
        raise LaunchError(
            f"docker has no digest of {self.options.image} after its push {errors.strip()}\n"
            "  fix: give --image=IMAGE@sha256:DIGEST and --skip_build"
        )

    def _repository(self) -> str:
        """The image's name without its tag: `host:5000/r/taser:1` is host:5000/r/taser."""
        parent, slash, name = self.options.image.rpartition("/")
        return parent + slash + name.partition(":")[0]

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
    try:
        options = tables.parse(name, inspect.cleandoc(FLOWS[name].__doc__ or ""), words[1:])
        with tempfile.TemporaryDirectory() as options.scratch:
            return FLOWS[name](options).run()
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
