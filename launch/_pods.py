"""TPU VMs and queued resources: creation, states, the plan, and what is billed at the end."""

from __future__ import annotations

import argparse
import getpass
import itertools
import json
import re
import shlex
import sys

from _attempts import AttemptError
from _options import OF_NEW_TPUS, UsageError
from _outputs import KeptError, outputs
from _shell import Shell, read_json
from _tables import (
    AGAIN,
    BILLED,
    FINISHED,
    KINDS,
    MEND,
    PRICE_CLASSES,
    QUOTA,
    STATES,
    TIMED_OUT,
    Kind,
    Move,
    error_kind,
    hourly_price,
)

# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]
# How often a TPU VM is looked at that is neither ready nor gone.
LOOKS = 30
INSTALL = (
    "mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && bash taser_jax/launch/_install.sh"
)


def _check_new(options: argparse.Namespace) -> str:
    """Checks what a new TPU is to have; returns its class of price."""
    for name in OF_NEW_TPUS:
        if getattr(options, name) and not options.type:
            raise UsageError(f"--{name} applies to a TPU that is created: give its --type")
    chosen = [text for name, text in PRICE_CLASSES.items() if getattr(options, name)]
    if len(chosen) > 1:
        raise UsageError("choose one of --spot, --reserved, --reservation and --max_run_duration")
    if bool(options.network) != bool(options.subnetwork):
        raise UsageError("--network and --subnetwork go together: there is no default for one")
    for label in filter(None, (options.labels or "").split(",")):
        if not re.fullmatch(r"[a-z][-a-z0-9_]{0,62}=[-a-z0-9_]{0,63}", label):
            raise UsageError(
                f"--labels has '{label}', expected KEY=VALUE of lower-case letters, digits, "
                "- and _, the key from a letter on"
            )
    if options.delete not in (None, "always", "success", "never"):
        raise UsageError(f"--delete is '{options.delete}', expected always, success or never")
    return chosen[0].format(**vars(options)) if chosen else "on demand"


def _kind_of(type_: str, version: str | None) -> Kind:
    """The row of a type."""
    kind, _, size = type_.rpartition("-")
    if kind in ("tpu7x", "v7x"):
        raise UsageError(
            f"--type is '{type_}': there are no TPU VMs of TPU7x; use launch/gke_xpk.sh"
        )
    if not re.fullmatch("[a-z0-9]+-[1-9][0-9]*", type_):
        raise UsageError(f"--type is '{type_}', expected KIND-SIZE, for example v5litepod-16")
    if kind not in KINDS and not version:
        known = " ".join(f"{name}-N" for name in KINDS)
        raise UsageError(
            f"--type is '{type_}'; known are {known}. For another, give --version=RUNTIME"
        )
    row = KINDS.get(kind, Kind(1, version, "TPU"))
    if int(size) % row.cores:
        raise UsageError(
            f"--type is '{type_}', expected an even number of cores: {kind} has two to a chip"
        )
    return row


