"""Kills, full disks and damaged files: what the pipeline and other commands make of each.

    python benchmarks/faults.py --directory=/tmp/faults --kills=100 --disks=50 --flips=100

A small pipeline (one system, two rounds, 500 passages) and then `tokenize`, `encode`, `compare` (a
folder of 40 passages), `import`, `export` and `memory add` run undisturbed once. Then, each from a
seeded draw, of one of these commands, in a directory of its own:

- kill: SIGKILL at a moment drawn uniformly from those in which the command writes, then the same
  command again;
- full disk: a disk (tmpfs) with room for a drawn share of what the command writes, then more room
  and the same command again. Where no disk may be mounted, no file may grow beyond a drawn size;
- flip: one bit of one file is changed, what the command wrote is removed (of the pipeline, the
  records of the stages after a drawn one), and the command runs again.

A kill that comes after the end, and a disk that suffices, are no trials. Kills and full disks must
end in the undisturbed bits, leave no lock, scratch file or unfinished checkpoint, and pass
`taser verify`. A flip must be found, by the command or by `taser verify`, with status 2 and a
message that names the damaged file; or the command has written that file again, and all bits are
the undisturbed ones. Trials are kept in faults.jsonl: run the command again to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from trials import (
    Notes,
    SmallWorld,
    beir,
    bits,
    environment,
    gin,
    machine,
    orphans,
    pipeline,
    shares,
    write_with_vocabulary,
)

KINDS = ("kill", "full disk", "flip", "none")
TASER = (sys.executable, "-m", "taser_jax.cli.main")
# No part of an artefact: nothing has a record of them.
_LOGS = ("metrics.jsonl", "events.out.tfevents", "-cache", "-atime")


@dataclasses.dataclass(frozen=True)
class Job:
    """A command whose faults are tried.

    Attributes:
        command: the folder of a trial -> the command line.
        output: what it writes, in that folder.
        inputs: what it reads there, of which flips are drawn.
    """

    command: Callable[[pathlib.Path], Sequence[str]]
    output: str
    inputs: Sequence[str]


def _tokenize(world: pathlib.Path) -> Sequence[str]:
    small = gin(MIXTURE_OR_TASK_NAME="small", MIXTURE_OR_TASK_MODULE="small_tasks")
    lengths = gin(TASK_FEATURE_LENGTHS={"query": 16, "passage": 24}, TOKEN_STORE=world / "shorter")
    where = gin(DATA_DIR=world / "data", VOCABULARY=world / "vocabulary")
    return (*TASER, "tokenize", *where, *small, *lengths)


def _compare(world: pathlib.Path) -> Sequence[str]:
    given = (world / "beir", f"--pretrained={world / 'bert'}", f"--out={world / 'compared'}")
    small = gin(TRAIN_STEPS=4, BATCH_SIZE=8, VALIDATION_SHARE=0.3, SYSTEMS="shared")
    return (*TASER, "compare", *map(str, given), *small, *gin("ValidationConfig", num_batches=1))


def _encode(world: pathlib.Path) -> Sequence[str]:
    where = gin(TOKEN_STORE=world / "tokens", EMBEDDINGS_DIR=world / "embeddings")
    return (*TASER, "encode", *where, *gin(MODEL_DIR=world / "out/dpr-1/model"))


def _import(world: pathlib.Path) -> Sequence[str]:
    return (*TASER, "import", *gin(PRETRAINED=world / "bert", MODEL_DIR=world / "imported"))


def _export(world: pathlib.Path) -> Sequence[str]:
    where = gin(MODEL_DIR=world / "out/dpr-1/model", EXPORT_DIR=world / "exported")
    return (*TASER, "export", "sentence_transformers", *where)


def _add_memory(world: pathlib.Path) -> Sequence[str]:
    where = gin(MEMORY_DIR=world / "memory", TOKEN_STORE=world / "tokens", NAME="small")
    return (*TASER, "memory", "add", *where, *gin(MODEL_DIR=world / "out/dpr-1/model"))


_MODEL = "out/dpr-1/model"
JOBS = {
    "pipeline": Job(lambda world: (*TASER, *pipeline(world, "out")), "out", ("data", "tokens")),
    "tokenize": Job(_tokenize, "shorter", ("data", "vocabulary")),
    "encode": Job(_encode, "embeddings", ("tokens", _MODEL)),
    # Nothing has recorded texts and weights from elsewhere.
    "compare": Job(_compare, "compared", ()),
    "import": Job(_import, "imported", ()),
    "export": Job(_export, "exported", (_MODEL,)),
    "memory add": Job(_add_memory, "memory", ("tokens", _MODEL)),
}


def main() -> None:
    """Runs what trials are left and prints the table."""
    parser = argparse.ArgumentParser(description="kills, full disks and damaged files")
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    for kind, count in (("kills", 100), ("disks", 50), ("flips", 100)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin no trial after so many")
    options = parser.parse_args()
    until = time.monotonic() + 60 * (options.minutes or 1e9)
    trials = Trials(options.directory.resolve(), JOBS, seed=options.seed, make=make_world)
    # One trial without a fault of each command: all is made again, and nothing may change.
    counts = (options.kills, options.disks, options.flips, len(JOBS))
    for number in range(max(counts)):
        for kind, count in zip(KINDS, counts, strict=True):
            if number < count and time.monotonic() < until:
                trials.run(kind, number)
    print(table(trials.notes.lines))
    print(f"\n{machine(trials.seconds['pipeline'])}")


def make_world(world: pathlib.Path) -> None:
    """What the pipeline, `compare` and `import` read."""
    SmallWorld(world).make()
    write_with_vocabulary(world / "bert", world / "vocabulary", num_layers=2)
    write_beir(world / "beir")


def write_beir(folder: pathlib.Path) -> None:
    """Forty passages of random words and as many questions, the ends of these."""
    rng = np.random.default_rng(0)
    words = ("river", "sea", "hill", "lake", "moor", "wood", "cliff", "marsh", "field", "shore")
    texts = [" ".join(rng.choice(words, 8)) + f" {number}" for number in range(40)]
    beir(
        folder,
        corpus={f"d{number}": text for number, text in enumerate(texts)},
        queries={f"q{number}": text[-20:] for number, text in enumerate(texts)},
        train=[f"q{number} d{number} 1" for number in range(28)],
        test=[f"q{number} d{number} 1" for number in range(28, 40)],
    )


class Trials:
    """The trials of one directory.

    Args:
        root: holds what runs undisturbed, and faults.jsonl.
        jobs: name -> a command; later ones may read what earlier ones wrote.
        seed: of all draws.
        make: makes what the first job reads.
        modules: a folder with modules that the commands find first.
    """

    def __init__(
        self,
        root: pathlib.Path,
        jobs: Mapping[str, Job],
        *,
        seed: int,
        make: Callable[[pathlib.Path], None],
        modules: Sequence[pathlib.Path] = (),
    ) -> None:
        self._root, self._jobs, self._seed = root, jobs, seed
        self._world, self._trial, self._log = root / "world", root / "trial", root / "trial.log"
        root.mkdir(parents=True, exist_ok=True)
        self.notes = Notes(root / "faults.jsonl")
        self._environment = environment(root, *modules)
        self.seconds = self._undisturbed(make)
        self._bits = {name: bits(self._world / job.output) for name, job in jobs.items()}

    def _undisturbed(self, make: Callable[[pathlib.Path], None]) -> dict[str, float]:
        """Makes what all trials begin from; the seconds of each command with a warm cache."""
        finished = self._root / "undisturbed.json"
        if not finished.exists():
            shutil.rmtree(self._world, ignore_errors=True)
            # Trials lie where this ran, for negatives record the path of runs.
            shutil.rmtree(self._trial, ignore_errors=True)
            self._trial.mkdir()
            make(self._trial)
            seconds = {}
            for name, job in self._jobs.items():
                # The first one compiles.
                for _ in range(2):
                    shutil.rmtree(self._trial / job.output, ignore_errors=True)
                    process = self._start(job.command(self._trial))
                    began = appeared(process, self._trial / job.output)
                    if process.wait():
                        raise SystemExit(f"no undisturbed {name}: see {self._log}")
                    seconds[name] = time.monotonic() - began
            self._trial.rename(self._world)
            finished.write_text(json.dumps(seconds))
        return json.loads(finished.read_text())

    def _start(
        self, command: Sequence[str], *, limit: int | None = None
    ) -> subprocess.Popen[bytes]:
        def confine() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [*command],
                env=self._environment,
                stdout=subprocess.DEVNULL,
                # A log file would be confined, too.
                stderr=log if limit is None else subprocess.DEVNULL,
                preexec_fn=confine,
            )

    def run(self, kind: str, number: int) -> None:
        """One trial, unless it is done."""
        if self.notes.has(kind=kind, number=number):
            return
        rng = np.random.default_rng([self._seed, KINDS.index(kind), number])
        names = [name for name, job in self._jobs.items() if job.inputs or kind != "flip"]
        name = names[number % len(names)]
        job, world = self._jobs[name], self._trial
        line: dict[str, Any] = {"kind": kind, "number": number, "job": name, "first": None}
        with self._place(kind, job, rng) as (told, limit, grow):
            if kind == "kill":
                moment = rng.uniform(0, self.seconds[name])
                told = f"{moment:.1f} s"
                process = self._start(job.command(world))
                line["first"] = killed_after(moment, process, world / job.output)
            elif kind == "full disk":
                line["first"] = self._start(job.command(world), limit=limit).wait()
                grow()
            else:
                told = damage(world, job, rng, flips=kind == "flip")
            last = self._start(job.command(world)).wait()
            said = self._log.read_text(errors="replace")
            digests = bits(world / job.output)
            checked = self._start([*TASER, "verify", f"--gin.verify.directory={world}"]).wait()
            said_by_verify = self._log.read_text(errors="replace")
            line |= {"what": told, "last": last, "verify": checked, "orphans": orphans(world)}
            undisturbed = dict(self._bits[name])
            if kind == "flip":
                damaged = told.split(" of ")[-1]
                file = pathlib.PurePath(damaged)
                line["named"] = file.name in (said if last else said_by_verify)
                line["restored"] = not differs(world / damaged, self._world / damaged)
                # What nobody has read or written again is still as it was damaged.
                for files in (digests, undisturbed):
                    files.pop(os.path.relpath(damaged, job.output), None)
            line["same"] = digests == undisturbed
        if not is_right(line):
            line["log"] = (said + said_by_verify)[-2000:]
        self.notes.add(**line)

    @contextlib.contextmanager
    def _place(
        self, kind: str, job: Job, rng: np.random.Generator
    ) -> Iterator[tuple[str, int | None, Callable[[], object]]]:
        """A copy of what the job reads: on a full disk one of little room, and what gives more."""
        shutil.rmtree(self._trial, ignore_errors=True)
        self._trial.mkdir()
        told, limit, share = "", None, rng.uniform(0.02, 0.9)

        def without_output(folder: str, names: list[str]) -> list[str]:
            is_world = pathlib.Path(folder) == self._world
            return [job.output] if is_world and kind in ("kill", "full disk") else []

        written = size(self._world / job.output)
        room = size(self._world) - written + int(share * written)
        is_mounted = kind == "full disk" and mounted(self._trial, room)
        try:
            if kind == "full disk":
                limit = None if is_mounted else int(10 ** rng.uniform(1.5, 5.5))
                told = f"room for {share:.0%}" if is_mounted else f"{limit} bytes a file"
            shutil.copytree(self._world, self._trial, ignore=without_output, dirs_exist_ok=True)
            yield told, limit, lambda: is_mounted and mounted(self._trial, 1 << 30, again=True)
        finally:
            if is_mounted:
                subprocess.run(["umount", "--lazy", self._trial], check=True)


def size(folder: pathlib.Path) -> int:
    """Bytes of a folder's files on a disk with pages of 4 KiB, on which folders take no room."""
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in files)


