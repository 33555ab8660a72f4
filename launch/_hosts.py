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
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from _tables import AGAIN, FINISHED, MEND, TIMED_OUT, LaunchError, warn

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONNECTION_FAILED = 255
# How often in a row a lost connection is made anew before the hosts count as lost, and the seconds
# after which a connection starts a row of its own.
RECONNECTIONS, LASTED = 5, 60
HOST = "bash taser_jax/launch/_host.sh"
UNPACK = "mkdir -p taser_jax && tar -xzf taser_jax.tgz -C taser_jax && "


class Shell:
    """Runs commands; a dry run prints them so that a shell can read them back.

    Args:
        dry_run: whether to print.
        scratch: a folder for files that are sent.
    """

    def __init__(self, dry_run: bool, scratch: str) -> None:
        self.dry_run, self.scratch = dry_run, pathlib.Path(scratch)
        self.is_ending = False
        self._connections: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def require(self, program: str, fix: str) -> None:
        """Requires a program, unless nothing is run."""
        if not self.dry_run and shutil.which(program) is None:
            raise LaunchError(f"{program} is not on the PATH\n  fix: {fix}")

    def step(self, words: Sequence[str]) -> int:
        """Runs a command with this terminal; returns its status."""
        if self.dry_run:
            print(shlex.join(words))
            return 0
        return subprocess.run(words).returncode

    def ask(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Status, output and errors of a command."""
        answer = subprocess.run(words, capture_output=True, text=True, errors="replace")
        return answer.returncode, answer.stdout, answer.stderr

    def follow(self, words: Sequence[str], read: Callable[[str], None] = lambda line: None) -> int:
        """Shows a command's output and errors as they come, and gives each line to `read`.

        The command runs in a process group of its own, which Ctrl-C does not reach.

        Returns:
            The command's status.
        """
        if self.dry_run:
            return self.step(words)
        with self._lock:
            if self.is_ending:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._connections.add(process)
        for line in process.stdout or ():
            # On a line of its own, even if a host was cut off within a line.
            sys.stdout.write(line if line.endswith("\n") else line + "\n")
            read(line)
        status = process.wait()
        with self._lock:
            self._connections.discard(process)
        return status if status >= 0 else 128 - status

    def end(self) -> None:
        """Ends everything that is followed."""
        with self._lock:
            self.is_ending = True
            for process in self._connections:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def sleep(self, seconds: int) -> None:
        """Waits, unless everything is about to end."""
        if not self.is_ending:
            subprocess.run(["sleep", str(seconds)])


def archive_checkout(shell: Shell) -> str:
    """Packs the files that git has, as they are here: nothing else is meant for other machines.

    Raises:
        LaunchError: this is no git checkout.
    """
    archive, names = str(shell.scratch / "taser_jax.tgz"), shell.scratch / "files"
    shell.step(["mkdir", "-p", str(shell.scratch)])
    listing = ["git", "-C", str(ROOT), "ls-files", "-z"]
    if shell.dry_run:
        print(f"{shlex.join(listing)} >{shlex.quote(str(names))}")
    else:
        status, output, errors = shell.ask(listing)
        if status:
            raise LaunchError(
                f"git cannot list the files of {ROOT}: {errors.strip()}\n  fix: launch from a git "
                "checkout; an unpacked archive becomes one by git init && git add ."
            )
        # One that was deleted here is still in git's list.
        names.write_text("\0".join(n for n in output.split("\0") if n and (ROOT / n).exists()))
        new = [*listing[:-1], "--others", "--exclude-standard", "--", "*.py", "*.gin"]
        for name in shell.ask(new)[1].splitlines()[:3]:
            warn(f"git does not have {name}, so hosts do not get it; use git add")
    if shell.step(["tar", "-czf", archive, "-C", str(ROOT), "--null", "-T", str(names)]):
        raise LaunchError("the checkout cannot be packed; see the message of tar")
    return archive


class Hosts:
    """Machines that run one command together.

    Each kind has `plan`, which says what the launcher will do. Those that are connected to have
    `send_words`, which copy a file to the home folder of each host of a node, and `connect_words`,
    which run a shell command there.

    Attributes:
        shell: what runs commands.
        options: of the command line.
        nodes: names of hosts, or of groups of hosts that one connection reaches.
        install: shell command for the folder `taser_jax` of a host.
        goes_on: whether the command outlives its connection.
        losses: what the output holds if a host is lost; None: its connection tells.
    """

    install = ""
    goes_on = True
    losses: str | None = None

    def __init__(self, shell: Shell, options: argparse.Namespace, nodes: list[str]) -> None:
        self.shell, self.options, self.nodes = shell, options, nodes

    def make_ready(self) -> None:
        """Waits until the hosts can be connected to."""

    def variables(self, node: str) -> list[str]:
        """Tells JAX of the other hosts, where it does not find them by itself."""
        return []

    def run_words(self, node: str) -> list[str]:
        """Starts taser on each host of a node."""
        settings = (each.split("=", 1) for each in self.variables(node) + self.options.env)
        assignments = [f"{name}={shlex.quote(value)}" for name, value in settings]
        command = [*assignments, HOST, shlex.join(self.options.command)]
        return self.connect_words(node, " ".join(command))

    def is_there(self) -> bool:
        """Whether the hosts still exist."""
        return True

    def farewell(self, status: int, steps_per_second: float) -> None:
        """Deletes what is billed, or says what it costs."""

    def retries(self, losses: str) -> str:
        """A line of the plan."""
        options = self.options
        return f"retries: {options.retries}, {losses}, {options.retry_seconds} s apart"


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
        rate = re.search(r"([\d.]+) ?(?:(step|it)/s|s/(?:step|it))", line)
        if rate and float(rate[1]):
            self.steps_per_second = float(rate[1]) if rate[2] else 1 / float(rate[1])

    @property
    def is_cut_off(self) -> bool:
        """Whether the connection was lost, and taser may still run."""
        return not any(self.statuses) and outcome([self]) == AGAIN


def outcome(reports: Sequence[Report]) -> int:
    """The status of an attempt.

    When one host is lost, the others fail with various statuses, so the order is: a problem to fix
    (2); a host that was preempted (75) or lost (ssh's 255); a job that did not start, so that no
    host reports a status (ssh's or the shell's); any other failure.

    Example:
        Hosts that report 134 and 2 give 2; one that reports 0 while the other is silent gives 75.
    """
    statuses = [status for report in reports for status in report.statuses]
    connections = [report.connection for report in reports]
    if MEND in statuses:
        return MEND
    failures = list(filter(None, statuses + connections))
    is_lost = failures and any(report.is_lost for report in reports)
    if is_lost or AGAIN in statuses or CONNECTION_FAILED in connections:
        return AGAIN
    if not statuses:
        return next(iter(failures), 1)
    # Where every host that reported has finished, one may not have reported.
    return next(filter(None, statuses), AGAIN if any(connections) else FINISHED)


class Attempts:
    """Runs a command on hosts, again after a preemption."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.shell, self.options = hosts, hosts.shell, hosts.options
        self._steps_per_second = 0.0
        self._archive = ""
        self._were_reached = False

    def run(self) -> int:
        """Makes attempts until the command ends, or the launcher must; returns its status."""
        status = 1
        print("\n".join(f"# {line}" for line in self.hosts.plan()))
        try:
            signal.setitimer(signal.ITIMER_REAL, (self.options.max_hours or 0) * 3600)
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
            if not self.shell.dry_run:
                self.hosts.farewell(status, self._steps_per_second)
        return status

    def _repeat(self) -> None:
        retries = self.options.retries
        for number in range(1, retries + 2):
            try:
                self._attempt()
                if not self.shell.dry_run:
                    print("finished")
                return
            except LaunchError as end:
                if end.status != AGAIN:
                    raise
                print(f"{end} (attempt {number} of {retries + 1})", file=sys.stderr)
            if number <= retries:
                self.shell.sleep(self.options.retry_seconds)
        raise LaunchError("no retries are left; rerun the command to resume", AGAIN)

    def _attempt(self) -> None:
        """Returns if the command has finished."""
        if not self.options.attach:
            self._make_ready()
        elif not self.shell.dry_run and not self.hosts.is_there():
            raise LaunchError("the hosts are not there", AGAIN)
        reports = self._on_all(self._follow)
        self._steps_per_second = max(report.steps_per_second for report in reports)
        self._settle(FINISHED if self.shell.dry_run else outcome(reports))

    def _make_ready(self) -> None:
        if not self.options.skip_install and not self._archive:
            # First, since nothing is billed yet.
            self._archive = archive_checkout(self.shell)
        self.hosts.make_ready()
        failures = list(filter(None, self._on_all(self._prepare)))
        self._settle(MEND if MEND in failures else next(iter(failures), FINISHED))
        self._were_reached = True

    def _stop(self, status: int) -> None:
        """Ends the connections, and at the end of --max_hours what they follow."""
        self.shell.end()
        if status == TIMED_OUT:
            print(f"{self.options.max_hours:g} h are over: ending the run", file=sys.stderr)
            self.shell.is_ending = False
            # Taser has a minute to save.
            end = f"timeout 90 {HOST} --end"
            self._on_all(lambda node: self.shell.step(self.hosts.connect_words(node, end)))
        elif self.hosts.goes_on:
            print("the command goes on where it has begun; follow it: --attach", file=sys.stderr)

    def _on_all(self, work: Callable[[str], Any]) -> list[Any]:
        if self.shell.dry_run:
            return [work(node) for node in self.hosts.nodes]
        with concurrent.futures.ThreadPoolExecutor(len(self.hosts.nodes)) as pool:
            try:
                return list(pool.map(work, self.hosts.nodes))
            except BaseException:
                # Ctrl-C, or the end of --max_hours: threads end with what they follow.
                self.shell.end()
                raise

    def _prepare(self, node: str) -> int:
        """Installs the checkout, runs --setup and copies --data; the status of the failing step."""
        options, hosts, steps = self.options, self.hosts, []
        if not options.skip_install:
            steps.append(hosts.send_words(node, self._archive, "taser_jax.tgz"))
            steps.append(hosts.connect_words(node, UNPACK + hosts.install))
        if options.setup:
            steps.append(hosts.connect_words(node, options.setup))
        if options.data:
            fetch = f".venv/bin/python launch/_fetch.py {shlex.quote(options.data)} data"
            steps.append(hosts.connect_words(node, f"cd taser_jax && {fetch}"))
        return next(filter(None, map(self.shell.follow, steps)), FINISHED)

    def _follow(self, node: str) -> Report:
        """Runs the command on a node; after a lost connection, follows what runs on there."""
        hosts, losses, is_begun = self.hosts, 0, bool(self.options.attach)
        while True:
            report, begin = Report(hosts.losses), time.monotonic()
            words = hosts.run_words(node)
            if is_begun:
                words = hosts.connect_words(node, f"{HOST} --attach")
            report.connection = self.shell.follow(words, report.read)
            if self.shell.dry_run or not (hosts.goes_on and report.is_cut_off):
                return report
            losses = 1 if time.monotonic() - begin > LASTED else losses + 1
            if losses > RECONNECTIONS or self.shell.is_ending:
                return report
            print(f"the connection to {node} was lost; the command goes on there", file=sys.stderr)
            self.shell.sleep(self.options.retry_seconds)
            if not hosts.is_there():
                return report
            is_begun = True

    def _settle(self, status: int) -> None:
        """Ends the attempt for a status that is not 0; hosts that are gone fail with any."""
        if status == FINISHED:
            return
        # gcloud has tried ten times to connect. Hosts that were reached before may be starting;
        # otherwise a key or a firewall is the likely cause.
        starting = self._were_reached and status == CONNECTION_FAILED
        if starting or (status not in (MEND, AGAIN) and not self.hosts.is_there()):
            status = AGAIN
        reason = {
            AGAIN: "preempted, or a host was lost",
            MEND: "see the message of a host above; fix it and start again",
        }.get(status, f"failed with status {status}; see the output above")
        raise LaunchError(reason, status)