class Pod:
    """One TPU VM, or with --slices several as a queued resource.

    Args:
        shell: what runs commands.
        options: of the command line, `slices` included (0: a TPU VM).
    """

    install = INSTALL

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        self.shell, self.options, self.name = shell, options, options.name
        self.is_queued = options.slices > 0
        self.resource = "queued-resources" if self.is_queued else "tpu-vm"
        self.nodes = [f"{self.name}-{number}" for number in range(options.slices)] or [self.name]
        self.price_class = _check_new(options)
        self.price: float | None = options.price_per_hour
        if options.type:
            self.row = _kind_of(options.type, options.version)
            options.version = options.version or self.row.runtime
            self.price, self.price_text = hourly_price(
                options.type, len(self.nodes), options.price_per_hour
            )
            if self.price_class != "on demand":
                # The list has prices on demand alone; spot costs less, by zone and day.
                self.price = options.price_per_hour
        # Addresses that must hold results before a deletion that nobody has asked for.
        self.outputs: list[str] = []
        # Why the TPU stays.
        self.kept = "as you say" if options.delete == "never" else ""
        self.is_never = options.delete == "never"
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

    def plan(self) -> str:
        """What the launcher will do, as comments before the commands that --dry_run prints."""
        options, place = self.options, f"{self.name} in {self.options.zone}"
        lines = [f"{place}: a TPU that exists; none is created"]
        if options.type:
            slices, (kind, _, size) = len(self.nodes), options.type.rpartition("-")
            chips = int(size) // self.row.cores * slices
            counted = f", {chips} chips" if kind in KINDS else ""
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
        lines.append(
            f"retries: {options.retries}, after a preemption or while there is no capacity, "
            f"{options.retry_seconds} s apart"
        )
        if options.max_hours:
            deleted = options.type and not self.is_never
            lines.append(
                f"time: after {options.max_hours:g} h the run ends"
                f"{' and the TPU is deleted, with what is on its disks' if deleted else ''}; "
                "keep the launcher running"
            )
        there = "".join(f", if {address} is not empty" for address in self.outputs)
        when = {
            "always": "when the launcher ends, however it ends",
            "success": f"after the command has finished{there}; "
            "after a failure or Ctrl-C the TPU stays and is billed",
            "never": f"never ({self.kept}): the TPU stays and is billed",
        }[options.delete]
        lines.append(f"deletion (--delete={options.delete}): {when}. By hand: {self._by_hand()}")
        return "\n".join(f"# {line}" for line in lines)

    def words(self, *request: str) -> list[str]:
        """A gcloud command."""
        options, flags = self.options, []
        if request[1] in ("ssh", "scp") and (options.iap or options.internal_ip):
            flags.append("--tunnel-through-iap" if options.iap else "--internal-ip")
        if request[1] == "ssh":
            # A connection that is dead is noticed.
            flags.append("--ssh-flag=-oServerAliveInterval=30")
        # gcloud has these in its alpha commands only.
        alpha = ["alpha"] if options.reservation or options.max_run_duration or options.iap else []
        project = [f"--project={options.project}"] if options.project else []
        place = [f"--zone={options.zone}", *project, "--quiet"]
        return ["gcloud", *alpha, "compute", "tpus", *request, *flags, *place]

    def send_words(self, node: str, file: str, name: str) -> list[str]:
        """Copies a file to the home folder of every host of a node."""
        return self.words("tpu-vm", "scp", file, f"{node}:{name}", "--worker=all")

    def connect_words(self, node: str, command: str) -> list[str]:
        """Runs a shell command on every host of a node."""
        return self.words("tpu-vm", "ssh", node, "--worker=all", f"--command={command}")

    def variables(self, node: str) -> list[str]:
        """JAX finds the hosts of a TPU by itself."""
        return []

    def _deletion(self) -> list[str]:
        return self.words(self.resource, "delete", self.name, *(["--force"] * self.is_queued))

    def _by_hand(self) -> str:
        return shlex.join(self._deletion())

    def _create(self) -> None:
        options = self.options
        flags = [f"--accelerator-type={options.type}", f"--version={options.version}"]
        if self.is_queued:
            nodes = [f"--node-count={options.slices}", f"--node-prefix={self.name}"]
            # gcloud wants a count of at least 2.
            nodes = nodes if options.slices > 1 else [f"--node-id={self.nodes[0]}"]
            flags = [*nodes, flags[0], f"--runtime-version={options.version}"]
        flags += ["--spot"] * options.spot + ["--reserved"] * options.reserved
        if options.max_run_duration:
            flags.append("--provisioning-model=flex-start")
        for name in ("reservation", "max_run_duration", "network", "subnetwork"):
            value = getattr(options, name)
            flags += [f"--{name.replace('_', '-')}={value}"] if value else []
        flags += ["--internal-ips"] * options.internal_ip
        flags += [f"--service-account={options.service_account}"] * bool(options.service_account)
        flags += [f"--data-disk={disk}" for disk in options.data_disk]
        labels = ",".join(filter(None, [f"launcher={LAUNCHED_BY}", options.labels]))
        flags += [f"--labels={labels}", *options.gcloud]
        self._request(self.words(self.resource, "create", self.name, *flags))

    def _request(self, words: list[str]) -> None:
        """Asks gcloud for a change."""
        if self.shell.dry_run:
            self.shell.step(words)
            return
        status, errors = self.shell.request(words)
        if status:
            raise self._refused(errors)

    def _refused(self, report: str) -> AttemptError:
        """What an error of gcloud means for the attempt."""
        kind, words = error_kind(report)
        if kind is None:
            print(
                "  types of this zone: gcloud compute tpus tpu-vm accelerator-types list "
                f"--zone={self.options.zone}; runtimes: versions list",
                file=sys.stderr,
            )
            return AttemptError(MEND)
        if kind.reason == QUOTA:
            print(
                f"error: {kind.reason}: {words}\n  fix: ask for more of it, or take another "
                "--zone, --type or price; --spot has its own, --internal_ip needs no address",
                file=sys.stderr,
            )
        return AttemptError(kind.status, kind.reason)

    def look(self) -> tuple[str, dict]:
        """The resource's state, ABSENT if it does not exist, and gcloud's description of it.

        Raises:
            AttemptError: gcloud does not say.
        """
        status, output, errors = self.shell.ask(
            self.words(self.resource, "describe", self.name, "--format=json")
        )
        if status == 0:
            description = read_json(output) or {}
            state = description.get("state")
            if self.is_queued and state:
                state = state.get("state")
            return state or "UNKNOWN", description
        if re.search(r"\bNOT_FOUND\b", errors):
            return "ABSENT", {}
        sys.stderr.write(errors)
        raise self._refused(errors)

    def _move(self, state: str) -> Move:
        # A request has many states in which it waits; a TPU VM of an unknown one may be anything.
        return STATES.get(state, (Move.WAIT if self.is_queued else Move.LEAVE, BILLED))[0]

    def is_there(self) -> bool:
        """Whether the hosts still exist."""
        try:
            return self._move(self.look()[0]) is Move.RUN
        except AttemptError:
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
            move = self._move(state)
            if state != former:
                print(f"{what}: {state}")
            former = state
            if move is Move.RUN:
                return
            if move is Move.LEAVE or not (self.options.type or move is Move.WAIT):
                raise self._left(state, move)
            if move is Move.WAIT and looks == LOOKS and not self.is_queued:
                raise AttemptError(AGAIN, f"{what} is still {state}")
            if move in (Move.REPLACE, Move.FAILED):
                self._request(self._deletion())
                if move is Move.FAILED:
                    raise self._failed(description)
                if is_renewed:
                    raise AttemptError(AGAIN, f"{what}: {state}")
                is_renewed = True
            if move is not Move.WAIT:
                self._create()
                if not self.is_queued:
                    return
            self.shell.sleep(self.options.retry_seconds)

    def _failed(self, description: dict) -> AttemptError:
        """A queued resource that FAILED: only a lack of capacity may change by itself."""
        why = json.dumps(description["state"])
        print(f"queued resource {self.name} FAILED: {why}", file=sys.stderr)
        end = self._refused(why)
        end.reason = f"queued resource {self.name}: FAILED, {end.reason}"
        return end

    def _left(self, state: str, move: Move) -> AttemptError:
        fix = "give --type=TYPE to create it"
        if move is Move.LEAVE:
            fix = (
                f"gcloud compute tpus tpu-vm start {self.name} --zone={self.options.zone}, "
                "or delete it so that it is created again"
            )
        print(
            f"error: TPU {self.name} in {self.options.zone} is {state}, expected READY\n"
            f"  fix: {fix}",
            file=sys.stderr,
        )
        return AttemptError(MEND)

    def farewell(self, status: int) -> None:
        """Deletes the TPU if that is asked for; the last line says whether it is still billed."""
        what = f"TPU {self.name}"
        unknown = f"{what} may still run and be billed; delete it: {self._by_hand()}"
        try:
            state, description = self.look()
            if state == "ABSENT":
                print(f"{what} does not exist; nothing is billed", file=sys.stderr)
                return
            if self._wants_deletion(status) and self._may_delete(description, status):
                print(f"deleting {what} (--delete={self.options.delete}) ...", file=sys.stderr)
                try:
                    self._request(self._deletion())
                    print(f"{what} was deleted; nothing is billed any more", file=sys.stderr)
                    return
                except AttemptError:
                    self.kept = "gcloud did not delete it"
        except AttemptError:
            print(unknown, file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(unknown, file=sys.stderr)
            raise
        if self.options.delete == "success" and status != FINISHED:
            self.kept = self.kept or "the command has not finished; --delete=success"
        kept = f" ({self.kept})" if self.kept else ""
        bill = STATES.get(state, (None, BILLED))[1]
        print(f"{what} is {state}{bill}{kept}: {self._by_hand()}", file=sys.stderr)

    def _wants_deletion(self, status: int) -> bool:
        if status == TIMED_OUT and not self.is_never and self.options.type:
            return True
        delete = self.options.delete
        return delete == "always" or (delete == "success" and status == FINISHED)

    def _may_delete(self, description: dict, status: int) -> bool:
        """Whether this launcher made it for this user, and results are where they belong."""
        node = description
        if self.is_queued:
            node = (description.get("tpu", {}).get("nodeSpec") or [{}])[0].get("node", {})
        if node.get("labels", {}).get("launcher") != LAUNCHED_BY:
            self.kept = "others made it"
            return False
        for output in self.outputs if status == FINISHED else ():
            address = output.rstrip("/") + "/"
            project = [f"--project={self.options.project}"] if self.options.project else []
            listed, lines, errors = self.shell.ask(
                ["gcloud", "storage", "ls", address, *project, "--quiet"]
            )
            sys.stderr.write(errors)
            # A folder made by hand is an object of that name.
            if listed:
                self.kept = f"gcloud found nothing in {address}, or could not look"
            elif not set(lines.splitlines()) - {address, ""}:
                self.kept = f"{address} is empty"
            if self.kept:
                return False
        return True
