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
from _hosts import Hosts, Shell
from _outputs import KeptError, outputs
from _tables import OF_NEW_TPUS, LaunchError, Move, UsageError, flags

# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]
# How often a TPU VM is looked at that is neither ready nor gone.
LOOKS = 30


def _price_class(options: argparse.Namespace) -> str:
    """Checks what a new TPU is to have; returns its class of price."""
    for name in OF_NEW_TPUS:
        if getattr(options, name) and not options.type:
            raise UsageError(f"--{name} applies to a TPU that is created: give its --type")
    if bool(options.network) != bool(options.subnetwork):
        raise UsageError("--network and --subnetwork go together: there is no default for one")
    chosen = [text for name, text in tables.PRICE_CLASSES.items() if getattr(options, name)]
    if len(chosen) > 1:
        raise UsageError("choose one of --spot, --reserved, --reservation and --max_run_duration")
    return chosen[0].format(**vars(options)) if chosen else "on demand"


def _kind_of(type_: str, version: str | None) -> tables.Kind:
    """The row of a type."""
    kind, _, size = type_.rpartition("-")
    row = tables.KINDS.get(kind, tables.Kind(1, version, "TPU"))
    if kind in ("tpu7x", "v7x"):
        wrong = ": there are no TPU VMs of TPU7x; use launch/gke_xpk.sh"
    elif not re.fullmatch("[a-z0-9]+-[1-9][0-9]*", type_):
        wrong = ", expected KIND-SIZE, for example v5litepod-16"
    elif not row.runtime:
        names = " ".join(f"{name}-N" for name in tables.KINDS)
        wrong = f"; known are {names}. For another, give --version=RUNTIME"
    elif int(size) % row.cores:
        wrong = f", expected an even number of cores: {kind} has two to a chip"
    else:
        return row
    raise UsageError(f"--type is '{type_}'{wrong}")


