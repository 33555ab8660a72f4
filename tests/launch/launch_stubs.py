"""Stand-ins for gcloud, xpk, docker, ssh and others that record what they are asked."""

import getpass
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))
import launch  # noqa: E402

TRAIN = ("--", "train", "--gin_file=runs/taser_base.gin", "--gin.MODEL_DIR=gs://bucket/my model")
# What launchers write on what they make for this user.
MINE = f"taser_jax-{getpass.getuser()}"
TPU = ("--name=pod", "--zone=us-central2-b")
# Launchers that make what they run on: of one slice, and of several.
ONE = ("tpu_vm.sh", *TPU, "--type=v4-32")
SEVERAL = ("tpu_multislice.sh", *TPU, "--type=v4-32", "--slices=2")
EITHER = pytest.mark.parametrize("launcher", [ONE, SEVERAL], ids=["one slice", "slices"])
XPK = ("--cluster=tpus", "--workload=taser-1", "--type=v5litepod-64", "--image=r/taser:1")

STUBBED = ("gcloud", "xpk", "docker", "srun", "sbatch", "ssh", "scp")

NOT_FOUND = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource "
    "'projects/p/locations/us-central2-b/nodes/pod' was not found."
)
# What docker says of an image that was pushed, and under another name before.
PUSHED = ("image inspect", "other/taser@sha256:00\nr/taser@sha256:1234\n", 0)
# In place of taser: runs until it is told to stop.
STAYS = "trap 'sleep 1; echo saved; exit 75' TERM; echo ready; while true; do sleep 0.1; done"


def program(path: pathlib.Path, text: str) -> str:
    """Writes a small program of bash, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


# Answers from a list of [pattern, output, status]; each is used once, the last one for ever. Output
# that ends with an ellipsis is a line that was cut off, and after a dollar it is a shell command to
# run. What launchers send is there only while they run: a file is kept, a directory's files are
# listed.
_STUB = """\
import json, os, pathlib, shutil, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if "scp" in words:
    shutil.copy(words[4], folder / "sent.tgz")
if words[:1] == ["build"]:
    root = pathlib.Path(words[-1])
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    (folder / "image.json").write_text(json.dumps(files))
answers = json.loads((folder / "answers.json").read_text())
for number, (pattern, output, status) in enumerate(answers):
    if pattern in " ".join(words):
        if any(pattern == other for other, _, _ in answers[number + 1:]):
            del answers[number]
            (folder / "answers.json").write_text(json.dumps(answers))
        if output.startswith("$ "):
            os.execvp("bash", ["bash", "-c", output[2:], "stub", *words])
        file = sys.stderr if output.startswith("ERROR: ") else sys.stdout
        print(output, end="" if output.endswith("...") else "\\n", file=file)
        sys.exit(status)
"""


class Stubs:
    """Runs launchers with the stand-ins first on the PATH.

    Args:
        folder: an empty one, for what is recorded.
        capture: what launchers print, and the programs that they call.
    """

    def __init__(self, folder: pathlib.Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capture = capture
        (folder / "stub.py").write_text(_STUB.format(folder=str(folder)))
        for name in STUBBED:
            program(folder / "bin" / name, f'exec {sys.executable} -S {folder}/stub.py "$@"')
        program(folder / "bin" / "sleep", f'echo "$1" >>{folder}/sleeps')
        self.answer()

    def answer(self, *answers: tuple[str, str, int], states: Sequence[str] = ("READY",)) -> None:
        """Sets what calls are answered; what is left out goes well.

        Args:
            answers: (words the call holds, output, status).
            states: what gcloud says one after another of a TPU VM or queued resource: a state, all
                that describes it, or an error.
        """
        described = []
        for state in states:
            for kind, describe in (("tpu-vm", node), ("queued-resources", queued)):
                said = NOT_FOUND if state == "ABSENT" else state
                said = said if said.startswith(("{", "ERROR")) else describe(said)
                described.append((f"{kind} describe", said, int(said.startswith("ERROR"))))
        if not any(words == "_host.sh" for words, _, _ in answers):
            described.append(("_host.sh", finished(), 0))
        (self.folder / "answers.json").write_text(json.dumps([*answers, *described]))

    def start(self, script: str, *arguments: str, **options) -> subprocess.Popen[str]:
        """Starts a launcher."""
        return subprocess.Popen(
            ["bash", str(LAUNCH / script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell cannot trap what was ignored when it began, as for jobs in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )

    def run(
        self, script: str, *arguments: str, status: int = 0, **options
    ) -> subprocess.CompletedProcess[str]:
        """Runs a launcher, which must end with this status.

        In this process, where it is this checkout's `launch.py`.
        """
        launcher = script.removesuffix(".sh")
        if launcher in launch.FLOWS and not options:
            completed = self._run_here(launcher, arguments)
        else:
            path = options.pop("checkout", LAUNCH.parent) / "launch" / script
            completed = subprocess.run(
                ["bash", str(path), *arguments],
                capture_output=True,
                text=True,
                timeout=60,
                **options,
            )
        assert completed.returncode == status, completed.stderr
        return completed

    def _run_here(
        self, launcher: str, arguments: tuple[str, ...]
    ) -> subprocess.CompletedProcess[str]:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
        former = {number: signal.getsignal(number) for number in handled}
        self._capture.readouterr()
        try:
            status = launch.main([launcher, *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, status, *self._capture.readouterr())

    @property
    def calls(self) -> list[list[str]]:
        """Words of each call, in order."""
        return [json.loads(line) for line in self._lines("calls.jsonl")]

    @property
    def sleeps(self) -> int:
        """How often a launcher has waited."""
        return len(self._lines("sleeps"))

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def runs(self) -> list[list[str]]:
        """Calls that start taser on hosts; those that follow it again are left out."""
        return [call for call in self.calls if "_host.sh" in " ".join(call) and not attaches(call)]

    def asked(self, *words: str) -> list[list[str]]:
        """Calls that begin with these words, `compute tpus` left out."""
        return [call for call in self.calls if call[2 : 2 + len(words)] == list(words)]


def node(state: str, label: str = MINE) -> str:
    """What gcloud says of a TPU VM, and of who launched it."""
    return json.dumps({"state": state, "labels": {"launcher": label}})


def queued(state: str, label: str = MINE, **error: object) -> str:
    """What gcloud says of a queued resource, and of the error for which it FAILED."""
    spec = [{"node": {"labels": {"launcher": label}}}]
    failed = {"failedData": {"error": error}} if error else {}
    return json.dumps({"state": {"state": state, **failed}, "tpu": {"nodeSpec": spec}})


def attaches(call: list[str]) -> bool:
    """Whether a call follows what a host runs already."""
    return "_host.sh --attach" in " ".join(call)


def finished(hosts: int = 2, status: int = 0) -> str:
    """What hosts print that end with one status."""
    return "\n".join(f"loss 1.0\ntaser-status {status} on host-{i}" for i in range(hosts))
