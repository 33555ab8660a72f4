"""Workloads on GKE: the image, what xpk is given, and what runs in a pod."""

import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
from launch_stubs import LAUNCH, PUSHED, STAYS, TRAIN, XPK, program

pytestmark = pytest.mark.slow


def test_one_image_is_built_pushed_and_run(stubs, checkout):
    options = ("--slices=2", "--retries=3", "--zone=z", "--data=gs://bucket/tokens")
    stubs.answer(PUSHED)
    stubs.run("gke_xpk.sh", *XPK, *options, *TRAIN, checkout=checkout)
    build, push, inspect, create = stubs.calls
    assert build[:3] == ["build", "--platform=linux/amd64", f"--file={build[-1]}/launch/Dockerfile"]
    assert build[3] == "--tag=r/taser:1"
    assert push == ["push", "r/taser:1"]
    assert inspect[:2] == ["image", "inspect"]
    assert create[:6] == ["workload", "create", "--cluster=tpus", "--workload=taser-1",
                          "--tpu-type=v5litepod-64", "--num-slices=2"]  # fmt: skip
    assert {
        *("--zone=z", "--docker-image=r/taser@sha256:1234", "--max-restarts=3"),
        *("--restart-on-exit-codes=75", "--termination-grace-period-seconds=300"),
    } <= set(create)
    command = create[-1].removeprefix("--command=")
    look, _, run = command.partition("; ")
    assert look == "test -e /taser_jax/launch/_container.sh || exit 2"
    # The shell that xpk starts becomes the script, and that becomes taser.
    assert shlex.split(run) == [
        *("exec", "env", "bash", "/taser_jax/launch/_container.sh", "gs://bucket/tokens"),
        *(*TRAIN[1:], "--gin.MESH_REPLICA=2", "--multihost"),
    ]


def test_the_plan_is_printed_before_anything_is_built(stubs, checkout):
    options = ("--zone=z", "--dry_run", *TRAIN)
    completed = stubs.run("gke_xpk.sh", *XPK, *options, checkout=checkout)
    plan = [line for line in completed.stdout.splitlines() if line.startswith("# ")]
    assert "1 slice of v5litepod-64, image r/taser:1" in plan[0]
    assert [line.split(":")[0] for line in plan[1:]] == ["# price", "# retries", "# deletion"]
    assert plan[3].endswith("xpk workload delete --workload=taser-1 --cluster=tpus --zone=z")
    assert stubs.calls == []


def test_an_image_that_is_there_is_not_built_and_flags_reach_xpk(stubs, checkout):
    options = ("--skip_build", "--grace_seconds=60", "--xpk", "--spot", "--storage=tokens")
    completed = stubs.run("gke_xpk.sh", *XPK, *options, *TRAIN, checkout=checkout)
    (create,) = stubs.calls
    assert "warning: r/taser:1 may name another image at a restart" in completed.stderr
    assert create[-3:-1] == ["--spot", "--storage=tokens"]
    assert "--termination-grace-period-seconds=60" in create
    assert "exec env bash " in create[-1]


@pytest.mark.parametrize(("failing", "calls"), [("build", 1), ("push", 2), ("workload", 4)])
def test_the_launcher_ends_as_its_first_failure_does(stubs, checkout, failing, calls):
    stubs.answer(PUSHED, (failing, "", 3))
    stubs.run("gke_xpk.sh", *XPK, "--retries=0", *TRAIN, checkout=checkout, status=3)
    assert len(stubs.calls) == calls


@pytest.mark.parametrize("answer", [("image inspect", "", 0), ("image inspect", "", 1)])
def test_an_image_without_a_digest_is_not_run(stubs, checkout, answer):
    stubs.answer(answer)
    completed = stubs.run("gke_xpk.sh", *XPK, *TRAIN, checkout=checkout, status=2)
    assert "docker has no digest of r/taser:1" in completed.stderr
    assert len(stubs.calls) == 3


