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
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType

from _hosts import ROOT, Attempts, Hosts, Shell, archive_checkout
from _pods import Pod
from _tables import TIMED_OUT, LaunchError, UsageError, flags, hourly_price, parse, parser_of, warn

CONTAINER = "/taser_jax/launch/_container.sh"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20")


def tpu_vm(options: argparse.Namespace, shell: Shell) -> int:
    r"""Runs taser on one TPU VM, or on all hosts of a pod slice.

      launch/tpu_vm.sh --name=taser --zone=us-central2-b --type=v4-32 --spot \
        --data=gs://BUCKET/tokens -- train --gin_file=runs/taser_base.gin \
        --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data
      launch/tpu_vm.sh --attach NAME --zone=ZONE        follows what runs there

    Only a TPU that was preempted or terminated is deleted and created again. For flex-start use
    launch/tpu_multislice.sh with --slices=1.

    Exits with 0 (finished), 2 (a problem to fix; see the message), 75 (preempted or no capacity,
    and no retries left), 124 (--max_hours), or the status with which installation, copying data or
    taser failed. The last line says whether the TPU still runs.
    """
    return Attempts(Pod(shell, options)).run()


def tpu_multislice(options: argparse.Namespace, shell: Shell) -> int:
    r"""Runs taser on several slices, requested as one queued resource.

      launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 \
        --data=gs://BUCKET/tokens -- train --gin_file=runs/taser_base.gin \
        --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data
      launch/tpu_multislice.sh --attach NAME --zone=ZONE --slices=N        follows what runs there

    `train` without MESH_REPLICA gets --gin.MESH_REPLICA=N. --slices=1
    is for --max_run_duration. Exit statuses and the last line are those of launch/tpu_vm.sh.
    """
    if options.slices == 1 and not (options.max_run_duration or options.attach):
        raise UsageError("--slices is 1; for one slice use launch/tpu_vm.sh")
    return Attempts(Pod(shell, options)).run()


def hosts(options: argparse.Namespace, shell: Shell) -> int:
    r"""Runs taser on a list of machines, by ssh, which must not ask for a password.

      launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens
      launch/hosts.sh --hosts=a.example.org,b.example.org --attach      follows what runs there

    Exit statuses are those of launch/tpu_vm.sh.
    """
    return Attempts(_Machines(shell, options)).run()


class _Machines(Hosts):
    """Machines that ssh reaches; nothing is created."""

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        super().__init__(shell, options, options.hosts.split(","))
        shell.require("ssh", "install OpenSSH")
        extra = f"[{options.extra}]" if options.extra else ""
        self.install = f"cd taser_jax && . launch/_environment.sh && use_environment '{extra}'"

    def plan(self) -> list[str]:
        count, first = len(self.nodes), self.nodes[0]
        return [
            f"{count} hosts, {first} first; nothing is created, so nothing is deleted",
            self.retries("after a host was lost"),
        ]

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
        return all(self.shell.step(self.connect_words(node, "true")) == 0 for node in self.nodes)


def slurm(options: argparse.Namespace, shell: Shell) -> int:
    r"""Runs taser on Slurm, one process per node, from this checkout on a shared file system.

      launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens

    The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
    Exit statuses are those of launch/tpu_vm.sh. To end a run after a time: --slurm --time=10:00:00
    """
    return Attempts(_Slurm(shell, options)).run()


