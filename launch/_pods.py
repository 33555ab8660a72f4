"""TPU VMs and queued resources: creation, states, the plan, and what is billed at the end.

A TPU is deleted unasked if all that the command writes goes to buckets.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

import _tables as tables
from _hosts import ROOT, Hosts, ask, sleep
from _tables import LaunchError, Move, flags

# Marks what this launcher creates, so that it deletes nothing else. Labels allow few characters.
LAUNCHED_BY = "taser_jax-" + re.sub("[^a-z0-9]", "-", getpass.getuser().lower())[:40]

# The Gin file that `train` reads first, and lines of such files.
FIRST, REQUIRED = "runs/train.gin", "%gin.REQUIRED"
INCLUDE = re.compile(r"""^include\s+["'](.*)["']""", re.M)
BINDING = re.compile(r"^([ \t]*)([\w./]+)[ \t]*=(.*)$", re.M)
# A command line that names one of them expects results there.
ALWAYS_OUTPUTS = ("MODEL_DIR", "OUTPUT_DIR")


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
        super().__init__(options, slices or [self.name])
        for option in tables.OF_NEW_TPUS:
            if getattr(options, option) and not options.type:
                options.refuse(f"--{option} applies to a TPU that is created: give its --type")
        self.price_class = flags(options, "spot", "reserved", "reservation", "max_run_duration")
        if len(self.price_class) > 1:
            options.refuse(f"choose one of {' and '.join(self.price_class)}")
        kind, self.chips = tables.kind_of(options.type or "")
        if options.type and not (kind or options.version):
            known = " ".join(f"{name}-N" for name in tables.KINDS)
            options.refuse(f"--type={options.type}: known are {known}; for another give --version")
        options.version = options.version or (kind and kind.runtime)
        self.price, self.price_text = tables.hourly_price(options, not self.price_class)
        self.is_deleted_late = bool(options.type) and options.delete != "never"
        self.outputs: list[str] = []
        self.why_it_stays = "as you say"
        if not options.delete:
            try:
                self.outputs, options.delete = self._find_outputs(), "success"
            except LaunchError as reason:
                self.why_it_stays, options.delete = str(reason), "never"

    def _find_outputs(self) -> list[str]:
        """What must be there before an unasked deletion; the error says why the TPU stays."""
        if self.options.attach:
            raise LaunchError("attached; give --delete=success to delete it")
        if not self.options.type:
            raise LaunchError("the launcher did not create it")
        return outputs(self.options.command, line_only=self.options.skip_install)

    def plan(self) -> list[str]:
        options, place = self.options, f"{self.name} in {self.options.zone}"
        lines = [f"{place}: a TPU that exists; none is created"]
        if options.type:
            slices = len(self.nodes)
            lines = [
                f"{place}: {slices} TPU slice{'s' * (slices > 1)} of {options.type}, "
                f"{self.chips * slices or 'unknown'} chips, runtime {options.version}",
                f"price: {' '.join(self.price_class) or 'on demand'}; {self.price_text}",
            ]
        lines += super().plan()
        if options.max_hours:
            deleted = " and the TPU is deleted, with what is on its disks" * self.is_deleted_late
            lines.append(f"time: after {options.max_hours:g} h, while this runs, it ends{deleted}")
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
        return self.words("tpu-vm", "scp", file, f"{node}:{name}", "--worker=all", *self._tunnel())

    def connect_words(self, node: str, command: str) -> list[str]:
        # A connection that is dead is noticed.
        settings = ("--worker=all", f"--command={command}", *self._tunnel())
        return self.words("tpu-vm", "ssh", node, *settings, "--ssh-flag=-oServerAliveInterval=30")

    def _tunnel(self) -> list[str]:
        if self.options.iap:
            return ["--tunnel-through-iap"]
        return flags(self.options, "internal_ip")

    def creation(self) -> list[list[str]]:
        options = self.options
        if not options.type:
            return []
        words = [f"--accelerator-type={options.type}", f"--version={options.version}"]
        if self.is_queued:
            nodes = [f"--node-count={options.slices}", f"--node-prefix={self.name}"]
            # gcloud wants a count of at least 2.
            nodes = nodes if options.slices > 1 else [f"--node-id={self.nodes[0]}"]
            words = [*nodes, words[0], f"--runtime-version={options.version}"]
        words += self.price_class
        if options.max_run_duration:
            words.append("--provisioning-model=flex-start")
        if options.internal_ip:
            words.append("--internal-ips")
        labels = ",".join(filter(None, [f"launcher={LAUNCHED_BY}", options.labels]))
        words += [f"--labels={labels}", *options.gcloud]
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
        """Creates the TPU where --type allows it, and waits for it, however long.

        What was taken away is requested at once, and once.
        """
        what = f"{'queued resource' if self.is_queued else 'TPU'} {self.name}"
        former, is_renewed = "", False
        while True:
            state, description = self._look()
            if state != former:
                print(f"{what}: {state}")
            former, (move, _) = state, self._meaning(state)
            if move is Move.RUN:
                return
            if move is not Move.WAIT:
                self._check(move, state, description)
                if move is not Move.CREATE:
                    self._request(self._deletion())
                if move is Move.FAILED:
                    # Only a lack of capacity may change by itself.
                    why = json.dumps(description["state"])
                    print(f"{what} FAILED: {why}", file=sys.stderr)
                    raise tables.refusal(why, self.options.zone, f"{what}: FAILED, ")
                if move is Move.REPLACE and is_renewed:
                    raise LaunchError(f"{what}: {state}", tables.AGAIN)
                is_renewed = is_renewed or move is Move.REPLACE
                for words in self.creation():
                    self._request(words)
                if not self.is_queued:
                    return
            sleep(self.options.retry_seconds)

    def _check(self, move: Move, state: str, description: dict) -> None:
        """Checks that the launcher may create, or delete and create, what is in this state."""
        may_be_made = move is Move.CREATE or (move is not Move.LEAVE and self._is_ours(description))
        if not (self.options.type and may_be_made):
            place, by_hand = f"{self.name} in {self.options.zone}", shlex.join(self._deletion())
            raise LaunchError(
                f"TPU {place} is {state}, expected READY, or a --type and none that others made\n"
                f"  fix: start it, give another --name or a --type, or delete it: {by_hand}"
            )

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
            if state == "ABSENT":
                last = "does not exist; nothing is billed"
            elif why_it_stays := self._delete(description, status):
                last = f"is {state}{self._meaning(state)[1]} ({why_it_stays}): {by_hand}"
            else:
                last = "was deleted; nothing is billed any more"
        except LaunchError:
            pass  # gcloud does not tell the state.
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
            # A folder made by hand is an object of that name.
            if status or not set(lines.splitlines()) - {address, ""}:
                return f"gcloud found nothing in {address}, or could not look"
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
            options.refuse("--slices is 1; for one slice use launch/tpu_vm.sh")
        super().__init__(options)


def outputs(words: Sequence[str], *, line_only: bool) -> list[str]:
    """Addresses of a command's outputs.

    Example:
        ["train", "--gin.MODEL_DIR=gs://bucket/taser"] writes to ["gs://bucket/taser"].

    Args:
        words: the command and its flags.
        line_only: whether to leave out the files that the flags name.

    Raises:
        LaunchError: an output is not in a bucket, or the launcher cannot tell.
    """
    if words[0] != "train":
        # The others open outputs as local paths: gs://BUCKET/x is to them a folder `gs:`.
        raise LaunchError("of all commands only train writes to a bucket")
    files, folders, line = [FIRST], [""], []
    rest = iter(words[1:])
    for word in rest:
        flag, equals, value = word.partition("=")
        value = value if equals or not flag.startswith("--gin") else next(rest, "")
        if flag == "--gin_file" and not line_only:
            files.append(value)
        elif flag == "--gin_search_paths":
            folders += value.split(",")
        elif flag == "--gin_bindings":
            line.append(value)
        elif flag.startswith("--gin."):
            line.append(f"{flag[len('--gin.') :]} = {value}")
    # Hosts get git's files alone, which are not all that lie here.
    of_git = set(ask(["git", "-C", str(ROOT), "ls-files", "-z"])[1].split("\0"))

    def read(path: str) -> str:
        """A Gin file with the files that it includes in their places."""
        for folder in (*folders, "gin_configs"):
            name = os.path.normpath(os.path.join(folder, path))
            if name in of_git:
                text = (ROOT / name).read_text(encoding="utf-8-sig")
                return INCLUDE.sub(lambda include: read(include[1]), text)
        raise LaunchError(f"{path} is not in git, so hosts do not get it")

    try:
        text = "\n".join(map(read, files))
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"its Gin files cannot be read: {error}") from error
    of_line = _bindings("\n".join(line))
    bindings = {**_bindings(text), **of_line}
    names = ("train.model_dir", *(name for name in ALWAYS_OUTPUTS if name in of_line))
    return list(dict.fromkeys(_address(name, dict(bindings)) for name in names))


