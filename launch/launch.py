"""The launchers: `python3 launch/launch.py tpu_vm --help`. Each launch/*.sh starts one of them.

They run on a laptop: Python 3.9, the standard library, and the programs that they call.
"""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence

import _tables as tables
from _hosts import ROOT, Hosts, ask, sleep
from _tables import ALL, ON_GKE, ON_HOSTS, ON_TPUS, LaunchError, Move, flags, warn

CONTAINER = "/taser_jax/launch/_container.sh"
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=30")
# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]


class _Pod(Hosts):
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

    needed, others = "name zone", f"type {ON_TPUS}"
    install = "bash taser_jax/launch/_install.sh"
    resource, is_queued, max_run_duration = "tpu-vm", False, tables.NOT_GIVEN

    def set_up(self) -> None:
        self.targets = [f"{self.name}-{number}" for number in range(self.slices)] or [self.name]
        for word in self.command:
            # The hosts share nothing but buckets.
            if re.match("--gin.MODEL_DIR=(?!gs://)", word):
                warn(f"{word} is on each host's own disk and is lost with the host; use gs://")
        if self.slices == 1 and not (self.max_run_duration or self.attach):
            self.refuse("--slices is 1; for one slice use launch/tpu_vm.sh")
        for option in tables.OF_NEW_TPUS:
            if getattr(self, option) and not self.type:
                self.refuse(f"--{option} applies to a TPU that is created: give its --type")
        self.price_class = flags(self, "spot", "reserved", "reservation", "max_run_duration")
        if len(self.price_class) > 1:
            self.refuse(f"choose one of {' and '.join(self.price_class)}")
        kind, self.chips = tables.kind_of(self.type or "")
        if self.type and not (kind or self.version):
            known = " ".join(f"{name}-N" for name in tables.KINDS)
            self.refuse(f"--type={self.type}: known are {known}; for another give --version")
        self.runtime = self.version or (kind and kind.runtime)
        self.price, self.price_text = tables.hourly_price(self, not self.price_class)
        self.tunnel = ["--tunnel-through-iap"] if self.iap else flags(self, "internal_ip")
        force = ["--force"] * self.is_queued
        self.deletion = self.words(self.resource, "delete", self.name, *force)
        self.by_hand = shlex.join(self.deletion)
        self.creation = [self._creation_words()] if self.type else []
        self.is_deleted_late = bool(self.type) and self.delete != "never"
        self.is_asked, is_new = bool(self.delete), bool(self.type) and not self.attach
        self.delete = self.delete or ("success" if is_new else "never")

    def plan(self) -> list[str]:
        place, slices = f"{self.name} in {self.zone}", len(self.targets)
        lines = [f"{place}: a TPU that exists; none is created"]
        if self.type:
            lines = [
                f"{place}: {slices} TPU slice{'s' * (slices > 1)} of {self.type}, "
                f"{self.chips * slices or 'unknown'} chips, runtime {self.runtime}",
                f"price: {' '.join(self.price_class) or 'on demand'}; {self.price_text}",
            ]
        lines += super().plan()
        if self.max_hours:
            deleted = " and the TPU is deleted, with what is on its disks" * self.is_deleted_late
            lines.append(f"time: after {self.max_hours:g} h, while this runs, it ends{deleted}")
        there = "" if self.is_asked else ", if its model is in a bucket"
        when = {
            "always": "when the launcher ends, however it ends",
            "success": f"after the command has finished{there}; "
            "otherwise, as after a failure or Ctrl-C, the TPU stays and is billed",
            "never": "never: the TPU stays and is billed",
        }[self.delete]
        return [*lines, f"deletion (--delete={self.delete}): {when}. By hand: {self.by_hand}"]

    def words(self, *request: str) -> list[str]:
        """A gcloud command."""
        # gcloud has these in its alpha commands only.
        alpha = ["alpha"] * bool(self.reservation or self.max_run_duration or self.iap)
        place = [*flags(self, "zone", "project"), "--quiet"]
        return ["gcloud", *alpha, "compute", "tpus", *request, *place]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        return self.words("tpu-vm", "scp", file, f"{node}:{name}", "--worker=all", *self.tunnel)

    def connect_words(self, node: str, command: str) -> list[str]:
        # A connection that is dead is noticed.
        settings = ("--worker=all", f"--command={command}", *self.tunnel)
        return self.words("tpu-vm", "ssh", node, *settings, "--ssh-flag=-oServerAliveInterval=30")

    def _creation_words(self) -> list[str]:
        words = [f"--accelerator-type={self.type}", f"--version={self.runtime}"]
        if self.is_queued:
            several = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
            # gcloud wants a count of at least 2.
            nodes = several if self.slices > 1 else [f"--node-id={self.targets[0]}"]
            words = [*nodes, words[0], f"--runtime-version={self.runtime}"]
        flex_start = ["--provisioning-model=flex-start"] * bool(self.max_run_duration)
        addresses = ["--internal-ips"] * bool(self.internal_ip)
        labels = ",".join(filter(None, [f"launcher={LAUNCHED_BY}", self.labels]))
        words += [*self.price_class, *flex_start, *addresses, f"--labels={labels}", *self.gcloud]
        return self.words(self.resource, "create", self.name, *words)

    def _request(self, words: list[str]) -> None:
        """Asks gcloud for a change."""
        print(shlex.join(words[:6]), "...", file=sys.stderr)
        status, _, errors = ask(words)
        self._check(status, errors)

    def _check(self, status: int, errors: str) -> None:
        """Shows what gcloud says; raises what it means if it refuses."""
        sys.stderr.write(errors)
        if status:
            raise tables.refusal(errors, self.zone)

    def _look(self) -> tuple[str, bool, str]:
        """The resource's state, whether it may be deleted, and all that gcloud says of the state.

        Nothing is ever deleted that others made.

        Raises:
            LaunchError: gcloud does not say.
        """
        words = self.words(self.resource, "describe", self.name, "--format=json")
        status, output, errors = ask(words)
        if status and re.search(r"\bNOT_FOUND\b", errors):
            return "ABSENT", True, ""
        self._check(status, errors)
        node = json.loads(output or "{}")
        state = told = node.get("state")
        if self.is_queued:
            state = (told or {}).get("state")
            node = (node.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {})
        is_ours = node.get("labels", {}).get("launcher") == LAUNCHED_BY
        return state or "UNKNOWN", is_ours, json.dumps(told)

    def _meaning(self, state: str) -> tuple[Move, str]:
        """What to do about a state, and whether it costs money."""
        # A request has many states in which it waits; a TPU VM of an unknown one may be anything.
        unknown = Move.WAIT if self.is_queued else Move.LEAVE
        return tables.STATES.get(state, (unknown, tables.BILLED))

    def is_there(self) -> bool:
        try:
            return self._meaning(self._look()[0])[0] is Move.RUN
        except LaunchError:
            return False

    def make_ready(self) -> None:
        """Creates the TPU where --type allows it, and waits for it, however long.

        What was taken away is requested at once, and once.
        """
        what = f"{'queued resource' if self.is_queued else 'TPU'} {self.name}"
        former, is_renewed = "", False
        while True:
            state, is_ours, told = self._look()
            if state != former:
                print(f"{what}: {state}")
            former, (move, _) = state, self._meaning(state)
            if move is Move.RUN:
                return
            if move is not Move.WAIT:
                if move is Move.LEAVE or not (self.type and is_ours):
                    raise LaunchError(
                        f"TPU {self.name} in {self.zone} is {state}, expected READY, or a "
                        "--type and none that others made\n  fix: start it, give another --name or "
                        f"a --type, or delete it: {self.by_hand}"
                    )
                if move is not Move.CREATE:
                    self._request(self.deletion)
                if move is Move.FAILED:
                    # Only a lack of capacity may change by itself.
                    print(f"{what} FAILED: {told}", file=sys.stderr)
                    raise tables.refusal(told, self.zone, f"{what}: FAILED, ")
                if move is Move.REPLACE and is_renewed:
                    raise LaunchError(f"{what}: {state}", tables.AGAIN)
                is_renewed = is_renewed or move is Move.REPLACE
                for words in self.creation:
                    self._request(words)
                if not self.is_queued:
                    return
            sleep(self.retry_seconds)

    def farewell(self, status: int) -> None:
        """Deletes the TPU if that is asked for; the last line says whether it is still billed."""
        rate = self.steps_per_second
        if self.price and rate:
            cost = self.price / 3600 * 1000 / rate
            print(f"cost: about ${cost:.2f} for 1,000 steps, at {rate:g} steps a second")
        last = f"may still run and be billed; delete it: {self.by_hand}"
        try:
            state, is_ours, _ = self._look()
            if state == "ABSENT":
                last = "does not exist; nothing is billed"
            elif why := self._why_it_stays(is_ours, status):
                last = f"is {state}{self._meaning(state)[1]} ({why}): {self.by_hand}"
            else:
                self._request(self.deletion)
                last = "was deleted; nothing is billed any more"
        except LaunchError:
            pass  # gcloud does not tell the state, or has not deleted it.
        finally:
            print(f"TPU {self.name} {last}", file=sys.stderr)

    def _why_it_stays(self, is_ours: bool, status: int) -> str:
        """Why the TPU is not deleted; empty where it is."""
        is_finished = status == tables.FINISHED
        if not (status == tables.TIMED_OUT and self.is_deleted_late):
            if self.delete == "never":
                return "as you say" if self.is_asked else "give --delete=success to delete it"
            if self.delete == "success" and not is_finished:
                return "the command has not finished; --delete=success"
        if not is_ours:
            return "others made it"
        if self.is_asked or not is_finished:
            return ""
        if not self.output:
            return "the command has reported no model in a bucket"
        address = self.output.rstrip("/") + "/"
        words = ["gcloud", "storage", "ls", address, *flags(self, "project"), "--quiet"]
        status, lines, errors = ask(words)
        sys.stderr.write(errors)
        # A folder made by hand is an object of that name.
        is_there = not status and set(lines.splitlines()) - {address, ""}
        return "" if is_there else f"gcloud found nothing in {address}, or could not look"


