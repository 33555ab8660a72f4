"""The launchers: `python3 launch/launch.py tpu_vm --help`. Each launch/*.sh starts one of them.

They run on a laptop: Python 3.9, the standard library, and the programs that they call.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from _attempts import AttemptError, Attempts, Report, outcome, with_retries
from _options import (
    LaunchError,
    UsageError,
    check_command,
    environment,
    parse,
    parser_of,
    require,
    require_program,
    warn_of_lost_results,
    with_mesh_replica,
)
from _pods import Pod
from _shell import ROOT, Shell, archive_checkout, pushed_digest, scratch_folder
from _tables import AGAIN, MEND, TIMED_OUT, hourly_price

CONTAINER = "/taser_jax/launch/_container.sh"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
GCLOUD = "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install"
# Slurm reports the nodes that it has lost or taken back.
SLURM_LOSSES = r"(?i)node[ _]fail|preempt|CANCELLED|allocation .*revoked"


class StoppedError(Exception):
    """What ends the launcher with a status: a signal, or a step that failed."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def tpu_vm(options: argparse.Namespace) -> int:
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
    options.slices, options.max_run_duration = 0, None
    return _on_pod(options, "zone")


def tpu_multislice(options: argparse.Namespace) -> int:
    r"""Runs taser on several slices, requested as one queued resource.

      launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 \
        --data=gs://BUCKET/tokens -- train --gin_file=runs/taser_base.gin \
        --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data
      launch/tpu_multislice.sh --attach NAME --zone=ZONE --slices=N        follows what runs there

    `train` without MESH_REPLICA gets --gin.MESH_REPLICA=N. --slices=1
    is for --max_run_duration. Exit statuses and the last line are those of launch/tpu_vm.sh.
    """
    if options.attach:
        return _on_pod(options, "zone", "slices")
    require(options, "name", "zone", "type", "slices")
    if options.slices == 1 and not options.max_run_duration:
        raise UsageError("--slices is 1; for one slice use launch/tpu_vm.sh")
    check_command(options.command)
    options.command = with_mesh_replica(options.command, options.slices)
    return _on_pod(options)


def _on_pod(options: argparse.Namespace, *required: str) -> int:
    options.name = options.attach or options.name
    require(options, "name", *required)
    _check(options)
    warn_of_lost_results(options.command)
    require_program(options, "gcloud", GCLOUD)
    pod = Pod(Shell(options.dry_run), options)
    print(pod.plan())
    status = 1
    with scratch_folder(pod.shell) as scratch:
        attempts = Attempts(options, pod, scratch)
        try:
            status = _end_of(attempts)
        finally:
            if not options.dry_run:
                rate = attempts.steps_per_second
                if pod.price and rate:
                    cost = pod.price / 3600 * 1000 / rate
                    print(f"cost: about ${cost:.2f} for 1,000 steps, at {rate:g} steps a second")
                pod.farewell(status)
    return status


def _check(options: argparse.Namespace) -> None:
    environment(options.env)
    if not options.attach:
        check_command(options.command)
    elif options.command:
        raise UsageError("--attach follows the command that runs; leave out another")


def _end_of(attempts: Attempts) -> int:
    """Makes attempts until the command ends, or the launcher must; returns its status."""
    options, shell = attempts.options, attempts.shell
    if options.max_hours:
        signal.setitimer(signal.ITIMER_REAL, options.max_hours * 3600)
    if options.attach:
        options.retries = 0
    try:
        return with_retries(shell, options, attempts.attach if options.attach else attempts.run)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return MEND
    except (KeyboardInterrupt, StoppedError) as stop:
        shell.end()
        status = getattr(stop, "status", 128 + signal.SIGINT)
        if status == TIMED_OUT:
            print(f"{options.max_hours:g} h are over: ending the run", file=sys.stderr)
            attempts.end_runs()
        else:
            print("the command goes on where it has begun; follow it: --attach", file=sys.stderr)
        return status
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Machines:
    """Machines that ssh reaches; nothing is created.

    Args:
        shell: what runs commands.
        options: of the command line.
    """

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        self.shell = shell
        self.nodes = options.hosts.split(",")
        self.port = options.port
        extra = f"[{options.extra}]" if options.extra else ""
        self.install = (
            "mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && cd taser_jax && "
            f". launch/_environment.sh && use_environment '{extra}'"
        )

    def make_ready(self) -> None:
        """They are there."""

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        """Copies a file to the home folder."""
        return ["scp", *SSH_OPTIONS, "-q", file, f"{node}:{name}"]

    def connect_words(self, node: str, command: str) -> list[str]:
        """Runs a shell command on a machine."""
        return ["ssh", *SSH_OPTIONS, "-o", "ServerAliveInterval=30", node, command]

    def variables(self, node: str) -> list[str]:
        """JAX reads the coordinator and the number of a host from these."""
        return [
            f"JAX_COORDINATOR_ADDRESS={self.nodes[0].rpartition('@')[2]}:{self.port}",
            f"JAX_NUM_PROCESSES={len(self.nodes)}",
            f"JAX_PROCESS_ID={self.nodes.index(node)}",
        ]

    def is_there(self) -> bool:
        """Whether ssh reaches all."""
        return all(self.shell.step(self.connect_words(node, "true")) == 0 for node in self.nodes)


