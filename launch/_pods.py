"""TPU VMs and queued resources: creation, states, the plan, and what is billed at the end."""

from __future__ import annotations

import argparse
import getpass
import itertools
import json
import re
import shlex
import sys

import _tables as tables
from _hosts import Hosts, ask, sleep
from _outputs import KeptError, outputs
from _tables import OF_NEW_TPUS, LaunchError, Move, UsageError, flags

# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]
# How often a TPU VM is looked at that is neither ready nor gone.
LOOKS = 30


def _price_class(options: argparse.Namespace) -> str:
    """Checks what a new TPU is to have; returns its class of price."""
    for name in OF_NEW_TPUS.split():
        if getattr(options, name) and not options.type:
            raise UsageError(f"--{name} applies to a TPU that is created: give its --type")
    if bool(options.network) != bool(options.subnetwork):
        raise UsageError("--network and --subnetwork go together: there is no default for one")
    chosen = [text for name, text in tables.PRICE_CLASSES.items() if getattr(options, name)]
    if len(chosen) > 1:
        raise UsageError("choose one of --spot, --reserved, --reservation and --max_run_duration")
    return chosen[0].format(**vars(options)) if chosen else tables.ON_DEMAND


def _unasked_deletion(options: argparse.Namespace) -> tuple[list[str], str]:
    """What decides if --delete is not given.

    Returns:
        Addresses that must hold results before the TPU is deleted; why it stays, if it does.
    """
    if options.attach:
        return [], "attached; give --delete=success to delete it"
    if not options.type:
        return [], "the launcher did not create it"
    try:
        return outputs(options.command, line_only=options.skip_install), ""
    except KeptError as reason:
        return [], str(reason)


