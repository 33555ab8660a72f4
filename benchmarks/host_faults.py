"""Two hosts, one of them killed, with a slow disk, or with a wrong clock.

    python benchmarks/host_faults.py --directory=/tmp/host_faults

Two processes of one device each run `taser pipeline taser --multihost` of benchmarks/faults.py in
one directory, undisturbed and then, each in the same place:

- kill: in every stage one host gets SIGKILL, half of the stage's time after it began. The other
  must end by itself and say why. Both start again and reach the next stage, where it happens again.
  One such chain for each host; at its end come the bits;
- slow disk: each file that Python writes, renames or removes on one host takes 50 ms longer;
- clock: of one host, an hour ahead or behind, with the times of its files.

The last two are killed in the second training, and go on in the same manner. All must end in the
undisturbed bits and leave no lock, scratch file or unfinished checkpoint. What is done is kept in
host_faults.jsonl: run the command again to go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trials import Notes, SmallWorld, bits, environment, machine, orphans, pipeline, shares

HOSTS = (0, 1)
HOOK = pathlib.Path(__file__).parent / "disturbed_host"
DISTURBANCES = {
    "slow disk": {"DISTURBED_DELAY": "0.05"},
    "clock +1 h": {"DISTURBED_CLOCK": "3600"},
    "clock -1 h": {"DISTURBED_CLOCK": "-3600"},
}
# JAX notices a silent host after 100 seconds; a process that lives much longer hangs.
PATIENCE = 240
KILLED_TRAINING = "dpr-2-train"
_NAMED = "joint work with another host failed"
_ABORTED = "JAX distributed service detected fatal errors"


def main() -> None:
    """Runs what is left and prints the table."""
    parser = argparse.ArgumentParser(description="two hosts with faults")
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--minutes", type=float, help="begin nothing after so many")
    options = parser.parse_args()
    until = time.monotonic() + 60 * (options.minutes or 1e9)
    trials = HostTrials(options.directory.resolve(), lambda: time.monotonic() < until)
    for host in reversed(HOSTS):
        trials.kill_in_every_stage(host)
        for name in DISTURBANCES:
            trials.disturb(name, host)
    print(table(trials.notes.lines, trials.seconds))


class Pair:
    """Two hosts that run one command, with what they said.

    Args:
        arguments: of `taser`, without --multihost.
        folder: for log.0 and log.1.
        environment: of both.
        disturbed: (host, more variables of it).
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: pathlib.Path,
        environment: Mapping[str, str],
        disturbed: tuple[int, Mapping[str, str]] = (0, {}),
    ) -> None:
        self._logs = [folder / f"log.{host}" for host in HOSTS]
        with socket.create_server(("localhost", 0)) as probe:
            address = f"localhost:{probe.getsockname()[1]}"
        joint = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(HOSTS))}
        self.processes = []
        for host, path in zip(HOSTS, self._logs, strict=True):
            own = {"JAX_PROCESS_ID": str(host), **(disturbed[1] if host == disturbed[0] else {})}
            with open(path, "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "taser_jax.cli.main", *arguments, "--multihost"],
                    env=os.environ | dict(environment) | joint | own,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            self.processes.append(process)

    def said(self, host: int) -> str:
        """What a host wrote to stderr."""
        return self._logs[host].read_text(errors="replace")

    def reaches(self, stage: str) -> bool:
        """Waits until the stage has begun; False if both ended before that."""
        while f"\n{stage}: started" not in f"\n{self.said(0)}":
            if all(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.002)
        return True

    def kill(self, host: int) -> Ending:
        """SIGKILL for one host; how the other ended."""
        self.processes[host].send_signal(signal.SIGKILL)
        self.processes[host].wait()
        began = time.monotonic()
        other = 1 - host
        try:
            status = self.processes[other].wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
            self.end()
        return Ending(status, round(time.monotonic() - began, 1), told(self.said(other)))

    def wait(self) -> list[int]:
        """The exit statuses of both."""
        return [process.wait() for process in self.processes]

    def end(self) -> None:
        """Ends both."""
        for process in self.processes:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the host ended that was left.

    Attributes:
        status: its exit status; None if it hung.
        seconds: from the other's death on.
        told: what it said, one of "named", "aborted", "error" and "nothing".
    """

    status: int | None
    seconds: float
    told: str


def told(text: str) -> str:
    """Which message of a lost host stands in a log, the most helpful one first.

    Example:
        >>> told("error on host 1: joint work with another host failed (UNAVAILABLE)")
        'named'
    """
    if _NAMED in text:
        return "named"
    if _ABORTED in text:
        return "aborted"
    return "error" if "error on host" in text else "nothing"


class HostTrials:
    """The trials of one directory.

    Args:
        root: holds the small world, the undisturbed pipeline and host_faults.jsonl.
        has_time: whether another trial may begin.
    """

    def __init__(self, root: pathlib.Path, has_time: Callable[[], bool]) -> None:
        self._root, self._has_time = root, has_time
        self._world = root / "world"
        root.mkdir(parents=True, exist_ok=True)
        self.notes = Notes(root / "host_faults.jsonl")
        undisturbed = self._undisturbed()
        self.seconds, self.stages = float(undisturbed["seconds"]), dict(undisturbed["stages"])
        self._bits = bits(self._world / "out")

    def _undisturbed(self) -> dict[str, Any]:
        """Makes what all trials begin from; its seconds, and those of its stages in order."""
        finished = self._root / "undisturbed.json"
        if not finished.exists():
            shutil.rmtree(self._world, ignore_errors=True)
            shutil.rmtree(self._trial, ignore_errors=True)
            self._trial.mkdir()
            SmallWorld(self._trial).make()
            # The first one compiles.
            for name in ("compiling", "out"):
                began = time.monotonic()
                if self._start(name).wait() != [0, 0]:
                    raise SystemExit(f"no undisturbed run: see {self._root}/log.0 and log.1")
            seconds = time.monotonic() - began
            shutil.rmtree(self._trial / "compiling")
            records = sorted(
                (self._trial / "out" / "stages").glob("*.json"),
                key=lambda path: path.stat().st_mtime_ns,
            )
            stages = {path.stem: json.loads(path.read_text())["seconds"] for path in records}
            self._trial.rename(self._world)
            finished.write_text(json.dumps({"seconds": seconds, "stages": stages}))
        return json.loads(finished.read_text())

    @property
    def _trial(self) -> pathlib.Path:
        # Where the undisturbed pipeline ran, too, for negatives record the path of runs.
        return self._root / "trial"

    def _start(self, name: str, disturbed: tuple[int, Mapping[str, str]] = (0, {})) -> Pair:
        # Host 1 finds nothing in the cache and compiles each time.
        given = environment(self._root, HOOK, JAX_DISABLE_MOST_OPTIMIZATIONS="true")
        return Pair(pipeline(self._trial, name), self._root, given, disturbed)

    def _begin(self, kind: str, host: int) -> None:
        """Empties the place of trials, unless an interrupted run of this one lies there."""
        whose = self._root / "trial.json"
        mine = json.dumps([kind, host])
        if whose.exists() and whose.read_text() == mine and self._trial.exists():
            return
        shutil.rmtree(self._trial, ignore_errors=True)
        shutil.copytree(self._world, self._trial, ignore=shutil.ignore_patterns("out"))
        whose.write_text(mine)

    def kill_in_every_stage(self, host: int) -> None:
        """Kills a host in one stage after the other, and goes on each time."""

        def is_done(stage: str) -> bool:
            return self.notes.has(kind="kill", host=host, stage=stage)

        if is_done("end") or not self._has_time():
            return
        self._begin("kill", host)
        for stage in self.stages:
            if is_done(stage):
                continue
            if not self._has_time():
                return
            self._kill("kill", host, stage)
        self._finish("kill", host)

    def _kill(self, kind: str, host: int, stage: str) -> None:
        pair = self._start("out", (host, DISTURBANCES.get(kind, {})))
        if not pair.reaches(stage):
            raise SystemExit(f"{stage} was not reached ({pair.wait()}): see {self._root}/log.0")
        time.sleep(self.stages[stage] / 2)
        # Stages of a tenth of a second may be over.
        is_within = not (self._trial / "out" / "stages" / f"{stage}.json").exists()
        ending = pair.kill(host)
        said = {} if ending.told == "named" else {"log": pair.said(1 - host)[-2000:]}
        outcome = {"within": is_within, **dataclasses.asdict(ending), **said}
        self.notes.add(kind=kind, host=host, stage=stage, **outcome)

    def disturb(self, kind: str, host: int) -> None:
        """A pipeline with one disturbed host, which is killed once on its way."""
        if self.notes.has(kind=kind, host=host, stage="end") or not self._has_time():
            return
        self._begin(kind, host)
        if not self.notes.has(kind=kind, host=host, stage=KILLED_TRAINING):
            self._kill(kind, host, KILLED_TRAINING)
        self._finish(kind, host)

    def _finish(self, kind: str, host: int) -> None:
        """Runs to the end and compares."""
        began = time.monotonic()
        pair = self._start("out", (host, DISTURBANCES.get(kind, {})))
        last = pair.wait()
        same = last == [0, 0] and bits(self._trial / "out") == self._bits
        outcome = {"last": last, "same": same, "orphans": orphans(self._trial)}
        said = {} if same else {"log": pair.said(0)[-2000:] + pair.said(1)[-2000:]}
        took = round(time.monotonic() - began, 1)
        self.notes.add(kind=kind, host=host, stage="end", took=took, **outcome, **said)


def table(lines: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Markdown, a line for each fault."""
    rows = [
        "| fault | host | kills | in the stage | other host ended with | after at most "
        "| message | restarted | same bits | left over |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("kill", *DISTURBANCES):
        for host in HOSTS:
            mine = [line for line in lines if (line["kind"], line["host"]) == (kind, host)]
            kills = [line for line in mine if line["stage"] != "end"]
            ends = [line for line in mine if line["stage"] == "end"]
            if not kills:
                continue
            result = "- | - | -"
            for end in ends:
                same = "yes" if end["same"] else "no"
                result = f"{' and '.join(map(str, end['last']))} | {same} | {len(end['orphans'])}"
            rows.append(
                f"| {kind} | {host} | {len(kills)} | {sum(line['within'] for line in kills)} "
                f"| {ended(kills)} | {max(line['seconds'] for line in kills)} s "
                f"| {said(kills)} | {result} |"
            )
    return "\n".join([*rows, "", machine(seconds)])


def ended(kills: Sequence[Mapping[str, Any]]) -> str:
    """The other host's statuses with their counts; those that hung."""
    hung = sum(line["status"] is None for line in kills)
    return shares([line["status"] for line in kills]) + (f", hung: {hung}" if hung else "")


def said(kills: Sequence[Mapping[str, Any]]) -> str:
    """What the other host said, with counts."""
    words = [line["told"] for line in kills]
    return ", ".join(f"{word}: {words.count(word)}" for word in sorted({*words}))


if __name__ == "__main__":
    main()