def _bindings(text: str) -> dict[str, str]:
    """Name -> value, as Gin text, the last one of each name.

    Example:
        `commands.train.train.model_dir` is `train.model_dir`, and `MODEL_DIR/macro.value` is
        MODEL_DIR.
    """
    bindings = {}
    for indent, name, value in BINDING.findall(text):
        if indent:
            raise LaunchError(
                f"a Gin file has a block, with {name}, which the launcher cannot read"
            )
        name = re.sub(r"/(gin\.)?macro\.value$", "", name)
        short = name if "/" in name else ".".join(name.split(".")[-2:])
        bindings[short] = value.partition(" #")[0].strip()
    return bindings


def _address(name: str, bindings: dict[str, str]) -> str:
    """The address in a bucket that a parameter or macro holds; takes bindings out as it goes."""
    while (text := bindings.pop(name, REQUIRED)).startswith("%") and text != REQUIRED:
        name = text[1:]
    if text == REQUIRED:
        raise LaunchError(f"{name} is neither on the command line nor in a Gin file that hosts get")
    # A string of one piece, on the command line without quotes; another is not looked into.
    literal = re.fullmatch(r"""(["']?)(gs://[^/\s"'\\][^\n"'\\]*)\1""", text)
    if not literal:
        raise LaunchError(f"{name} is {text}, which is not in a bucket")
    return literal[2]