def mounted(folder: pathlib.Path, room: int, *, again: bool = False) -> bool:
    """Mounts a disk of so many bytes, or changes its size; False where that is not permitted."""
    options = f"{'remount,' if again else ''}size={room}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    return subprocess.run(command, capture_output=True).returncode == 0


def differs(file: pathlib.Path, undisturbed: pathlib.Path) -> bool:
    """Whether a file is there with other bytes."""
    return file.exists() and file.read_bytes() != undisturbed.read_bytes()


def counts(line: Mapping[str, Any]) -> bool:
    """Whether the fault came about."""
    if line["kind"] == "kill":
        return line["first"] == -signal.SIGKILL
    return line["kind"] != "full disk" or line["first"] != 0


def is_right(line: Mapping[str, Any]) -> bool:
    """Whether a trial went as it must."""
    if line["kind"] == "flip":
        if line["last"] == 0 and line["verify"] == 0:
            return line["same"] and line["restored"]
        # What is found by `verify` alone has changed no answer.
        return line["named"] and (line["last"] == 2 or (line["verify"] == 2 and line["same"]))
    first = {"kill": (-signal.SIGKILL, 0), "full disk": (2, 0), "none": (None,)}[line["kind"]]
    ended = line["first"] in first and (line["last"], line["verify"]) == (0, 0)
    return ended and line["same"] and not line["orphans"]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a line for each kind of fault."""
    rows = [
        "| fault | trials that counted | first run ended with | same command again | `verify` "
        "| same bits | left over | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        mine = [line for line in lines if line["kind"] == kind and counts(line)]
        if mine:
            ended = [shares(line[name] for line in mine) for name in ("first", "last", "verify")]
            same = sum(line["same"] for line in mine)
            left = sum(bool(line["orphans"]) for line in mine)
            wrong = sum(not is_right(line) for line in mine)
            figures = " | ".join(map(str, (*ended, same, left, wrong)))
            rows.append(f"| {kind} | {len(mine)} | {figures} |")
    return "\n".join(rows)


def appeared(process: subprocess.Popen[bytes], output: pathlib.Path) -> float:
    """Waits until a process writes, or ends; the time then."""
    while process.poll() is None and not output.exists():
        time.sleep(0.002)
    return time.monotonic()


def killed_after(seconds: float, process: subprocess.Popen[bytes], output: pathlib.Path) -> int:
    """Kills a process so long after its output appeared; its exit code."""
    appeared(process, output)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def damage(world: pathlib.Path, job: Job, rng: np.random.Generator, *, flips: bool) -> str:
    """Flips a bit of a file and forgets what the command made of it; what was done."""
    records = (world / job.output / "stages").glob("*.json")
    stages = sorted(records, key=lambda path: path.stat().st_mtime_ns)
    places = [world / name for name in (*job.inputs, *([job.output] if stages else ()))]
    files = [path for place in places for path in sorted(place.rglob("*")) if _is_content(path)]
    told = "nothing"
    if files:
        path = files[rng.integers(len(files))]
        content = bytearray(path.read_bytes())
        place = int(rng.integers(len(content)))
        content[place] ^= 1 << int(rng.integers(8))
        told = f"byte {place} of {path.relative_to(world)}"
        if flips:
            path.write_bytes(content)
    stages_kept = int(rng.integers(len(stages) + 1))
    for record in stages[stages_kept:]:
        record.unlink(missing_ok=True)
    if not stages:
        shutil.rmtree(world / job.output, ignore_errors=True)
    return f"{stages_kept} stages kept, {told}"


def _is_content(path: pathlib.Path) -> bool:
    is_log = any(name in path.name for name in _LOGS)
    return path.is_file() and not is_log and path.stat().st_size > 0


if __name__ == "__main__":
    main()
