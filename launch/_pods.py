"""TPU VMs and queued resources: creation, states, the plan, and what is billed at the end."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys

import _tables
from _attempts import INSTALL, AttemptError
from _creation import LAUNCHED_BY, ON_DEMAND, creation_flags, price_class
from _options import UsageError, positive
from _outputs import KeptError, outputs
from _shell import Shell, read_json
from _tables import AGAIN, FINISHED, MEND, NODE_STATES, QUEUE_STATES, Move, State

# How often a TPU VM is looked at that is neither ready nor gone.
LOOKS = 30


class Pod:
    """One TPU VM, or with --slices several as a queued resource.

    Args:
        shell: what runs commands.
        options: of the command line, `slices` included (None: a TPU VM).
    """

    install = INSTALL

    def __init__(self, shell: Shell, options: argparse.Namespace) -> None:
        self.shell = shell
        self.options = options
        self.is_queued = options.slices is not None
        self.name = options.name
        self.kind = "queued-resources" if self.is_queued else "tpu-vm"
        self.nodes: list[str] = [self.name]
        if self.is_queued:
            self.nodes = [f"{self.name}-{number}" for number in range(options.slices)]
        self.chips, self.quota, self.price, self.price_text = self._read_type()
        self.price_class = price_class(options)
        if self.price_class != ON_DEMAND and not options.price_per_hour:
            # The list has prices on demand alone; spot costs less, by zone and day.
            self.price = None
        # Addresses that must hold results before a deletion that nobody has asked for.
        self.outputs: list[str] = []
        self.kept = ""
        self._decide_deletion()

    def _read_type(self) -> tuple[int, str, float | None, str]:
        """Chips of all slices, prefix of their quota, and their price; sets --version."""
        options, type_ = self.options, self.options.type
        price = positive(options, "price_per_hour")
        if not type_:
            return 0, "", price, f"${price:.2f} an hour, as you say" if price else ""
        kind, _, size = type_.rpartition("-")
        if kind in ("tpu7x", "v7x"):
            raise UsageError(
                f"--type is '{type_}': there are no TPU VMs of TPU7x; use launch/gke_xpk.sh"
            )
        if not re.fullmatch("[a-z0-9]+-[1-9][0-9]*", type_):
            raise UsageError(f"--type is '{type_}', expected KIND-SIZE, for example v5litepod-16")
        if kind not in _tables.KINDS and not options.version:
            known = " ".join(f"{name}-N" for name in _tables.KINDS)
            raise UsageError(
                f"--type is '{type_}'; known are {known}. For another, give --version=RUNTIME"
            )
        row = _tables.KINDS.get(kind, _tables.Kind(1, options.version, "TPU"))
        if int(size) % row.cores:
            raise UsageError(
                f"--type is '{type_}', expected an even number of cores: {kind} has two to a chip"
            )
        options.version = options.version or row.runtime
        chips = int(size) // row.cores * len(self.nodes) if kind in _tables.KINDS else 0
        if price is not None:
            return chips, row.quota, price, f"${price:.2f} an hour, as you say"
        return (chips, row.quota, *_tables.price_per_hour(kind, chips))

    def _decide_deletion(self) -> None:
        options = self.options
        if options.delete not in ("", "always", "success", "never"):
            raise UsageError(f"--delete is '{options.delete}', expected always, success or never")
        self.is_never = options.delete == "never"
        if options.delete:
            self.kept = "as you say" if self.is_never else ""
            return
        options.delete = "never"
        if options.attach:
            self.kept = "attached; give --delete=success to delete it"
        elif not options.type:
            self.kept = "the launcher did not create it"
        else:
            try:
                self.outputs = outputs(options.command, line_only=bool(options.skip_install))
                options.delete = "success"
            except KeptError as reason:
                self.kept = str(reason)

    def plan(self) -> str:
        """What the launcher will do, as comments before the commands that --dry_run prints."""
        options, zone, slices = self.options, self.options.zone, len(self.nodes)
        lines = [f"{self.name} in {zone}: a TPU that exists; none is created"]
        if options.type:
            count = f"{slices} TPU slice{'s' * (slices > 1)} of {options.type}"
            chips = f", {self.chips} chips" if self.chips else ""
            preemptible = "Preemptible" if options.spot or options.max_run_duration else ""
            lines = [
                f"{self.name} in {zone}: {count}{chips}, runtime {options.version}",
                f"price: {self.price_class}",
                f"cost: {self.price_text}",
                f"quota: {self.quota}{preemptible}PerProjectPerZoneForTPUAPI or a similar one; "
                "yours: gcloud beta quotas info list --service=tpu.googleapis.com "
                f"--project={options.project or 'PROJECT'} --filter=quotaId:{self.quota}",
            ]
        lines.append(
            f"retries: {options.retries}, after a preemption or while there is no capacity, "
            f"{options.retry_seconds} s apart"
        )
        if options.max_hours:
            ends = "the run ends"
            if options.type and not self.is_never:
                ends += " and the TPU is deleted, with what is on its disks"
            lines.append(f"time: after {options.max_hours} h {ends}; keep the launcher running")
        when = "when the launcher ends, however it ends"
        if options.delete == "success":
            there = "".join(f", if {address} is not empty" for address in self.outputs)
            when = (
                f"after the command has finished{there}; "
                "after a failure or Ctrl-C the TPU stays and is billed"
            )
        elif options.delete == "never":
            when = f"never ({self.kept}): the TPU stays and is billed"
        lines.append(f"deletion (--delete={options.delete}): {when}. By hand: {self._by_hand()}")
        return "\n".join(f"# {line}" for line in lines)

    def words(self, *request: str) -> list[str]:
        """A gcloud command."""
        options, flags = self.options, []
        if request[1] in ("ssh", "scp"):
            if options.iap:
                flags = ["--tunnel-through-iap"]
            elif options.internal_ip:
                flags = ["--internal-ip"]
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
        return self.words(self.kind, "delete", self.name, *(["--force"] * self.is_queued))

    def _by_hand(self) -> str:
        return shlex.join(self._deletion())

    def _create(self) -> None:
        options, version = self.options, self.options.version
        flags = [f"--accelerator-type={options.type}", f"--version={version}"]
        if self.is_queued:
            nodes = [f"--node-count={options.slices}", f"--node-prefix={self.name}"]
            # gcloud wants a count of at least 2.
            nodes = nodes if options.slices > 1 else [f"--node-id={self.nodes[0]}"]
            flags = [*nodes, flags[0], f"--runtime-version={version}"]
        self._request(self.words(self.kind, "create", self.name, *flags, *creation_flags(options)))

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
        kind, words = _tables.error_kind(report)
        if kind is None:
            print(
                "  types of this zone: gcloud compute tpus tpu-vm accelerator-types list "
                f"--zone={self.options.zone}; runtimes: versions list",
                file=sys.stderr,
            )
            return AttemptError(MEND)
        if kind.reason == _tables.QUOTA:
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
            self.words(self.kind, "describe", self.name, "--format=json")
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

    def _state(self, name: str) -> State:
        if self.is_queued:
            return QUEUE_STATES.get(name, State(Move.WAIT))
        return NODE_STATES.get(name, State(Move.LEAVE))

    def is_there(self) -> bool:
        """Whether the hosts still exist."""
        try:
            return self._state(self.look()[0]).move is Move.RUN
        except AttemptError:
            return False

    def make_ready(self) -> None:
        """Creates the TPU where --type allows it, and waits for it."""
        if not self.shell.dry_run:
            (self._wait_in_queue if self.is_queued else self._make_vm)()
        elif self.options.type:
            self._create()

    def _make_vm(self) -> None:
        for looks in range(LOOKS + 1):
            state, _ = self.look()
            move = self._state(state).move
            if move is not Move.WAIT:
                break
            if looks == 0:
                print(f"TPU {self.name} is {state}: waiting")
            if looks == LOOKS:
                raise AttemptError(AGAIN, f"TPU {self.name} is still {state}")
            self.shell.sleep(self.options.retry_seconds)
        if move is Move.RUN:
            return
        if move is Move.LEAVE or not self.options.type:
            raise self._left(state)
        if move is Move.REPLACE:
            self._request(self._deletion())
        self._create()

    def _wait_in_queue(self) -> None:
        """Waits however long; slices that were taken away are requested at once, and once."""
        former, is_renewed = "", False
        while True:
            state, description = self.look()
            move = self._state(state).move
            if state != former:
                print(f"queued resource {self.name}: {state}")
            former = state
            if move is Move.RUN:
                return
            if move in (Move.REPLACE, Move.FAILED):
                self._request(self._deletion())
                if move is Move.FAILED:
                    raise self._failed(description)
                if is_renewed:
                    raise AttemptError(AGAIN, f"queued resource {self.name}: {state}")
                is_renewed = True
                continue
            if move is Move.CREATE:
                self._create()
            self.shell.sleep(self.options.retry_seconds)

    def _failed(self, description: dict) -> AttemptError:
        """A queued resource that FAILED: only a lack of capacity may change by itself."""
        why = json.dumps(description["state"])
        print(f"queued resource {self.name} FAILED: {why}", file=sys.stderr)
        end = self._refused(why)
        if end.status == AGAIN:
            end.reason = f"queued resource {self.name}: FAILED, {end.reason}"
        return end

    def _left(self, state: str) -> AttemptError:
        fix = (
            f"gcloud compute tpus tpu-vm start {self.name} --zone={self.options.zone}, "
            "or delete it so that it is created again"
        )
        if self._state(state).move is not Move.LEAVE:
            fix = "give --type=TYPE to create it"
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
        bill = self._state(state).bill
        print(f"{what} is {state}{bill}{kept}: {self._by_hand()}", file=sys.stderr)

    def _wants_deletion(self, status: int) -> bool:
        if status == _tables.TIMED_OUT and not self.is_never and self.options.type:
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
            listing = ["gcloud", "storage", "ls", address, *project, "--quiet"]
            listed, lines, errors = self.shell.ask(listing)
            sys.stderr.write(errors)
            # A folder made by hand is an object of that name.
            if listed:
                self.kept = f"gcloud found nothing in {address}, or could not look"
            elif not set(lines.splitlines()) - {address, ""}:
                self.kept = f"{address} is empty"
            if self.kept:
                return False
        return True
