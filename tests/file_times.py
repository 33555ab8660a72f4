"""Pytest plugin: CPU seconds per test file; parallel runs start with the files that take longest.

`--file-times` prints the table; `--keep-file-times` also writes the seconds to file_times.json,
from which parallel runs take their order. CPU seconds, unlike elapsed ones, are nearly the same
on a busy machine; they include finished child processes.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator

import pytest

KEPT = pathlib.Path(__file__).with_name("file_times.json")
# Files below this are not kept: their order does not matter, and file_times.json changes less.
SHORT_SECONDS = 2.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("file times")
    group.addoption("--file-times", action="store_true", help="print CPU seconds per test file")
    group.addoption(
        "--keep-file-times",
        action="store_true",
        help="also write them to tests/file_times.json, which orders the files of parallel runs",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes(config), "file-times-of-this-run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = slowest_first(items, json.loads(KEPT.read_text()))


def slowest_first(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """Tests ordered by their file's seconds, descending; the order within a file is kept."""
    return sorted(items, key=lambda item: -seconds.get(file_of(item.nodeid), 0))


def file_of(nodeid: str) -> str:
    """tests/test_x.py of "tests/test_x.py::test_y[1]"."""
    return nodeid.partition("::")[0]


@dataclasses.dataclass(eq=False)
class FileTimes:
    """Adds up what each test's phases took, in the process that runs it and in pytest's own.

    Attributes:
        config: of this run.
        last: CPU seconds when the phase before ended.
        seconds: by file.
        tests: number of tests by file.
    """

    config: pytest.Config
    last: float = 0.0
    seconds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tests: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def pytest_runtest_logstart(self) -> None:
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = cpu_seconds()
        # Attributes of a report travel from a worker to the process that prints.
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = file_of(report.nodeid)
        self.seconds[file] += getattr(report, "cpu_seconds", 0.0)
        self.tests[file] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        keeps = self.config.getoption("keep_file_times")
        if not (keeps or self.config.getoption("file_times")):
            return
        terminalreporter.section("CPU seconds per test file")
        for file, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} {self.tests[file]:5d} tests  {file}")
        terminalreporter.write_line(f"{self.seconds.total():8.1f} {self.tests.total():5d} tests")
        if keeps:
            self.keep()

    def keep(self) -> None:
        """Updates the files that ran, drops those that are gone."""
        kept = json.loads(KEPT.read_text()) | dict(self.seconds)
        root = self.config.rootpath
        long = {
            file: round(seconds)
            for file, seconds in sorted(kept.items())
            if seconds >= SHORT_SECONDS and (root / file).exists()
        }
        KEPT.write_text(json.dumps(long, indent=2) + "\n")
