"""Prepares hosts, runs a command on all of them, and decides the outcome of each attempt."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _tables import AGAIN, FINISHED, MEND, NOT_GIVEN, TIMED_OUT, LaunchError, parse, warn

PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONNECTION_FAILED = 255
# How often in a row a lost connection is made anew before the hosts count as lost, and the seconds
# after which a connection starts a row of its own.
RECONNECTIONS, LASTED = 5, 60
# Seconds that taser has to save at the end of --max_hours, and that all of it may take: a host that
# hangs does not answer.
SAVING, ENDING = 90, 150
# Slurm reports the nodes that it has lost or taken back. It also calls a step CANCELLED whose other
# processes it ends after a failure.
LOST = r"(?:srun|slurmstepd): .*(?:node[ _]fail|preempt|allocation .*revoked|(due to time limit))"
HOST = "bash taser_jax/launch/_host.sh"
UNPACK = "mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && "
FETCH = "cd taser_jax && .venv/bin/python launch/_fetch.py {} data"
# Nothing else is meant for other machines.
FILES_OF_GIT = ["git", "-C", str(ROOT), "ls-files", "-z"]


def ask(words: Sequence[str]) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    answer = subprocess.run(words, capture_output=True, text=True, errors="replace")
    return answer.returncode, answer.stdout, answer.stderr


def sleep(seconds: int) -> None:
    """Waits."""
    subprocess.run(["sleep", str(seconds)])


def packing(archive: str) -> list[str]:
    """Packs the files whose names it reads."""
    return ["tar", "-czf", archive, "-C", str(ROOT), "--null", "-T", "-"]


def archive_checkout(archive: str) -> None:
    """Packs the files that git has, as they are here.

    Raises:
        LaunchError: this is no git checkout.
    """
    status, output, errors = ask(FILES_OF_GIT)
    if status:
        raise LaunchError(
            f"git cannot list the files of {ROOT}: {errors.strip()}\n  fix: launch from a git "
            "checkout; an unpacked archive becomes one by git init && git add ."
        )
    new = [*FILES_OF_GIT[:-1], "--others", "--exclude-standard", "--", "*.py", "*.gin"]
    for name in ask(new)[1].splitlines()[:3]:
        warn(f"git does not have {name}, so hosts do not get it; use git add")
    # One that was deleted here is still in git's list.
    names = [name for name in output.split("\0") if name and (ROOT / name).exists()]
    if subprocess.run(packing(archive), input="\0".join(names), text=True).returncode:
        raise LaunchError("the checkout cannot be packed; see the message of tar")


def outcome(statuses: Sequence[int], connections: Sequence[int] = ()) -> int:
    """The status of an attempt.

    When one host is lost, the others fail with various statuses, so the order is: a problem to fix
    (2); the end of the time that Slurm gave (124); a host that was preempted (75) or lost (ssh's
    255); a job that did not start, so that no host reports a status (ssh's or the shell's); any
    other failure.

    Example:
        Hosts that report 134 and 2 give 2; one that reports 0 while the other is silent gives 75.

    Args:
        statuses: those that hosts reported of taser.
        connections: statuses of the connections to hosts.
    """
    for end in (MEND, TIMED_OUT, AGAIN):
        if end in statuses:
            return end
    if CONNECTION_FAILED in connections:
        return AGAIN
    if not statuses:
        return next(filter(None, connections), 1)
    # Where every host that reported has finished, one may not have reported.
    return next(filter(None, statuses), AGAIN if any(connections) else FINISHED)


class Hosts(argparse.Namespace):
    """Machines that run one command together, again after a preemption; each kind is a launcher.

    Options of the command line are attributes, so none has the name of a method. Machines that are
    connected to have `send_words`, which copy a file to the home folder of each host of a target,
    and `connect_words`, which run a shell command there.

    Args:
        script: the launcher's, for its usage.
        words: the command line.

    Attributes:
        needed: names of the options that each run needs.
        others: names of its other options.
        install: shell command for the folder `taser_jax` of a host.
        creation: commands that create what is not there.
        goes_on: whether the command outlives its connection.
        targets: names of hosts, or of groups of hosts that one connection reaches.
        retries: attempts after the first one.
        max_hours: after which the run is ended; 0: never.
        steps_per_second: the last one that training printed; 0: none.
        output: the address in a bucket that training said its model is in; empty: none.
    """

    needed = others = install = ""
    goes_on = True
    targets: Sequence[str] = ("all",)
    creation: Sequence[list[str]] = ()
    retries: int
    # Options that some launchers lack.
    attach = data = name = setup = skip_install = NOT_GIVEN
    max_hours = slices = 0

    def __init__(self, script: str, words: Sequence[str]) -> None:
        parse(self, script, words)
        self.steps_per_second, self.output = 0.0, ""
        self._are_reached = self._is_ending = False
        self._processes: list[subprocess.Popen[str]] = []
        self.set_up()

    def set_up(self) -> None:
        """Refuses options that do not fit together, and sets what follows from the others."""

    def plan(self) -> list[str]:
        """What the launcher will do."""
        reasons = "after a preemption or a lost host, or without capacity"
        return [f"retries: {self.retries}, {reasons}, {self.retry_seconds} s apart"]

    def make_ready(self) -> None:
        """Waits until the hosts can be connected to."""

    def variables(self, node: str) -> list[str]:
        """Tells JAX of the other hosts, where it does not find them by itself."""
        return []

    def preparation(self, node: str) -> list[list[str]]:
        """Installs the checkout, runs --setup and copies --data."""
        steps, commands = [], [self.setup]
        if not self.skip_install:
            steps.append(self.send_words(node, self.archive, "taser_jax.tgz"))
            commands.insert(0, UNPACK + self.install)
        if self.data:
            commands.append(FETCH.format(shlex.quote(self.data)))
        return steps + [self.connect_words(node, command) for command in commands if command]

    def run_words(self, node: str) -> list[str]:
        """Starts taser on each host of a node."""
        settings = [*self.variables(node), *self.env]
        return self.connect_words(
            node, shlex.join(["env", *settings, *HOST.split(), *self.command])
        )

    def attach_words(self, node: str) -> list[str]:
        """Follows what runs on each host of a node."""
        return self.connect_words(node, f"{HOST} --attach")

    def is_there(self) -> bool:
        """Whether the hosts still exist."""
        return True

    def farewell(self, status: int) -> None:
        """Deletes what is billed, or says what it costs."""

    def steps(self) -> list[list[str]]:
        """What is done if nothing fails, after the checkout is packed."""
        if self.attach:
            return [self.attach_words(node) for node in self.targets]
        preparations = [words for node in self.targets for words in self.preparation(node)]
        return [*self.creation, *preparations, *map(self.run_words, self.targets)]

    def run(self) -> int:
        """Makes attempts until the command ends, or the launcher must; returns its status."""
        self.archive = f"{self.scratch}/taser_jax.tgz"
        print("\n".join(f"# {line}" for line in self.plan()))
        if self.dry_run:
            if not (self.skip_install or self.attach):
                print(shlex.join(["mkdir", "-p", self.scratch]))
                print(f"{shlex.join(FILES_OF_GIT)} |\n{shlex.join(packing(self.archive))}")
            print("\n".join(map(shlex.join, self.steps())))
            return FINISHED
        for program, *_ in self.steps():
            if shutil.which(program) is None:
                print(f"error: {program} is not on the PATH\n  fix: install it", file=sys.stderr)
                return MEND
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, self.max_hours * 3600)
            status = self._repeat()
        except SystemExit as stop:
            status = int(stop.code or 0)
            if status == TIMED_OUT:
                print(f"{self.max_hours:g} h are over: ending the run", file=sys.stderr)
                self._on_all(self._end)
            elif self.goes_on:
                print("the command goes on where it began; follow it: --attach", file=sys.stderr)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.farewell(status)
        return status

    def _repeat(self) -> int:
        for number in range(1, self.retries + 2):
            try:
                self._attempt()
                print("finished")
                return FINISHED
            except LaunchError as end:
                if end.status != AGAIN:
                    print(f"error: {end}", file=sys.stderr)
                    return end.status
                print(f"{end} (attempt {number} of {self.retries + 1})", file=sys.stderr)
            if number <= self.retries:
                sleep(self.retry_seconds)
        print("error: no retries are left; rerun the command to resume", file=sys.stderr)
        return AGAIN

    def _attempt(self) -> None:
        """Returns if the command has finished."""
        if not self.attach:
            # First, since nothing is billed yet.
            if not (self.skip_install or os.path.exists(self.archive)):
                archive_checkout(self.archive)
            self.make_ready()
            self._settle(outcome(self._on_all(self._prepare)))
            self._are_reached = True
        elif not self.is_there():
            raise LaunchError("the hosts are not there", AGAIN)
        reports = self._on_all(self.follow)
        statuses = [status for of_taser, _ in reports for status in of_taser]
        self._settle(outcome(statuses, [connection for _, connection in reports]))

    def _settle(self, status: int) -> None:
        """Ends the attempt for a status that is not 0; hosts that are gone fail with any."""
        # gcloud has tried ten times to connect. Hosts that were reached before may be starting;
        # otherwise a key or a firewall is the likely cause.
        is_lost = status == AGAIN or (self._are_reached and status == CONNECTION_FAILED)
        if is_lost or (status not in (FINISHED, MEND) and not self.is_there()):
            raise LaunchError("preempted, or a host was lost", AGAIN)
        if status != FINISHED:
            raise LaunchError(f"failed with status {status}; see the output above", status)

    def _on_all(self, work: Callable[[str], Any]) -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(len(self.targets)) as pool:
            try:
                return list(pool.map(work, self.targets))
            except BaseException:
                # Ctrl-C, or the end of --max_hours: threads end with what they follow.
                self._end_processes()
                raise

    def _prepare(self, node: str) -> int:
        """Prepares a node; the status of the failing step."""
        return next(filter(None, map(self.show, self.preparation(node))), FINISHED)

    def follow(self, node: str) -> tuple[list[int], int]:
        """Runs the command on a node; after a lost connection, follows what runs on there.

        Returns:
            Statuses that hosts reported of taser, and that of the last connection.
        """
        losses = 0
        words = self.attach_words(node) if self.attach else self.run_words(node)
        while True:
            statuses: list[int] = []
            begin, connection = time.monotonic(), self.show(words, statuses)
            is_cut_off = not any(statuses) and outcome(statuses, [connection]) == AGAIN
            losses = 1 if time.monotonic() - begin > LASTED else losses + 1
            if not (self.goes_on and is_cut_off) or losses > RECONNECTIONS or self._is_ending:
                return statuses, connection
            print(f"the connection to {node} was lost; the command goes on there", file=sys.stderr)
            sleep(self.retry_seconds)
            if not self.is_there():
                return statuses, connection
            words = self.attach_words(node)

    def show(self, words: Sequence[str], statuses: list[int] | None = None) -> int:
        """Shows a command's output and errors as they come, and takes statuses of taser from it.

        The command runs in a process group of its own, which Ctrl-C does not reach.

        Returns:
            The command's status.
        """
        process = subprocess.Popen(words, **PIPES, errors="replace", start_new_session=True)
        self._processes.append(process)
        if self._is_ending:
            # It began while the others were ended.
            self._end_processes()
        for line in process.stdout or ():
            # On a line of its own, even if a host was cut off within a line.
            sys.stdout.write(line if line.endswith("\n") else line + "\n")
            if statuses is not None:
                statuses += self._read(line)
        status = process.wait()
        return status if status >= 0 else 128 - status

    def _read(self, line: str) -> Iterator[int]:
        """Statuses of taser in a line of output, which may have a rate of steps or an address."""
        if status := re.search(r"taser-status (\d+) on ", line):
            yield int(status[1])
        if lost := re.search(LOST, line, re.IGNORECASE):
            yield TIMED_OUT if lost[1] else AGAIN
        if model := re.search(r"^the model is in (gs://.+)$", line.rstrip()):
            self.output = model[1]
        rate = re.search(r"(\d+(?:\.\d+)?) ?(?:(step|it)/s|s/(?:step|it))", line)
        if rate and float(rate[1]):
            self.steps_per_second = float(rate[1]) if rate[2] else 1 / float(rate[1])

    def _end_processes(self) -> None:
        self._is_ending = True
        for process in list(self._processes):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def _end(self, node: str) -> None:
        words = self.connect_words(node, f"timeout {SAVING} {HOST} --end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, timeout=ENDING)