class _Slices(_Pod):
    r"""Runs taser on several slices, requested as one queued resource.

      launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 \
        --data=gs://BUCKET/tokens -- train --gin_file=runs/taser_base.gin \
        --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data
      launch/tpu_multislice.sh --attach NAME --zone=ZONE --slices=N        follows what runs there

    `train` without MESH_REPLICA gets --gin.MESH_REPLICA=N. --slices=1
    is for --max_run_duration. Exit statuses and the last line are those of launch/tpu_vm.sh.
    """

    needed, others = "name zone type slices", f"max_run_duration {ON_TPUS}"
    resource, is_queued = "queued-resources", True


class _Machines(Hosts):
    r"""Runs taser on a list of machines, by ssh, which must not ask for a password.

      launch/hosts.sh --hosts=a.example.org,b.example.org --extra=cuda -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens
      launch/hosts.sh --hosts=a.example.org,b.example.org --attach      follows what runs there

    Exit statuses are those of launch/tpu_vm.sh.
    """

    needed, others = "hosts", f"port extra {ON_HOSTS}"

    def set_up(self) -> None:
        self.targets = self.hosts.split(",")
        extra = f"[{self.extra}]" if self.extra else ""
        self.install = f"cd taser_jax && . launch/_environment.sh && use_environment '{extra}'"

    def plan(self) -> list[str]:
        first = f"{len(self.targets)} hosts, {self.targets[0]} first"
        return [f"{first}; nothing is created, so nothing is deleted", *super().plan()]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        return ["scp", *SSH_OPTIONS, "-q", file, f"{node}:{name}"]

    def connect_words(self, node: str, command: str) -> list[str]:
        return ["ssh", *SSH_OPTIONS, node, command]

    def variables(self, node: str) -> list[str]:
        return [
            f"JAX_COORDINATOR_ADDRESS={self.targets[0].rpartition('@')[2]}:{self.port}",
            f"JAX_NUM_PROCESSES={len(self.targets)}",
            f"JAX_PROCESS_ID={self.targets.index(node)}",
        ]

    def is_there(self) -> bool:
        return not any(self.show(self.connect_words(node, "true")) for node in self.targets)