def test_a_workload_has_variables_and_an_end(stubs):
    options = ("--skip_build", "--max_hours=3", "--env=A=b c", "--price_per_hour=2.5")
    completed = stubs.run("gke_xpk.sh", *XPK, *options, *TRAIN)
    assert "$2.50 an hour, as you say" in completed.stdout
    run = shlex.split(stubs.calls[0][-1].partition("; ")[2])
    assert run[:6] == [*("exec", "env", "A=b c"), *("timeout", "--kill-after=300", "3h")]
    dry = stubs.run("gke_xpk.sh", *XPK, *options, "--dry_run", *TRAIN)
    assert "A=..." in dry.stdout
    assert "b c" not in dry.stdout


def pod(tmp_path, *words: str, taser: str | None, fetch: int = 0) -> subprocess.Popen[str]:
    """Starts, as xpk does, what runs in a pod, with a small program for taser."""
    root = tmp_path / "taser_jax"
    (root / "launch").mkdir(parents=True)
    shutil.copy(LAUNCH / "_container.sh", root / "launch")
    program(tmp_path / "bin" / "python", f'echo "$@"; exit {fetch}')
    if taser is not None:
        program(tmp_path / "bin" / "taser", taser)
    script = shlex.quote(str(root / "launch" / "_container.sh"))
    command = f"test -e {script} || exit 2; exec env A=1 bash {script} {shlex.join(words)}"
    return subprocess.Popen(
        ["bash", "-c", f"({command}) & echo $!; wait $!"],
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_reaches_taser(tmp_path):
    process = pod(tmp_path, "", "train", taser=STAYS)
    subshell = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    # What xpk sends to its subshell.
    os.kill(subshell, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("saved\n", 75)


@pytest.mark.parametrize(
    ("data", "taser", "fetch", "status", "printed"),
    [
        ("", 'echo "run $*"', 0, 0, "run train a\n"),
        ("gs://b/t", 'echo "run $*"', 0, 0, "launch/_fetch.py gs://b/t data\nrun train a\n"),
        ("gs://b/t", "echo run", 2, 2, "launch/_fetch.py gs://b/t data\n"),
        ("", "exit 75", 0, 75, ""),
        # 127 would be restarted for ever.
        ("", None, 0, 2, ""),
    ],
)
def test_the_status_of_a_pod_is_what_xpk_is_to_act_on(
    tmp_path, data, taser, fetch, status, printed
):
    process = pod(tmp_path, data, "train", "a", taser=taser, fetch=fetch)
    process.stdout.readline()
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (status, printed), errors
    if taser is None:
        assert "the image has no taser; build it with launch/Dockerfile" in errors


def test_an_image_built_by_hand_gets_folders_of_git_alone():
    text = (LAUNCH.parent / ".dockerignore").read_text()
    first, *lines = [line for line in text.splitlines() if not line.startswith("#")]
    # Everything is left out that is not named.
    assert first == "*"
    named = {line[1:] for line in lines if line.startswith("!")}
    assert {"setup.py", "pyproject.toml", "taser_jax", "tasks", "gin_configs", "launch"} <= named
    listing = subprocess.run(
        ["git", "ls-files"], cwd=LAUNCH.parent, capture_output=True, text=True, check=True
    )
    assert named <= {line.split("/")[0] for line in listing.stdout.splitlines()}
    # Within them too, what git ignores or must not have.
    assert {"**/__pycache__", "**/.env", "**/*.egg-info"} <= set(lines)


def test_locked_versions_have_hashes_and_are_those_that_setup_asks_for():
    from packaging.requirements import Requirement

    locked = {}
    text = (LAUNCH / "requirements-tpu.txt").read_text()
    for entry in re.split(r"\n(?=\S)", text.replace(" \\\n", "")):
        if not entry.startswith("#"):
            name, _, rest = entry.partition("==")
            locked[name] = rest.split()[0]
            assert "--hash=sha256:" in rest
    assert "://" not in text
    setup = (LAUNCH.parent / "setup.py").read_text()
    requirements = re.findall(r'"([A-Za-z][\w.-]*(?:\[\w+\])?[<>=][^"]*)"', setup.split("TORCH")[0])
    assert len(requirements) > 20
    for requirement in map(Requirement, requirements):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(locked[name]), requirement
    assert "libtpu" in locked
