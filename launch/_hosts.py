"""Prepares hosts, runs a command on all of them, and decides the outcome of each attempt."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
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

from _tables import AGAIN, FINISHED, MEND, TIMED_OUT, LaunchError, warn

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONNECTION_FAILED = 255
# How often in a row a lost connection is made anew before the hosts count as lost, and the seconds
# after which a connection starts a row of its own.
RECONNECTIONS, LASTED = 5, 60
# Seconds that taser has to save at the end of --max_hours, and that all of it may take: a host that
# hangs does not answer.
SAVING, ENDING = 90, 150
HOST = "bash taser_jax/launch/_host.sh"
UNPACK = "mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && "
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


@dataclasses.dataclass
class Report:
    """What the hosts of one node said.

    Attributes:
        losses: what shows that a host is lost.
        connection: status of the connection.
        statuses: those that hosts reported of taser.
        is_lost: whether a host was lost.
        steps_per_second: the last one that training printed; 0: none.
    """

    losses: str | None = None
    connection: int = 0
    statuses: list[int] = dataclasses.field(default_factory=list)
    is_lost: bool = False
    steps_per_second: float = 0.0

    def read(self, line: str) -> None:
        """Takes what a line of output says."""
        status = re.search(r"taser-status (\d+) on ", line)
        if status:
            self.statuses.append(int(status[1]))
        if self.losses and re.search(self.losses, line):
            self.is_lost = True
        if self.losses and "DUE TO TIME LIMIT" in line:
            self.statuses.append(TIMED_OUT)
        rate = re.search(r"(\d+(?:\.\d+)?) ?(?:(step|it)/s|s/(?:step|it))", line)
        if rate and float(rate[1]):
            self.steps_per_second = float(rate[1]) if rate[2] else 1 / float(rate[1])

    @property
    def is_cut_off(self) -> bool:
        """Whether the connection was lost, and taser may still run."""
        return not any(self.statuses) and outcome([self]) == AGAIN


def outcome(reports: Sequence[Report]) -> int:
    """The status of an attempt.

    When one host is lost, the others fail with various statuses, so the order is: a problem to fix
    (2); the end of the time that Slurm gave (124); a host that was preempted (75) or lost (ssh's
    255); a job that did not start, so that no host reports a status (ssh's or the shell's); any
    other failure.

    Example:
        Hosts that report 134 and 2 give 2; one that reports 0 while the other is silent gives 75.
    """
    statuses = [status for report in reports for status in report.statuses]
    connections = [report.connection for report in reports]
    for end in (MEND, TIMED_OUT):
        if end in statuses:
            return end
    failures = list(filter(None, statuses + connections))
    is_lost = failures and any(report.is_lost for report in reports)
    if is_lost or AGAIN in statuses or CONNECTION_FAILED in connections:
        return AGAIN
    if not statuses:
        return next(iter(failures), 1)
    # Where every host that reported has finished, one may not have reported.
    return next(filter(None, statuses), AGAIN if any(connections) else FINISHED)


class Hosts:
    """Machines that run one command together, again after a preemption; each kind is a launcher.

    Those that are connected to have `send_words`, which copy a file to the home folder of each host
    of a node, and `connect_words`, which run a shell command there.

    Args:
        options: of the command line.
        nodes: names of hosts, or of groups of hosts that one connection reaches.
        needs: programs that must be here, and how to get them.

    Attributes:
        install: shell command for the folder `taser_jax` of a host.
        goes_on: whether the command outlives its connection.
        end: what is said after the last attempt.
        losses: what the output holds if a host is lost; None: its connection tells.
        retries: attempts after the first one.
        max_hours: after which the run is ended; 0: never.
        steps_per_second: the last one that training printed; 0: none.
    """

    install = ""
    goes_on, end = True, "finished"
    losses: str | None = None
    send_words: Callable[[str, str, str], list[str]]
    connect_words: Callable[[str, str], list[str]]

    def __init__(self, options: argparse.Namespace, nodes: list[str], **needs: str) -> None:
        self.options, self.nodes, self.needs = options, nodes, needs
        self.archive = f"{options.scratch}/taser_jax.tgz"
        self.retries = options.retries
        self.max_hours = options.max_hours or 0
        self.steps_per_second = 0.0
        self._are_reached = self._is_ending = False
        self._processes: list[subprocess.Popen[str]] = []

    def plan(self) -> list[str]:
        """What the launcher will do."""
        options, reasons = self.options, "after a preemption or a lost host, or without capacity"
        return [f"retries: {options.retries}, {reasons}, {options.retry_seconds} s apart"]

    def creation(self) -> list[list[str]]:
        """Creates what is not there."""
        return []

    def make_ready(self) -> None:
        """Waits until the hosts can be connected to."""

    def variables(self, node: str) -> list[str]:
        """Tells JAX of the other hosts, where it does not find them by itself."""
        return []

    def preparation(self, node: str) -> list[list[str]]:
        """Installs the checkout, runs --setup and copies --data."""
        options, steps = self.options, []
        if not options.skip_install:
            steps.append(self.send_words(node, self.archive, "taser_jax.tgz"))
            steps.append(self.connect_words(node, UNPACK + self.install))
        if options.setup:
            steps.append(self.connect_words(node, options.setup))
        if options.data:
            fetch = f".venv/bin/python launch/_fetch.py {shlex.quote(options.data)} data"
            steps.append(self.connect_words(node, f"cd taser_jax && {fetch}"))
        return steps

    def run_words(self, node: str) -> list[str]:
        """Starts taser on each host of a node."""
        settings = (each.split("=", 1) for each in self.variables(node) + self.options.env)
        assignments = [f"{name}={shlex.quote(value)}" for name, value in settings]
        command = [*assignments, HOST, shlex.join(self.options.command)]
        return self.connect_words(node, " ".join(command))

    def attach_words(self, node: str) -> list[str]:
        """Follows what runs on each host of a node."""
        return self.connect_words(node, f"{HOST} --attach")

    def is_there(self) -> bool:
        """Whether the hosts still exist."""
        return True

    def farewell(self, status: int) -> None:
        """Deletes what is billed, or says what it costs."""

    def commands(self) -> Iterator[str]:
        """What is done if nothing fails, as a shell reads it."""
        if self.options.attach:
            yield from (shlex.join(self.attach_words(node)) for node in self.nodes)
            return
        if not self.options.skip_install:
            yield shlex.join(["mkdir", "-p", self.options.scratch])
            yield f"{shlex.join(FILES_OF_GIT)} |\n{shlex.join(packing(self.archive))}"
        steps = self.creation()
        for node in self.nodes:
            steps += self.preparation(node)
        yield from map(shlex.join, steps)
        yield from (shlex.join(self.run_words(node)) for node in self.nodes)

    def run(self) -> int:
        """Makes attempts until the command ends, or the launcher must; returns its status."""
        print("\n".join(f"# {line}" for line in self.plan()))
        if self.options.dry_run:
            print("\n".join(self.commands()))
            return FINISHED
        for program, fix in self.needs.items():
            if shutil.which(program) is None:
                raise LaunchError(f"{program} is not on the PATH\n  fix: {fix}")
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, self.max_hours * 3600)
            self._repeat()
            status = FINISHED
        except LaunchError as error:
            print(f"error: {error}", file=sys.stderr)
            status = error.status
        except SystemExit as stop:
            status = int(stop.code or 0)
            self._stop(status)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.farewell(status)
        return status

    def _repeat(self) -> None:
        for number in range(1, self.retries + 2):
            try:
                self._attempt()
                print(self.end)
                return
            except LaunchError as end:
                if end.status != AGAIN:
                    raise
                print(f"{end} (attempt {number} of {self.retries + 1})", file=sys.stderr)
            if number <= self.retries:
                sleep(self.options.retry_seconds)
        raise LaunchError("no retries are left; rerun the command to resume", AGAIN)

    def _attempt(self) -> None:
        """Returns if the command has finished."""
        if self.options.attach:
            if not self.is_there():
                raise LaunchError("the hosts are not there", AGAIN)
        else:
            # First, since nothing is billed yet.
            if not (self.options.skip_install or os.path.exists(self.archive)):
                archive_checkout(self.archive)
            self.make_ready()
            self._settle(outcome([Report(statuses=self._on_all(self._prepare))]))
            self._are_reached = True
        reports = self._on_all(self.follow)
        self.steps_per_second = max(report.steps_per_second for report in reports)
        self._settle(outcome(reports))

    def _settle(self, status: int) -> None:
        """Ends the attempt for a status that is not 0; hosts that are gone fail with any."""
        if status == FINISHED:
            return
        # gcloud has tried ten times to connect. Hosts that were reached before may be starting;
        # otherwise a key or a firewall is the likely cause.
        are_starting = self._are_reached and status == CONNECTION_FAILED
        if are_starting or (status not in (MEND, AGAIN) and not self.is_there()):
            status = AGAIN
        reason = {
            AGAIN: "preempted, or a host was lost",
            MEND: "see the message of a host above; fix it and start again",
        }.get(status, f"failed with status {status}; see the output above")
        raise LaunchError(reason, status)

    def _on_all(self, work: Callable[[str], Any]) -> list[Any]:
        with concurrent.futures.ThreadPoolExecutor(len(self.nodes)) as pool:
            try:
                return list(pool.map(work, self.nodes))
            except BaseException:
                # Ctrl-C, or the end of --max_hours: threads end with what they follow.
                self._end_processes()
                raise

    def _prepare(self, node: str) -> int:
        """Prepares a node; the status of the failing step."""
        return next(filter(None, map(self.show, self.preparation(node))), FINISHED)

    def follow(self, node: str) -> Report:
        """Runs the command on a node; after a lost connection, follows what runs on there."""
        losses, is_begun = 0, bool(self.options.attach)
        while True:
            report, begin = Report(self.losses), time.monotonic()
            words = self.attach_words(node) if is_begun else self.run_words(node)
            report.connection = self.show(words, report.read)
            if not (self.goes_on and report.is_cut_off):
                return report
            losses = 1 if time.monotonic() - begin > LASTED else losses + 1
            if losses > RECONNECTIONS or self._is_ending:
                return report
            print(f"the connection to {node} was lost; the command goes on there", file=sys.stderr)
            sleep(self.options.retry_seconds)
            if not self.is_there():
                return report
            is_begun = True

    def show(self, words: Sequence[str], read: Callable[[str], None] = lambda line: None) -> int:
        """Shows a command's output and errors as they come, and gives each line to `read`.

        The command runs in a process group of its own, which Ctrl-C does not reach.

        Returns:
            The command's status.
        """
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        if self._is_ending:
            # It began while the others were ended.
            self._end_processes()
        for line in process.stdout or ():
            # On a line of its own, even if a host was cut off within a line.
            sys.stdout.write(line if line.endswith("\n") else line + "\n")
            read(line)
        status = process.wait()
        return status if status >= 0 else 128 - status

    def _end_processes(self) -> None:
        self._is_ending = True
        for process in list(self._processes):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def _stop(self, status: int) -> None:
        """Ends what runs at the end of --max_hours; otherwise says that it goes on."""
        if status == TIMED_OUT:
            print(f"{self.max_hours:g} h are over: ending the run", file=sys.stderr)
            self._on_all(self._end)
        elif self.goes_on:
            print("the command goes on where it has begun; follow it: --attach", file=sys.stderr)

    def _end(self, node: str) -> None:
        words = self.connect_words(node, f"timeout {SAVING} {HOST} --end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, timeout=ENDING)