class Pod(Hosts):
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

    install = "bash taser_jax/launch/_install.sh"
    resource, is_queued = "tpu-vm", False

    def __init__(self, options: argparse.Namespace) -> None:
        self.name = options.name
        slices = [f"{self.name}-{number}" for number in range(options.slices)]
        gcloud = "https://cloud.google.com/sdk/docs/install"
        super().__init__(options, slices or [self.name], gcloud=gcloud)
        self.tunnel = flags(options, "internal_ip")
        if options.iap:
            self.tunnel = ["--tunnel-through-iap"]
        self.price_class = _price_class(options)
        if options.type:
            self.kind = tables.kind_of(options.type, options.version)
            options.version = options.version or self.kind.runtime
        self.price, self.price_text = tables.hourly_price(options, self.price_class)
        self.is_deleted_late = bool(options.type) and options.delete != "never"
        self.outputs: list[str] = []
        self.why_it_stays = "as you say"
        if not options.delete:
            self.outputs, self.why_it_stays = _unasked_deletion(options)
            options.delete = "never" if self.why_it_stays else "success"

    def plan(self) -> list[str]:
        options, place = self.options, f"{self.name} in {self.options.zone}"
        lines = [f"{place}: a TPU that exists; none is created"]
        if options.type:
            slices, (kind, _, size) = len(self.nodes), options.type.rpartition("-")
            chips = int(size) // self.kind.cores * slices
            counted = f", {chips} chips" if kind in tables.KINDS else ""
            quota, preemptible = self.kind.quota, options.spot or options.max_run_duration
            lines = [
                f"{place}: {slices} TPU slice{'s' * (slices > 1)} of {options.type}{counted}, "
                f"runtime {options.version}",
                f"price: {self.price_class}",
                f"cost: {self.price_text}",
                f"quota: {quota}{'Preemptible' if preemptible else ''}PerProjectPerZoneForTPUAPI "
                "or a similar one; yours: gcloud beta quotas info list "
                "--service=tpu.googleapis.com "
                f"--project={options.project or 'PROJECT'} --filter=quotaId:{quota}",
            ]
        lines += super().plan()
        if options.max_hours:
            deleted = " and the TPU is deleted, with what is on its disks" * self.is_deleted_late
            lines.append(
                f"time: after {options.max_hours:g} h the run ends{deleted}; "
                "keep the launcher running"
            )
        there = "".join(f", if {address} is not empty" for address in self.outputs)
        when = {
            "always": "when the launcher ends, however it ends",
            "success": f"after the command has finished{there}; "
            "after a failure or Ctrl-C the TPU stays and is billed",
            "never": f"never ({self.why_it_stays}): the TPU stays and is billed",
        }[options.delete]
        by_hand = shlex.join(self._deletion())
        return [*lines, f"deletion (--delete={options.delete}): {when}. By hand: {by_hand}"]

    def words(self, *request: str) -> list[str]:
        """A gcloud command."""
        options = self.options
        # gcloud has these in its alpha commands only.
        alpha = ["alpha"] if options.reservation or options.max_run_duration or options.iap else []
        place = [*flags(options, "zone", "project"), "--quiet"]
        return ["gcloud", *alpha, "compute", "tpus", *request, *place]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        return self.words("tpu-vm", "scp", file, f"{node}:{name}", "--worker=all", *self.tunnel)

    def connect_words(self, node: str, command: str) -> list[str]:
        # A connection that is dead is noticed.
        settings = ("--worker=all", f"--command={command}", *self.tunnel)
        return self.words("tpu-vm", "ssh", node, *settings, "--ssh-flag=-oServerAliveInterval=30")

    def creation(self) -> list[list[str]]:
        options = self.options
        if not options.type:
            return []
        nodes, runtime = [], f"--version={options.version}"
        if self.is_queued:
            # gcloud wants a count of at least 2.
            nodes = [f"--node-count={options.slices}", f"--node-prefix={self.name}"]
            nodes = nodes if options.slices > 1 else [f"--node-id={self.nodes[0]}"]
            runtime = f"--runtime-version={options.version}"
        labels = ",".join(filter(None, [f"launcher={LAUNCHED_BY}", options.labels]))
        words = [
            *(*nodes, f"--accelerator-type={options.type}", runtime),
            *flags(options, "spot", "reserved"),
            *(["--provisioning-model=flex-start"] if options.max_run_duration else []),
            *flags(options, "reservation", "max_run_duration", "network", "subnetwork"),
            *(["--internal-ips"] if options.internal_ip else []),
            *flags(options, "service_account", "data_disk"),
            *(f"--labels={labels}", *options.gcloud),
        ]
        return [self.words(self.resource, "create", self.name, *words)]

    def _deletion(self) -> list[str]:
        return self.words(self.resource, "delete", self.name, *(["--force"] * self.is_queued))

    def _request(self, words: list[str]) -> None:
        """Asks gcloud for a change."""
        print(shlex.join(words[:6]), "...", file=sys.stderr)
        status, _, errors = ask(words)
        sys.stderr.write(errors)
        if status:
            raise tables.refusal(errors, self.options.zone)

    def _look(self) -> tuple[str, dict]:
        """The resource's state, ABSENT if it does not exist, and gcloud's description of it.

        Raises:
            LaunchError: gcloud does not say.
        """
        words = self.words(self.resource, "describe", self.name, "--format=json")
        status, output, errors = ask(words)
        if status == 0:
            description = json.loads(output or "{}")
            state = description.get("state")
            if self.is_queued and state:
                state = state.get("state")
            return state or "UNKNOWN", description
        if re.search(r"\bNOT_FOUND\b", errors):
            return "ABSENT", {}
        sys.stderr.write(errors)
        raise tables.refusal(errors, self.options.zone)

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
        """Creates the TPU where --type allows it, and waits for it.

        A request waits in its queue however long, a TPU VM is looked at LOOKS times. What was taken
        away is requested at once, and once.
        """
        what = f"{'queued resource' if self.is_queued else 'TPU'} {self.name}"
        former, is_renewed = "", False
        for looks in itertools.count():
            state, description = self._look()
            if state != former:
                print(f"{what}: {state}")
            former, (move, _) = state, self._meaning(state)
            if move is Move.RUN:
                return
            if move is Move.LEAVE or not (self.options.type or move is Move.WAIT):
                raise self._left(state, move)
            if move is Move.WAIT and looks == LOOKS and not self.is_queued:
                raise LaunchError(f"{what} is still {state}", tables.AGAIN)
            if move in (Move.REPLACE, Move.FAILED):
                if not self._is_ours(description):
                    raise self._left(state, move)
                self._request(self._deletion())
            if move is Move.FAILED:
                # Only a lack of capacity may change by itself.
                why = json.dumps(description["state"])
                print(f"{what} FAILED: {why}", file=sys.stderr)
                raise tables.refusal(why, self.options.zone, f"{what}: FAILED, ")
            if move is Move.REPLACE and is_renewed:
                raise LaunchError(f"{what}: {state}", tables.AGAIN)
            if move is not Move.WAIT:
                is_renewed = is_renewed or move is Move.REPLACE
                for words in self.creation():
                    self._request(words)
                if not self.is_queued:
                    return
            sleep(self.options.retry_seconds)

    def _left(self, state: str, move: Move) -> LaunchError:
        name, zone, fix = self.name, self.options.zone, "give --type=TYPE to create it"
        if move is Move.LEAVE:
            start = f"gcloud compute tpus tpu-vm start {name} --zone={zone}"
            fix = f"{start}, or delete it so that it is created again"
        elif move in (Move.REPLACE, Move.FAILED):
            state = f"{state} and not this launcher's"
            fix = f"give another --name, or delete it: {shlex.join(self._deletion())}"
        return LaunchError(f"TPU {name} in {zone} is {state}, expected READY\n  fix: {fix}")

    def _is_ours(self, description: dict) -> bool:
        """Whether a launcher made it: nothing else is ever deleted."""
        node = description
        if self.is_queued:
            node = (description.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {})
        return node.get("labels", {}).get("launcher") == LAUNCHED_BY

    def farewell(self, status: int) -> None:
        """Deletes the TPU if that is asked for; the last line says whether it is still billed."""
        rate, by_hand = self.steps_per_second, shlex.join(self._deletion())
        if self.price and rate:
            cost = self.price / 3600 * 1000 / rate
            print(f"cost: about ${cost:.2f} for 1,000 steps, at {rate:g} steps a second")
        last = f"may still run and be billed; delete it: {by_hand}"
        try:
            state, description = self._look()
            why_it_stays = self._delete(description, status) if state != "ABSENT" else ""
            if state == "ABSENT":
                last = "does not exist; nothing is billed"
            elif why_it_stays:
                last = f"is {state}{self._meaning(state)[1]} ({why_it_stays}): {by_hand}"
            else:
                last = "was deleted; nothing is billed any more"
        except LaunchError:
            # gcloud does not tell the state.
            return
        finally:
            print(f"TPU {self.name} {last}", file=sys.stderr)

    def _delete(self, description: dict, status: int) -> str:
        """Deletes the TPU, or returns why it stays."""
        delete, is_finished = self.options.delete, status == tables.FINISHED
        if not (status == tables.TIMED_OUT and self.is_deleted_late):
            if delete == "never":
                return self.why_it_stays
            if delete == "success" and not is_finished:
                return "the command has not finished; --delete=success"
        if not self._is_ours(description):
            return "others made it"
        # What is deleted has its results where they belong.
        for output in self.outputs if is_finished else ():
            address = output.rstrip("/") + "/"
            project = flags(self.options, "project")
            status, lines, errors = ask(["gcloud", "storage", "ls", address, *project, "--quiet"])
            sys.stderr.write(errors)
            if status:
                return f"gcloud found nothing in {address}, or could not look"
            # A folder made by hand is an object of that name.
            if not set(lines.splitlines()) - {address, ""}:
                return f"{address} is empty"
        try:
            self._request(self._deletion())
        except LaunchError:
            return "gcloud did not delete it"
        return ""


class Slices(Pod):
    r"""Runs taser on several slices, requested as one queued resource.

      launch/tpu_multislice.sh --name=taser --zone=us-east5-b --type=v5litepod-64 --slices=2 \
        --data=gs://BUCKET/tokens -- train --gin_file=runs/taser_base.gin \
        --gin.MODEL_DIR=gs://BUCKET/taser --gin.TOKEN_STORE=data
      launch/tpu_multislice.sh --attach NAME --zone=ZONE --slices=N        follows what runs there

    `train` without MESH_REPLICA gets --gin.MESH_REPLICA=N. --slices=1
    is for --max_run_duration. Exit statuses and the last line are those of launch/tpu_vm.sh.
    """

    resource, is_queued = "queued-resources", True

    def __init__(self, options: argparse.Namespace) -> None:
        if options.slices == 1 and not (options.max_run_duration or options.attach):
            raise UsageError("--slices is 1; for one slice use launch/tpu_vm.sh")
        super().__init__(options)
