"""Kills, full disks and damaged files: what `taser pipeline taser` makes of each.

    python benchmarks/faults.py --directory=/tmp/faults --kills=100 --sizes=20 --flips=100

A small pipeline (one system, two rounds, 500 passages) runs undisturbed once. Then, each from a
seeded draw and in a directory of its own:

- kill: SIGKILL at a moment drawn uniformly from those in which the pipeline writes, then the same
  command again;
- full disk: no file may grow beyond a drawn size (RLIMIT_FSIZE), then the same command again;
- flip: one bit of one file of the finished pipeline, its token store or its collection is changed,
  the records of the stages after a drawn one are removed, and the command runs again.

Kills and full disks must end in the undisturbed bits (runs, negatives, embeddings, values by query,
table) and leave no lock, scratch file or unfinished checkpoint. A flip must be refused with status
2 or change nothing. Trials are kept in faults.jsonl: run the command again to go on.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import jax  # noqa: E402
import numpy as np  # noqa: E402
from small_world import SmallWorld  # noqa: E402

KINDS = ("kill", "full disk", "flip", "none")
_COMPARED = ("*/runs/*.trec", "*/negatives/*.jsonl", "*/embeddings/**/*.npy", "per_query/*.csv")
ORPHANS = (".writer", "*.partial", "*.orbax-checkpoint-tmp*", "*.building")


def main() -> None:
    """Runs what trials are left and prints the table."""
    parser = argparse.ArgumentParser(description="kills, full disks and damaged files")
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    for kind, count in (("kills", 100), ("sizes", 20), ("flips", 100)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin no trial after so many")
    options = parser.parse_args()
    until = time.monotonic() + 60 * (options.minutes or 1e9)
    trials = Trials(options.directory.resolve(), options.seed)
    # One trial without a fault: stages are forgotten and run again, and nothing may change.
    counts = dict(zip(KINDS, (options.kills, options.sizes, options.flips, 1), strict=True))
    for number in range(max(counts.values())):
        for kind, count in counts.items():
            if number < count and time.monotonic() < until:
                trials.run(kind, number)
    print(trials.table())


class Trials:
    """The trials of one directory.

    Args:
        root: holds the small world, the undisturbed pipeline and faults.jsonl.
        seed: of all draws.
    """

    def __init__(self, root: pathlib.Path, seed: int) -> None:
        self._root, self._seed = root, seed
        self._file, self._world = root / "faults.jsonl", root / "world"
        self._log = root / "trial.log"
        root.mkdir(parents=True, exist_ok=True)
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._done = {(line["kind"], line["number"]): line for line in map(json.loads, lines)}
        self._seconds = self._undisturbed()
        self._bits = bits(self._world / "out")

    def _undisturbed(self) -> float:
        """Makes what all trials begin from; seconds of the pipeline with a warm cache."""
        finished = self._root / "undisturbed.json"
        if not finished.exists():
            shutil.rmtree(self._world, ignore_errors=True)
            # Trials lie where the undisturbed pipeline ran, for negatives record the path of runs.
            trial = self._root / "trial"
            shutil.rmtree(trial, ignore_errors=True)
            trial.mkdir()
            SmallWorld(trial).make()
            # The first one compiles.
            for name in ("compiling", "out"):
                process = self._start(trial, name)
                while process.poll() is None and not (trial / name).exists():
                    time.sleep(0.01)
                began = time.monotonic()
                if process.wait():
                    raise SystemExit(f"no undisturbed run: see {self._log}")
            seconds = time.monotonic() - began
            shutil.rmtree(trial / "compiling")
            trial.rename(self._world)
            finished.write_text(json.dumps({"seconds": seconds}))
        return float(json.loads(finished.read_text())["seconds"])

    def _start(
        self, world: pathlib.Path, name: str, *, limit: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts the pipeline, as a user would."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path[:2]),
            "JAX_COMPILATION_CACHE_DIR": str(self._root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

        def confine() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "taser_jax.cli.main", *pipeline(world, name)],
                env=environment,
                stdout=subprocess.DEVNULL,
                # A log file would be confined, too.
                stderr=log if limit is None else subprocess.DEVNULL,
                preexec_fn=confine,
            )

    def run(self, kind: str, number: int) -> None:
        """One trial, unless it is done."""
        if (kind, number) in self._done:
            return
        rng = np.random.default_rng([self._seed, KINDS.index(kind), number])
        world = self._root / "trial"
        shutil.rmtree(world, ignore_errors=True)
        is_new = kind in ("kill", "full disk")
        shutil.copytree(self._world, world, ignore=_without_out if is_new else None)
        if kind == "kill":
            moment = rng.uniform(0, self._seconds)
            first = killed_after(moment, self._start(world, "out"), world / "out")
            told = f"{moment:.1f} s"
        elif kind == "full disk":
            size = int(10 ** rng.uniform(1.5, 5.5))
            first = self._start(world, "out", limit=size).wait()
            told = f"{size} bytes"
        else:
            told, first = damage(world, rng, flips=kind == "flip"), None
        last = self._start(world, "out").wait()
        # The damaged file itself is another, where nothing read or replaced it.
        found = bits(world / "out")
        same = last == 0 and all(
            found.get(name) == digest for name, digest in self._bits.items() if name not in told
        )
        left = sorted(
            str(path.relative_to(world)) for name in ORPHANS for path in world.rglob(name)
        )
        line = {"kind": kind, "number": number, "what": told, "first": first, "last": last}
        line |= {"same": same, "orphans": left}
        if not line["same"] or not judged(line):
            line["log"] = self._log.read_text()[-1000:]
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._done[kind, number] = line
        print(f"{kind} {number} ({told}): {first} then {last}, same {same}", flush=True)

    def table(self) -> str:
        """Markdown, a line for each kind."""
        rows = [
            "| fault | trials | first run ended with | same command again | same bits | left over "
            "| wrong |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind in KINDS:
            lines = [line for (of, _), line in self._done.items() if of == kind]
            again = [line["last"] for line in lines]
            if not lines:
                continue
            rows.append(
                f"| {kind} | {len(lines)} | {shares([line['first'] for line in lines])} "
                f"| {shares(again)} | {sum(line['same'] for line in lines)} "
                f"| {sum(bool(line['orphans']) for line in lines)} "
                f"| {sum(not judged(line) for line in lines)} |"
            )
        return "\n".join([*rows, "", machine(self._seconds)])


def machine(seconds: float) -> str:
    """What a table was measured with, and the seconds of the pipeline undisturbed."""
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"{os.cpu_count()} cores, {versions}; {seconds:.1f} s undisturbed."


def pipeline(world: pathlib.Path, name: str) -> list[str]:
    """The command whose faults are tried: one system, two rounds."""
    given = SmallWorld(world).compare(world / name, "--gin.pipeline_taser.hybrid_systems=[]")
    return [
        *(one for one in given if "taser/" not in one),
        "--gin.pipeline_taser.systems={'DPR': @dpr/System()}",
        "--gin.CHECKPOINT_PERIOD=2",
    ]


def judged(line: dict) -> bool:
    """Whether a trial went as it must."""
    if line["kind"] == "none":
        return line["last"] == 0 and line["same"]
    if line["kind"] == "flip":
        return line["last"] == 2 or line["same"]
    first = (-signal.SIGKILL, 0) if line["kind"] == "kill" else (2, 0)
    return line["first"] in first and line["same"] and not line["orphans"]


def shares(codes: list[int | None]) -> str:
    """Exit codes with their counts."""
    return ", ".join(f"{code}: {codes.count(code)}" for code in sorted({*codes} - {None})) or "-"


def killed_after(seconds: float, process: subprocess.Popen[bytes], output: pathlib.Path) -> int:
    """Kills a process so long after its output appeared; its exit code."""
    while process.poll() is None and not output.exists():
        time.sleep(0.002)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def damage(world: pathlib.Path, rng: np.random.Generator, *, flips: bool) -> str:
    """Flips a bit of a file and forgets the stages after one of them; what was done."""
    files = sorted(path for path in world.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[rng.integers(len(files))]
    content = bytearray(path.read_bytes())
    place = int(rng.integers(len(content)))
    content[place] ^= 1 << int(rng.integers(8))
    if flips:
        path.write_bytes(content)
    records = sorted((world / "out" / "stages").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    kept = int(rng.integers(len(records) + 1))
    for record in records[kept:]:
        record.unlink()
    return f"byte {place} of {path.relative_to(world)}, {kept} stages kept"


def bits(output: pathlib.Path) -> dict[str, str]:
    """Digests of what must be the same; the table without how long training took."""
    digests = {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in _COMPARED
        for path in sorted(output.glob(pattern))
    }
    table = output / "table.csv"
    if table.exists():
        with open(table, newline="", encoding="utf-8") as file:
            lines = [{**line, "training": ""} for line in csv.DictReader(file)]
        digests["table.csv"] = json.dumps(lines)
    return digests


def _without_out(folder: str, names: list[str]) -> list[str]:
    return ["out"] if "out" in names else []


if __name__ == "__main__":
    main()
