"""Machines that ssh reaches, and Slurm clusters: what is run there, and what is repeated."""

import contextlib
import os
import shlex
import signal
import subprocess

import pytest
from launch_stubs import STAYS, finished

pytestmark = pytest.mark.slow

COMMAND = ("--", "train", "--gin.MODEL_DIR=/shared/my model")
HOSTS = ("--hosts=me@a,b", "--retries=1")
SLURM = ("--nodes=2", "--retries=1")
CANCELLED = "\nslurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-27T04:00:00{} ***\n"


def test_hosts_are_installed_then_run_with_the_coordinator_and_their_number(stubs, checkout):
    stubs.answer(("_host.sh", finished(1), 0))
    options = (*HOSTS, "--extra=cuda", "--data=/shared/tokens", "--port=9")
    completed = stubs.run("hosts.sh", *options, *COMMAND, checkout=checkout)
    assert completed.stdout.startswith("# 2 hosts, me@a first; nothing is created")
    assert "own disk" not in completed.stderr
    # Both are prepared at the same time.
    prepared, runs = stubs.calls[:6], stubs.calls[6:]
    prepared.sort(key=lambda call: "me@a" not in " ".join(call))
    assert [call[-1].split(":")[0] for call in prepared[::3]] == ["me@a", "b"]
    for install in prepared[1::3]:
        assert install[-1].endswith("use_environment '[cuda]'")
    for fetch in prepared[2::3]:
        assert "_fetch.py /shared/tokens data" in fetch[-1]
    runs.sort(reverse=True)
    assert [call[-2] for call in runs] == ["me@a", "b"]
    for number, call in enumerate(runs):
        assert shlex.split(call[-1]) == [
            *("env", "JAX_COORDINATOR_ADDRESS=a:9", "JAX_NUM_PROCESSES=2"),
            *(f"JAX_PROCESS_ID={number}", "bash", "taser_jax/launch/_host.sh", *COMMAND[1:]),
        ]


@pytest.mark.parametrize(
    ("answers", "status", "runs"),
    [
        # Both were told to stop.
        ([("_host.sh", finished(1, status=75), 1)], 75, 4),
        # A defect, and all hosts are there.
        ([("_host.sh", finished(1, status=1), 1)], 1, 2),
        # The same status, but a host is not there any more.
        ([("b true", "", 255), ("_host.sh", finished(1, status=1), 1)], 75, 4),
    ],
)
def test_hosts_are_tried_again_as_a_tpu_is(stubs, answers, status, runs):
    stubs.answer(*answers)
    stubs.run("hosts.sh", *HOSTS, "--skip_install", *COMMAND, status=status)
    assert len([call for call in stubs.calls if "_host.sh" in call[-1]]) == runs


def test_slurm_runs_one_process_for_each_node(stubs):
    stubs.answer(("--multihost", finished(2), 0))
    stubs.run("slurm.sh", *SLURM, "--slurm", "--gpus-per-node=8", "--time=1:00", *COMMAND)
    (call,) = stubs.calls
    assert call[:6] == ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
                        "--gpus-per-node=8", "--time=1:00", "bash"]  # fmt: skip
    assert call[-3:] == [*COMMAND[1:], "--multihost"]


@pytest.fixture
def on_a_node(stubs) -> list[str]:
    """What Slurm runs on a node."""
    stubs.answer(("--multihost", finished(2), 0))
    stubs.run("slurm.sh", *SLURM, *COMMAND)
    return stubs.calls[0][3:]


def test_what_slurm_runs_on_a_node_prints_its_status(on_a_node):
    script, words = on_a_node[:2], on_a_node[3:]
    program = [*script, "bash", "-c", 'printf "%s|" "$@"; exit 75', "x", *words]
    completed = subprocess.run(program, capture_output=True, text=True)
    assert completed.returncode == 75
    assert completed.stdout.startswith(f"{COMMAND[1]}|{COMMAND[2]}|--multihost|taser-status 75 on ")


def test_what_slurm_preempts_on_a_node_can_save(on_a_node):
    program = [*on_a_node[:2], "bash", "-c", STAYS]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    # The shell alone, as Slurm's cgroups do it.
    process.terminate()
    try:
        printed, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75
    assert printed.startswith("saved\ntaser-status 75 on ")


@pytest.mark.parametrize(
    ("said", "code", "status", "runs"),
    [
        (finished(2, status=75), 75, 75, 2),
        (finished(2, status=2), 2, 2, 1),
        (finished(1, status=1), 1, 1, 1),
        # The other node is lost.
        ("srun: error: Node failure on n2\n" + finished(1, status=134), 134, 75, 2),
        # Nobody began: a partition that does not exist.
        ("srun: error: invalid partition specified: gpus", 1, 1, 1),
        ("slurmstepd: error: *** STEP 1.0 CANCELLED DUE TO PREEMPTION ***", 1, 75, 2),
        # What Slurm says when it ends the other processes of a step after a defect in one.
        (finished(1, status=1) + CANCELLED.format(""), 1, 1, 1),
        (finished(1, status=1) + CANCELLED.format(" DUE TO TASK FAILURE"), 1, 1, 1),
        # The end of --time, whether or not the processes had the time to save.
        (CANCELLED.format(" DUE TO TIME LIMIT"), 1, 124, 1),
        (CANCELLED.format(" DUE TO TIME LIMIT") + finished(2, status=75), 75, 124, 1),
    ],
)
def test_slurm_is_asked_again_after_a_preemption_only(stubs, said, code, status, runs):
    stubs.answer(("--multihost", said, code))
    stubs.run("slurm.sh", *SLURM, *COMMAND, status=status)
    assert len(stubs.calls) == runs
    assert stubs.sleeps == runs - 1
