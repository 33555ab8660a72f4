"""Pytest plugin: seconds per test file; parallel runs start with the files that take longest.

`--file-times` prints the table and keeps it in file_times.json, from which parallel runs take their
order. They are CPU seconds, which are nearly the same on a busy machine, with those of finished
child processes.
"""

import collections
import json
import os
import pathlib

import pytest

KEPT = pathlib.Path(__file__).with_name("file_times.json")
# Files below this are not kept: their order does not matter, and file_times.json changes less.
SHORT_SECONDS = 2.0


def file_of(nodeid):
    """tests/test_x.py of "tests/test_x.py::test_y[1]"."""
    return nodeid.partition("::")[0]


def pytest_addoption(parser):
    parser.addoption("--file-times", action="store_true", help="print and keep seconds per file")


def pytest_configure(config):
    config.pluginmanager.register(FileTimes(config), "file-times-of-this-run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Longest files first; the order within a file is kept."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(KEPT.read_text())
        items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0))


class FileTimes:
    """Adds up what each test's phases took, in the process that runs it and in pytest's own."""

    def __init__(self, config):
        self.config, self.last, self.seconds = config, 0.0, collections.Counter()

    def pytest_runtest_logstart(self):
        self.last = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = sum(os.times()[:4])
        # Attributes of a report travel from a worker to the process that prints.
        report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[file_of(report.nodeid)] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        if self.config.getoption("file_times"):
            terminalreporter.section("CPU seconds per test file")
            for file, seconds in self.seconds.most_common():
                terminalreporter.write_line(f"{seconds:8.1f}  {file}")
            self.keep()

    def keep(self):
        """Updates the files that ran, drops those that are gone."""
        long = {
            file: round(seconds)
            for file, seconds in sorted((json.loads(KEPT.read_text()) | self.seconds).items())
            if seconds >= SHORT_SECONDS and (self.config.rootpath / file).exists()
        }
        KEPT.write_text(json.dumps(long, indent=2) + "\n")
