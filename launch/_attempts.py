"""Prepares hosts, runs a command on all of them, and decides the outcome of each attempt."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from _options import environment
from _shell import Shell, archive_checkout
from _tables import AGAIN, FINISHED, MEND

CONNECTION_FAILED = 255
# How often in a row a lost connection is made anew before the hosts count as lost, and the seconds
# after which a connection starts a row of its own.
RECONNECTIONS, LASTED = 5, 60
HOST = "bash taser_jax/launch/_host.sh"


class AttemptError(Exception):
    """The end of an attempt: AGAIN with the reason, or the status to stop with."""

    def __init__(self, status: int, reason: str = "preempted, or a host was lost") -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


@dataclasses.dataclass
class Report:
    """What the hosts of one node said.

    Attributes:
        connection: status of the connection.
        statuses: those that hosts reported of taser.
        steps_per_second: the last one that training printed; 0: none.
    """

    connection: int = 0
    statuses: list[int] = dataclasses.field(default_factory=list)
    steps_per_second: float = 0.0

    def read(self, line: str) -> None:
        """Takes what a line of output says."""
        status = re.search(r"taser-status (\d+) on ", line)
        if status:
            self.statuses.append(int(status[1]))
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
    if AGAIN in statuses or CONNECTION_FAILED in connections:
        return AGAIN
    if not statuses:
        return next(filter(None, connections), 1)
    # Where every host that reported has finished, one may not have reported.
    return next(filter(None, statuses), AGAIN if any(connections) else FINISHED)


class Attempts:
    """Runs a command on hosts, again after a preemption.

    Args:
        options: of the command line.
        hosts: machines that run one command together, a `Pod` or `Machines`: `nodes`, each of which
            one connection reaches, and how they are made ready, sent files and connected to.
        scratch: a folder for the archive.
    """

    def __init__(self, options: argparse.Namespace, hosts: Any, scratch: pathlib.Path) -> None:
        self.shell: Shell = hosts.shell
        self.options = options
        self.hosts = hosts
        self.scratch = scratch
        self.steps_per_second = 0.0
        self._archive: pathlib.Path | None = None
        self._were_reached = False

    def run(self) -> None:
        """One attempt: returns if the command has finished, otherwise raises AttemptError."""
        if not self.options.skip_install and self._archive is None:
            # First, since nothing is billed yet.
            self._archive = archive_checkout(self.shell, self.scratch)
        self.hosts.make_ready()
        failures = list(filter(None, self._on_all(self._prepare)))
        self._settle(MEND if MEND in failures else next(iter(failures), FINISHED))
        self._were_reached = True
        variables = environment(self.options.env)
        if self.shell.dry_run:
            # Secrets are not shown.
            variables = [f"{setting.partition('=')[0]}=..." for setting in variables]

        def command(node: str) -> str:
            settings = (each.split("=", 1) for each in self.hosts.variables(node) + variables)
            assignments = [f"{name}={shlex.quote(value)}" for name, value in settings]
            return " ".join([*assignments, HOST, shlex.join(self.options.command)])

        self._run_on_all(command)

    def attach(self) -> None:
        """Follows what runs already, as `run` does."""
        if not self.shell.dry_run and not self.hosts.is_there():
            raise AttemptError(AGAIN, "the hosts are not there")
        self._run_on_all(lambda node: f"{HOST} --attach")

    def end_runs(self) -> None:
        """Ends the command on all hosts, which gives taser a minute to save."""
        self.shell.is_ending = False
        end = f"timeout 90 {HOST} --end"
        self._on_all(lambda node: self.shell.step(self.hosts.connect_words(node, end)))

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
            steps.append(hosts.send_words(node, str(self._archive), "taser_jax.tgz"))
            steps.append(hosts.connect_words(node, hosts.install))
        if options.setup:
            steps.append(hosts.connect_words(node, options.setup))
        if options.data:
            fetch = f".venv/bin/python launch/_fetch.py {shlex.quote(options.data)} data"
            steps.append(hosts.connect_words(node, f"cd taser_jax && {fetch}"))
        return next(filter(None, map(self.shell.follow, steps)), FINISHED)

    def _run_on_all(self, command: Callable[[str], str]) -> None:
        reports = self._on_all(lambda node: self._follow(node, command(node)))
        if not self.shell.dry_run:
            self.steps_per_second = max(report.steps_per_second for report in reports)
            self._settle(outcome(reports))

    def _follow(self, node: str, command: str) -> Report:
        """Runs a command on a node; after a lost connection, follows what runs on there."""
        losses = 0
        while True:
            report, begin = Report(), time.monotonic()
            words = self.hosts.connect_words(node, command)
            report.connection = self.shell.follow(words, report.read)
            if self.shell.dry_run or not report.is_cut_off:
                return report
            losses = 1 if time.monotonic() - begin > LASTED else losses + 1
            if losses > RECONNECTIONS or self.shell.is_ending:
                return report
            print(f"the connection to {node} was lost; the command goes on there", file=sys.stderr)
            self.shell.sleep(self.options.retry_seconds)
            if not self.hosts.is_there():
                return report
            command = f"{HOST} --attach"

    def _settle(self, status: int) -> None:
        """Raises AttemptError for a status that is not 0; hosts that are gone fail with any."""
        if status == FINISHED:
            return
        # gcloud has tried ten times to connect. Hosts that were reached before may be starting;
        # otherwise a key or a firewall is the likely cause.
        starting = self._were_reached and status == CONNECTION_FAILED
        if starting or (status not in (MEND, AGAIN) and not self.hosts.is_there()):
            status = AGAIN
        raise AttemptError(status)


def with_retries(shell: Shell, options: argparse.Namespace, attempt: Callable[[], None]) -> int:
    """Makes attempts, at most `--retries` further ones; returns the launcher's exit status."""
    for number in range(1, options.retries + 2):
        try:
            attempt()
        except AttemptError as end:
            if end.status != AGAIN:
                print(
                    "stopped: see the error above; fix it and start again"
                    if end.status == MEND
                    else f"failed with status {end.status}: see the output above",
                    file=sys.stderr,
                )
                return end.status
            print(f"{end.reason} (attempt {number} of {options.retries + 1})", file=sys.stderr)
        else:
            if not shell.dry_run:
                print("finished")
            return FINISHED
        if number <= options.retries:
            shell.sleep(options.retry_seconds)
    print("no retries are left; rerun the command to resume", file=sys.stderr)
    return AGAIN