class _Slurm(Hosts):
    r"""Runs taser on Slurm, one process per node, from this checkout on a shared file system.

      launch/slurm.sh --nodes=4 --slurm --partition=gpu --gpus-per-node=8 --time=24:00:00 -- \
        train --gin_file=runs/taser_base.gin --gin.MODEL_DIR=/shared/taser \
        --gin.TOKEN_STORE=/shared/tokens

    The checkout needs a .venv, for example from: . launch/_environment.sh; use_environment '[cuda]'
    Exit statuses are those of launch/tpu_vm.sh. To end a run after a time: --slurm --time=10:00:00
    """

    needed, others = "nodes", f"slurm {ALL}"
    goes_on, skip_install = False, True

    def plan(self) -> list[str]:
        nodes = f"{self.nodes} nodes of a Slurm cluster, one process each"
        return [f"{nodes}; Slurm frees them at the end", *super().plan()]

    def run_words(self, node: str) -> list[str]:
        # A process that fails ends the others, so that none waits for it. Slurm sends SIGTERM to
        # the shell alone, which passes it on.
        srun = ("srun", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
        environment = ["env", *self.env] if self.env else []
        taser = os.environ.get("TASER", str(ROOT / ".venv/bin/taser"))
        task = ("bash", str(ROOT / "launch/_task.sh"), *environment, taser)
        return [*srun, *self.slurm, *task, *self.command, "--multihost"]


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

    needed, others = "cluster workload type image", ON_GKE
    goes_on, slices = False, 1

    def set_up(self) -> None:
        # xpk refuses longer names, but only after the image has been built.
        if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.workload):
            self.refuse("--workload: expected up to 40 lower-case letters, digits and dashes")
        # The cluster does what launchers do elsewhere.
        self.restarts, self.retries = self.retries, 0
        self.hours, self.max_hours = self.max_hours, 0
        self.skip_install, self.pinned = self.skip_build, self.image
        # Without its tag: `host:5000/r/taser:1` is in host:5000/r/taser.
        self.repository = re.sub(":[^/]*$", "", self.image)
        if not self.skip_build:
            self.pinned = f"{self.repository}@sha256:DIGEST"
        elif "@sha256:" not in self.image:
            warn(f"{self.image} may name another image at a restart; use IMAGE@sha256:DIGEST")

    def plan(self) -> list[str]:
        place = flags(self, "workload", "cluster", "zone", "project")
        delete = shlex.join(["xpk", "workload", "delete", *place])
        return [
            f"workload {self.workload} on cluster {self.cluster}: {self.slices} "
            f"slice{'s' * (self.slices > 1)} of {self.type}, image {self.image}",
            "price: that of the cluster's nodes, or what --xpk asks for (--spot, "
            f"--reservation=NAME, --flex); {tables.hourly_price(self, True)[1]}",
            f"retries: {self.restarts}, by the cluster; {self.grace_seconds} s to save before "
            "a pod ends",
            f"deletion: nodes are billed while the cluster has them. The workload's: {delete}",
        ]

    def preparation(self, node: str) -> list[list[str]]:
        """Builds and pushes the image of this checkout."""
        if self.skip_build:
            return []
        folder, image = f"{self.scratch}/taser_jax", self.image
        recipe = ("--platform=linux/amd64", f"--file={folder}/launch/Dockerfile", f"--tag={image}")
        unpack = ["tar", "-xzf", self.archive, "-C", folder]
        build = ["docker", "build", *recipe, folder]
        return [["mkdir", "-p", folder], unpack, build, ["docker", "push", image]]

    def follow(self, node: str) -> tuple[list[int], int]:
        """Starts the workload, with the image by its digest: a tag may get another one later."""
        if not self.skip_build:
            digests = "--format={{range .RepoDigests}}{{println .}}{{end}}"
            _, output, errors = ask(["docker", "image", "inspect", digests, self.image])
            names = [name for name in output.split() if name.startswith(f"{self.repository}@")]
            if not names:
                raise LaunchError(
                    f"docker has no digest of {self.image} after its push {errors.strip()}"
                    "\n  fix: give --image=IMAGE@sha256:DIGEST and --skip_build"
                )
            self.pinned = names[0]
        # No host reports: xpk ends when the cluster has the workload.
        return [self.show(self.run_words(node))], 0

    def run_words(self, node: str) -> list[str]:
        # The status of `timeout`, 124, is not one that xpk restarts.
        limit = ["timeout", f"--kill-after={self.grace_seconds}", f"{self.hours:g}h"]
        settings = [*self.env, *(limit if self.hours else [])]
        pod = ["bash", CONTAINER, self.data or "", *self.command, "--multihost"]
        # A missing program would end the shell with 127, for which xpk would restart it.
        start = f"test -e {CONTAINER} || exit 2; {shlex.join(['exec', 'env', *settings, *pod])}"
        return [
            *("xpk", "workload", "create", *flags(self, "cluster", "workload")),
            *(f"--tpu-type={self.type}", f"--num-slices={self.slices}"),
            *(*flags(self, "zone", "project"), f"--docker-image={self.pinned}"),
            # What ends with 75 was preempted.
            *(f"--max-restarts={self.restarts}", "--restart-on-exit-codes=75"),
            f"--termination-grace-period-seconds={self.grace_seconds}",
            *(*self.xpk, f"--command={start}"),
        ]


FLOWS = dict(tpu_vm=_Pod, tpu_multislice=_Slices, hosts=_Machines, slurm=_Slurm, gke_xpk=_Workload)

# A terminal that is closed turns what is printed to it into an error, before anything is deleted.
TERMINALS = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]


def _stop(number: int, _: object) -> None:
    # A terminal that closes sends it twice, as the kernel and as the shell: once ends the run.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
    launcher = FLOWS[name](f"launch/{name}.sh", words[1:])
    with tempfile.TemporaryDirectory() as launcher.scratch:
        return launcher.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