class Pod(Hosts):
    """One TPU VM, or with --slices several as a queued resource."""

    install = "bash taser_jax/launch/_install.sh"

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        self.name, self.is_queued = options.name, options.slices > 0
        nodes = [f"{self.name}-{number}" for number in range(options.slices)] or [self.name]
        super().__init__(shell, options, nodes)
        shell.require("gcloud", "https://cloud.google.com/sdk/docs/install")
        self.resource = "queued-resources" if self.is_queued else "tpu-vm"
        self.tunnel = ["--tunnel-through-iap"] if options.iap else []
        if options.internal_ip and not options.iap:
            self.tunnel = ["--internal-ip"]
        self.price_class = _price_class(options)
        # Of an hour, in dollars.
        self.price = options.price_per_hour
        if options.type:
            self.row = _kind_of(options.type, options.version)
            options.version = options.version or self.row.runtime
            price, self.price_text = tables.hourly_price(options.type, len(nodes), self.price)
            if self.price_class == "on demand":
                # The list has no other class; spot costs less, by zone and day.
                self.price = price
        # Addresses that must hold results before a deletion that nobody has asked for.
        self.outputs: list[str] = []
        # Why the TPU stays.
        self.kept = "as you say" if options.delete == "never" else ""
        self.is_deleted_late = bool(options.type) and not self.kept
        if not options.delete:
            self._decide_deletion()

    def _decide_deletion(self) -> None:
        options = self.options
        options.delete = "never"
        if options.attach:
            self.kept = "attached; give --delete=success to delete it"
        elif not options.type:
            self.kept = "the launcher did not create it"
        else:
            try:
                self.outputs = outputs(options.command, line_only=options.skip_install)
                options.delete = "success"
            except KeptError as reason:
                self.kept = str(reason)

    def plan(self) -> list[str]:
        options, place = self.options, f"{self.name} in {self.options.zone}"
        lines = [f"{place}: a TPU that exists; none is created"]
        if options.type:
            slices, (kind, _, size) = len(self.nodes), options.type.rpartition("-")
            chips = int(size) // self.row.cores * slices
            counted = f", {chips} chips" if kind in tables.KINDS else ""
            quota, preemptible = self.row.quota, options.spot or options.max_run_duration
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
        lines.append(self.retries("after a preemption or while there is no capacity"))
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
            "never": f"never ({self.kept}): the TPU stays and is billed",
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

    def _deletion(self) -> list[str]:
        return self.words(self.resource, "delete", self.name, *(["--force"] * self.is_queued))

    def _create(self) -> None:
        options = self.options
        if self.is_queued:
            # gcloud wants a count of at least 2.
            nodes = [f"--node-count={options.slices}", f"--node-prefix={self.name}"]
            nodes = nodes if options.slices > 1 else [f"--node-id={self.nodes[0]}"]
            runtime = f"--runtime-version={options.version}"
        else:
            nodes, runtime = [], f"--version={options.version}"
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
        self._request(self.words(self.resource, "create", self.name, *words))

    def _request(self, words: list[str]) -> None:
        """Asks gcloud for a change."""
        if self.shell.dry_run:
            self.shell.step(words)
            return
        print(shlex.join(words[:6]), "...", file=sys.stderr)
        status, _, errors = self.shell.ask(words)
        sys.stderr.write(errors)
        if status:
            raise tables.refusal(errors, self.options.zone)

    def look(self) -> tuple[str, dict]:
        """The resource's state, ABSENT if it does not exist, and gcloud's description of it.

        Raises:
            LaunchError: gcloud does not say.
        """
        words = self.words(self.resource, "describe", self.name, "--format=json")
        status, output, errors = self.shell.ask(words)
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
            return self._meaning(self.look()[0])[0] is Move.RUN
        except LaunchError:
            return False

    def make_ready(self) -> None:
        """Creates the TPU where --type allows it, and waits for it.

        A request waits in its queue however long, a TPU VM is looked at LOOKS times. What was taken
        away is requested at once, and once.
        """
        if self.shell.dry_run:
            if self.options.type:
                self._create()
            return
        what = f"{'queued resource' if self.is_queued else 'TPU'} {self.name}"
        former, is_renewed = "", False
        for looks in itertools.count():
            state, description = self.look()
            move, _ = self._meaning(state)
            if state != former:
                print(f"{what}: {state}")
            former = state
            if move is Move.RUN:
                return
            if move is Move.LEAVE or not (self.options.type or move is Move.WAIT):
                raise self._left(state, move)
            if move is Move.WAIT and looks == LOOKS and not self.is_queued:
                raise LaunchError(f"{what} is still {state}", tables.AGAIN)
            if move in (Move.REPLACE, Move.FAILED):
                self._request(self._deletion())
                if move is Move.FAILED:
                    # Only a lack of capacity may change by itself.
                    why = json.dumps(description["state"])
                    print(f"{what} FAILED: {why}", file=sys.stderr)
                    end = tables.refusal(why, self.options.zone)
                    raise LaunchError(f"{what}: FAILED, {end}", end.status)
                if is_renewed:
                    raise LaunchError(f"{what}: {state}", tables.AGAIN)
                is_renewed = True
            if move is not Move.WAIT:
                self._create()
                if not self.is_queued:
                    return
            self.shell.sleep(self.options.retry_seconds)

    def _left(self, state: str, move: Move) -> LaunchError:
        name, zone, fix = self.name, self.options.zone, "give --type=TYPE to create it"
        if move is Move.LEAVE:
            start = f"gcloud compute tpus tpu-vm start {name} --zone={zone}"
            fix = f"{start}, or delete it so that it is created again"
        return LaunchError(f"TPU {name} in {zone} is {state}, expected READY\n  fix: {fix}")

    def farewell(self, status: int, steps_per_second: float) -> None:
        """Deletes the TPU if that is asked for; the last line says whether it is still billed."""
        if self.price and steps_per_second:
            cost = self.price / 3600 * 1000 / steps_per_second
            print(
                f"cost: about ${cost:.2f} for 1,000 steps, at {steps_per_second:g} steps a second"
            )
        what, by_hand = f"TPU {self.name}", shlex.join(self._deletion())
        last = f"{what} may still run and be billed; delete it: {by_hand}"
        try:
            state, description = self.look()
            kept = self._delete(description, status) if state != "ABSENT" else ""
            if state == "ABSENT":
                last = f"{what} does not exist; nothing is billed"
            elif kept:
                last = f"{what} is {state}{self._meaning(state)[1]} ({kept}): {by_hand}"
            else:
                last = f"{what} was deleted; nothing is billed any more"
        except LaunchError:
            # gcloud does not tell the state.
            return
        finally:
            print(last, file=sys.stderr)

    def _delete(self, description: dict, status: int) -> str:
        """Deletes the TPU, or returns why it stays."""
        delete = self.options.delete
        is_late = status == tables.TIMED_OUT and self.is_deleted_late
        if not is_late and delete == "never":
            return self.kept
        if not is_late and delete == "success" and status != tables.FINISHED:
            return "the command has not finished; --delete=success"
        # Only what this launcher made for this user, if results are where they belong.
        node = description
        if self.is_queued:
            node = (description.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {})
        if node.get("labels", {}).get("launcher") != LAUNCHED_BY:
            return "others made it"
        for output in self.outputs if status == tables.FINISHED else ():
            address = output.rstrip("/") + "/"
            project = flags(self.options, "project")
            words = ["gcloud", "storage", "ls", address, *project, "--quiet"]
            listed, lines, errors = self.shell.ask(words)
            sys.stderr.write(errors)
            if listed:
                return f"gcloud found nothing in {address}, or could not look"
            # A folder made by hand is an object of that name.
            if not set(lines.splitlines()) - {address, ""}:
                return f"{address} is empty"
        try:
            self._request(self._deletion())
        except LaunchError:
            return "gcloud did not delete it"
        return ""