class _Slurm(Hosts):
    """Nodes of a Slurm cluster, which share this checkout; JAX reads Slurm's variables."""

    goes_on = False
    # Slurm reports the nodes that it has lost or taken back.
    losses = r"(?i)node[ _]fail|preempt|CANCELLED|allocation .*revoked"

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        super().__init__(shell, options, ["Slurm"])
        shell.require("srun", "run this on a node of the Slurm cluster")
        options.skip_install = True

    def plan(self) -> list[str]:
        nodes = f"{self.options.nodes} nodes of a Slurm cluster"
        return [
            f"{nodes}, one process each; Slurm frees them at the end",
            self.retries("after a preemption or a lost node"),
        ]

    def run_words(self, node: str) -> list[str]:
        options = self.options
        # A process that fails ends the others, so that none waits for it. Each prints its status.
        script = '"$@"; status=$?; echo "taser-status $status on $(hostname)"; exit $status'
        environment = ["env", *options.env] if options.env else []
        taser = os.environ.get("TASER", str(ROOT / ".venv/bin/taser"))
        return [
            *("srun", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
            *(*options.slurm, "bash", "-c", script, "taser", *environment, taser),
            *(*options.command, "--multihost"),
        ]


def gke_xpk(options: argparse.Namespace, shell: Shell) -> int:
    r"""Runs taser as a workload on a GKE cluster made by xpk, which restarts it.

      launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 \
        --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 --data=gs://BUCKET/tokens -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser \
        --gin.TOKEN_STORE=data

    Each restart copies --data again, since its pods are new, and --max_hours ends each start.
    `train` gets --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does.
    """
    shell.require("xpk", "pip install xpk")
    if not options.skip_build:
        shell.require("docker", "install it, or build the image elsewhere and give --skip_build")
    slices, image = options.slices or 1, options.image
    _, price = hourly_price(options.type, slices, options.price_per_hour)
    print(
        f"# workload {options.workload} on cluster {options.cluster}: {slices} "
        f"slice{'s' * (slices > 1)} of {options.type}, image {image}\n"
        "# price: that of the cluster's nodes, or what --xpk asks for (--spot, --reservation=NAME, "
        f"--flex); {price}\n"
        f"# retries: {options.retries}, by the cluster; {options.grace_seconds} s to save before a "
        "pod ends\n"
        "# deletion: nodes are billed while the cluster has them. The workload's: "
        f"xpk workload delete {shlex.join(flags(options, 'workload', 'cluster'))}"
    )
    if not options.skip_build:
        image = _build(shell, image)
    elif "@sha256:" not in image:
        warn(f"{image} may name another image at a restart; use IMAGE@sha256:DIGEST")
    settings = options.env
    if options.max_hours:
        # Its status, 124, is not one that xpk restarts.
        kill = f"--kill-after={options.grace_seconds}"
        settings = [*settings, "timeout", kill, f"{options.max_hours:g}h"]
    pod = ["bash", CONTAINER, options.data or "", *options.command, "--multihost"]
    # A missing program would end the shell with 127, for which xpk would restart it.
    start = f"test -e {CONTAINER} || exit 2; {shlex.join(['exec', 'env', *settings, *pod])}"
    words = [
        *flags(options, "cluster", "workload"),
        *(f"--tpu-type={options.type}", f"--num-slices={slices}"),
        *flags(options, "zone", "project"),
        # What ends with 75 was preempted.
        *(f"--docker-image={image}", f"--max-restarts={options.retries}"),
        "--restart-on-exit-codes=75",
        f"--termination-grace-period-seconds={options.grace_seconds}",
        *(*options.xpk, f"--command={start}"),
    ]
    return shell.step(["xpk", "workload", "create", *words])


def _build(shell: Shell, image: str) -> str:
    """Builds and pushes the image of this checkout; its name by digest.

    A tag may get another image between restarts: r/taser:1 is r/taser@sha256:0123...

    Raises:
        LaunchError: docker fails, or does not know the digest.
    """
    archive, folder = archive_checkout(shell), str(shell.scratch / "taser_jax")
    recipe = ("--platform=linux/amd64", f"--file={folder}/launch/Dockerfile", f"--tag={image}")
    for words in (
        ["mkdir", "-p", folder],
        ["tar", "-xzf", archive, "-C", folder],
        ["docker", "build", *recipe, folder],
        ["docker", "push", image],
    ):
        status = shell.step(words)
        if status:
            raise LaunchError(f"{shlex.join(words)} failed with status {status}", status)
    inspection = ["docker", "image", "inspect", image]
    parent, slash, name = image.rpartition("/")
    repository = parent + slash + name.partition(":")[0]
    if shell.dry_run:
        shell.step(inspection)
        return f"{repository}@sha256:DIGEST"
    status, output, errors = shell.ask(inspection)
    for description in json.loads(output) if status == 0 else ():
        for digest in description.get("RepoDigests") or ():
            if digest.partition("@")[0] == repository:
                return digest
    raise LaunchError(
        f"docker has no digest of {image} after its push {errors.strip()}\n"
        "  fix: give --image=IMAGE@sha256:DIGEST and --skip_build"
    )


FLOWS: dict[str, Callable[[argparse.Namespace, Shell], int]] = {
    flow.__name__: flow for flow in (tpu_vm, tpu_multislice, hosts, slurm, gke_xpk)
}


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(TIMED_OUT if number == signal.SIGALRM else 128 + number)


def main(words: Sequence[str]) -> int:
    """Runs a launcher; returns its exit status."""
    name = words[0]
    # Lines of the launcher and of what it runs stay in order.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _stop)
    parser = parser_of(name, inspect.cleandoc(FLOWS[name].__doc__ or ""))
    try:
        options = parse(name, parser, words[1:])
        with tempfile.TemporaryDirectory() as scratch:
            return FLOWS[name](options, Shell(options.dry_run, scratch))
    except LaunchError as error:
        usage = f"\n\n{parser.format_help()}" if isinstance(error, UsageError) else ""
        print(f"error: {error}{usage}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