def hosts(options: argparse.Namespace) -> int:
    r"""Runs taser on a list of machines, by ssh, which must not ask for a password.

      launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens
      launch/hosts.sh --hosts=a.example.org,b.example.org --attach      follows what runs there

    Exit statuses are those of launch/tpu_vm.sh.
    """
    require(options, "hosts")
    if options.extra not in (None, "cuda", "tpu"):
        raise UsageError(f"--extra is '{options.extra}', expected cuda or tpu")
    if not re.fullmatch(r"[^,\s]+(,[^,\s]+)*", options.hosts):
        raise UsageError(f"--hosts is '{options.hosts}', expected names with commas between them")
    _check(options)
    require_program(options, "ssh", "install OpenSSH")
    machines = Machines(Shell(options.dry_run), options)
    count, first = len(machines.nodes), machines.nodes[0]
    print(f"# {count} hosts, {first} first; nothing is created, so nothing is deleted")
    print(f"# retries: {options.retries}, after a host was lost, {options.retry_seconds} s apart")
    with scratch_folder(machines.shell) as scratch:
        return _end_of(Attempts(options, machines, scratch))


def slurm(options: argparse.Namespace) -> int:
    r"""Runs taser on Slurm, one process per node, from this checkout on a shared file system.

      launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens

    The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
    Exit statuses are those of launch/tpu_vm.sh. To end a run after a time: --slurm --time=10:00:00
    """
    require(options, "nodes")
    check_command(options.command)
    variables = environment(options.env)
    require_program(options, "srun", "run this on a node of the Slurm cluster")
    shell = Shell(options.dry_run)
    # A process that fails ends the others, so that none waits for it. Each prints its status.
    script = '"$@"; status=$?; echo "taser-status $status on $(hostname)"; exit $status'
    words = [
        *("srun", f"--nodes={options.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        *(*options.slurm, "bash", "-c", script, "taser", *(["env", *variables] * bool(variables))),
        *(os.environ.get("TASER", str(ROOT / ".venv/bin/taser")), *options.command, "--multihost"),
    ]

    def attempt() -> None:
        report, lines = Report(), []

        def read(line: str) -> None:
            report.read(line)
            lines.append(line)

        report.connection = shell.follow(words, read)
        status = 0 if shell.dry_run else outcome([report])
        if status not in (0, MEND) and re.search(SLURM_LOSSES, "".join(lines)):
            status = AGAIN
        if status:
            raise AttemptError(status)

    nodes = f"{options.nodes} nodes of a Slurm cluster"
    print(f"# {nodes}, one process each; Slurm frees them at the end")
    apart = f"{options.retry_seconds} s apart"
    print(f"# retries: {options.retries}, after a preemption or a lost node, {apart}")
    try:
        return with_retries(shell, options, attempt)
    finally:
        shell.end()


def gke_xpk(options: argparse.Namespace) -> int:
    r"""Runs taser as a workload on a GKE cluster made by xpk, which restarts it.

      launch/gke_xpk.sh --cluster=tpus --workload=taser-1 --type=v5litepod-64 \
        --image=us-docker.pkg.dev/PROJECT/REPOSITORY/taser:1 --data=gs://BUCKET/tokens -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=gs://BUCKET/taser \
        --gin.TOKEN_STORE=data

    Each restart copies --data again, since its pods are new, and --max_hours ends each start.
    `train` gets --gin.MESH_REPLICA=N as launch/tpu_multislice.sh does.
    """
    require(options, "cluster", "workload", "type", "image")
    # xpk refuses longer names, but only after the image has been built.
    if not re.fullmatch("[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?", options.workload):
        raise UsageError(
            f"--workload is '{options.workload}', expected up to 40 lower-case letters, digits and "
            "dashes"
        )
    options.slices = options.slices or 1
    check_command(options.command)
    warn_of_lost_results(options.command)
    require_program(options, "xpk", "install it: pip install xpk")
    if not options.skip_build:
        fix = "install Docker, or build the image elsewhere and give --skip_build"
        require_program(options, "docker", fix)
    shell = Shell(options.dry_run)
    print(_plan_of_workload(options))
    with scratch_folder(shell) as scratch:
        image = options.image
        if not options.skip_build:
            image = _build(shell, scratch, image)
        elif "@sha256:" not in image:
            print(
                f"warning: {image} may name another image at a restart; use IMAGE@sha256:DIGEST",
                file=sys.stderr,
            )
        return shell.step(_workload(options, image))


def _plan_of_workload(options: argparse.Namespace) -> str:
    slices, where = options.slices, f"--cluster={options.cluster}"
    _, price = hourly_price(options.type, slices, options.price_per_hour)
    lines = (
        f"workload {options.workload} on cluster {options.cluster}: {slices} "
        f"slice{'s' * (slices > 1)} of {options.type}, image {options.image}",
        "price: that of the cluster's nodes, or what --xpk asks for (--spot, --reservation=NAME, "
        f"--flex); {price}",
        f"retries: {options.retries}, by the cluster; {options.grace_seconds} s to save before a "
        "pod ends",
        "deletion: nodes are billed while the cluster has them. The workload's: "
        f"xpk workload delete --workload={options.workload} {where}",
    )
    return "\n".join(f"# {line}" for line in lines)


def _build(shell: Shell, scratch: pathlib.Path, image: str) -> str:
    """Builds and pushes the image of this checkout; its name by digest."""
    archive, folder = archive_checkout(shell, scratch), str(scratch / "taser_jax")
    recipe = ("--platform=linux/amd64", f"--file={folder}/launch/Dockerfile", f"--tag={image}")
    for words in (
        ["mkdir", "-p", folder],
        ["tar", "-xzf", str(archive), "-C", folder],
        ["docker", "build", *recipe, folder],
        ["docker", "push", image],
    ):
        status = shell.step(words)
        if status:
            raise StoppedError(status)
    return pushed_digest(shell, image)


def _workload(options: argparse.Namespace, image: str) -> list[str]:
    """The command of xpk, which restarts what ends with 75: taser was preempted."""
    command = with_mesh_replica(options.command, options.slices)
    settings = environment(options.env)
    if options.max_hours:
        # Its status, 124, is not one that xpk restarts.
        kill = f"--kill-after={options.grace_seconds}"
        settings += ["timeout", kill, f"{options.max_hours:g}h"]
    pod = ["bash", CONTAINER, options.data or "", *command, "--multihost"]
    # A missing program would end the shell with 127, for which xpk would restart it.
    start = f"test -e {CONTAINER} || exit 2; {shlex.join(['exec', 'env', *settings, *pod])}"
    zone = [f"--zone={options.zone}"] if options.zone else []
    project = [f"--project={options.project}"] if options.project else []
    return [
        *("xpk", "workload", "create", f"--cluster={options.cluster}"),
        *(f"--workload={options.workload}", f"--tpu-type={options.type}"),
        *(f"--num-slices={options.slices}", *zone, *project, f"--docker-image={image}"),
        *(f"--max-restarts={options.retries}", "--restart-on-exit-codes=75"),
        f"--termination-grace-period-seconds={options.grace_seconds}",
        *(*options.xpk, f"--command={start}"),
    ]


FLOWS: dict[str, Callable[[argparse.Namespace], int]] = {
    flow.__name__: flow for flow in (tpu_vm, tpu_multislice, hosts, slurm, gke_xpk)
}


def _stop(number: int, frame: FrameType | None) -> None:
    raise StoppedError(TIMED_OUT if number == signal.SIGALRM else 128 + signal.SIGTERM)


def main(words: Sequence[str]) -> int:
    """Runs a launcher; returns its exit status."""
    name = words[0]
    # Lines of the launcher and of what it runs stay in order.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, _stop)
    parser = parser_of(name, inspect.cleandoc(FLOWS[name].__doc__ or ""))
    try:
        return FLOWS[name](parse(parser, words[1:]))
    except UsageError as error:
        print(f"error: {error}\n\n{parser.format_help()}", file=sys.stderr)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
    except StoppedError as stop:
        return stop.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return MEND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
