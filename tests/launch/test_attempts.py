"""What the TPU launchers make of gcloud's answers: done, worth another attempt, or to be mended."""

import pathlib
import shlex
import signal
import subprocess

import pytest
from launch_stubs import DENIED, SLICES, TPU, TRAIN, finished, node, queued

pytestmark = pytest.mark.slow

SKIP = ("--skip_install", "--retries=2")
MADE = (*TPU, "--type=v4-32", *SKIP)
CREATE = "ERROR: (gcloud.compute.tpus.tpu-vm.create) "


def test_after_a_preemption_the_tpu_is_made_again_and_the_same_command_run(stubs):
    preempted = "taser-status 75 on host-0\ntaser-status 134 on host-1"
    runs = (("_host.sh", preempted, 1), ("_host.sh", finished(), 0))
    stubs.answer(*runs, states=["READY", "PREEMPTED", "READY"])
    options = (*TPU, "--type=v4-32", "--spot", "--skip_install")
    completed = stubs.run("tpu_vm.sh", *options, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert "preempted, or a host was lost (attempt 1 of 101)" in completed.stderr
    assert len(stubs.asked("tpu-vm", "delete")) == 1
    (create,) = stubs.asked("tpu-vm", "create")
    assert create[4:8] == [
        *("pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot")
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
        # The same within a line.
        ("loss 1...", 255, ["READY"], 75, 2),
        # The job never started: no checkout on the host.
        ("bash: taser_jax/launch/_host.sh: No such file or directory", 127, ["READY"], 127, 1),
        # It never started, as the TPU is gone.
        ("", 1, ["READY", "PREEMPTED"], 2, 1),
        # One host was lost, another was told of it by its runtime.
        (finished(1, status=134), 255, ["READY"], 75, 2),
        # One host finished, and ssh to the other failed.
        (finished(1), 1, ["READY"], 75, 2),
    ],
)
def test_preemption_is_distinguished_from_failure(stubs, output, gcloud, states, status, attempts):
    stubs.answer(("_host.sh", output, gcloud), states=states)
    options = ("--retries=1", "--skip_install")
    completed = stubs.run("tpu_vm.sh", *TPU, *options, *TRAIN)
    assert completed.returncode == status, completed.stderr
    assert len(stubs.runs) == attempts
    if status == 75:
        assert "rerun the command to resume" in completed.stderr


def test_a_tpu_that_is_not_there(stubs):
    stubs.answer(states=["ABSENT"])
    completed = stubs.run("tpu_vm.sh", *TPU, *TRAIN)
    assert completed.returncode == 2
    assert "TPU pod in us-central2-b is ABSENT, expected READY" in completed.stderr
    assert "or a --type" in completed.stderr


def test_slices_are_asked_for_waited_for_and_run_together(stubs, checkout):
    stubs.answer(states=["ABSENT", "PROVISIONING", "ACTIVE"])
    completed = stubs.run("tpu_multislice.sh", *SLICES, *TRAIN, checkout=checkout)
    assert completed.returncode == 0, completed.stderr
    (create,) = stubs.asked("queued-resources", "create")
    assert create[4:9] == [
        *("pod", "--node-count=2", "--node-prefix=pod", "--accelerator-type=v4-32"),
        "--runtime-version=tpu-ubuntu2204-base",
    ]
    assert sorted(call[5] for call in stubs.asked("tpu-vm", "scp")) == [
        f"pod-{number}:taser_jax.tgz" for number in range(2)
    ]
    runs = [call for call in stubs.asked("tpu-vm", "ssh") if "_host.sh" in call[6]]
    assert sorted(call[4] for call in runs) == ["pod-0", "pod-1"]
    for call in runs:
        assert shlex.split(call[6])[-1] == "--gin.MESH_REPLICA=2"


def test_one_slice_that_is_lost_stops_the_attempt(stubs):
    stubs.answer(("ssh pod-0", finished(status=134), 1), ("ssh pod-1", "", 255))
    options = ("--skip_install", "--retries=1")
    completed = stubs.run("tpu_multislice.sh", *SLICES, *options, *TRAIN)
    assert completed.returncode == 75
    assert len(stubs.runs) == 4


@pytest.mark.parametrize(
    "error",
    [
        f'{CREATE}{{\n  "code": 8,\n  "message": "There is no more capacity in the zone"\n}}',
        f"{CREATE}RESOURCE_EXHAUSTED: Insufficient capacity",
        f"{CREATE}UNAVAILABLE: The service is currently unavailable.",
        f"{CREATE}INTERNAL: an internal error has occurred",
        f"{CREATE}HttpError 503: backend error",
        f"{CREATE}HTTPError 429: too many requests",
        f"{CREATE}RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'CreateNode' per minute",
    ],
)
def test_capacity_is_waited_for(stubs, error):
    create = "tpu-vm create"
    stubs.answer((create, error, 1), (create, error, 1), (create, "", 0), states=["ABSENT"])
    completed = stubs.run("tpu_vm.sh", *MADE, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert error in completed.stderr
    assert "(attempt 2 of 3)" in completed.stderr
    assert "preempted" not in completed.stderr
    assert stubs.sleeps == 2


@pytest.mark.parametrize(
    "error",
    [
        DENIED,
        f'{CREATE}INVALID_ARGUMENT: Accelerator type "v4-33" was not found [EID: 0x503]',
        f"{CREATE}Invalid choice: 'v4-429'",
    ],
)
@pytest.mark.parametrize("script", ["tpu_vm.sh", "tpu_multislice.sh"])
def test_what_gcloud_refuses_is_not_asked_again(stubs, script, error):
    stubs.answer((" create", error, 1), states=["ABSENT"])
    slices = ("--slices=2",) if script == "tpu_multislice.sh" else ()
    completed = stubs.run(script, *MADE, *slices, *TRAIN)
    assert completed.returncode == 2
    assert error in completed.stderr
    assert "fix it and start again" in completed.stderr
    assert len([call for call in stubs.calls if "create" in call]) == 1
    assert stubs.sleeps == 0


@pytest.mark.parametrize("script", ["tpu_vm.sh", "tpu_multislice.sh"])
def test_what_gcloud_says_in_place_of_a_state_is_shown(stubs, script):
    stubs.answer(states=[DENIED])
    slices = ("--slices=2",) if script == "tpu_multislice.sh" else ()
    completed = stubs.run(script, *MADE, *slices, *TRAIN)
    assert completed.returncode == 2
    assert DENIED in completed.stderr
    assert "ABSENT" not in completed.stderr
    assert all("describe" in call for call in stubs.calls)


def test_a_state_that_is_not_to_be_had_for_now(stubs):
    stubs.answer(states=["ERROR: (gcloud) UNAVAILABLE: try again", "READY"])
    completed = stubs.run("tpu_vm.sh", *MADE, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert "(attempt 1 of 3)" in completed.stderr
    assert stubs.asked("tpu-vm", "create") == []


@pytest.mark.parametrize(
    ("script", "failing", "code"),
    [
        *(("tpu_vm.sh", "scp", 1), ("tpu_vm.sh", "_install.sh", 1), ("tpu_vm.sh", "_fetch.py", 2)),
        # Hosts that ssh has never reached.
        ("tpu_vm.sh", "scp", 255),
        ("tpu_multislice.sh", "_fetch.py", 1),
    ],
)
def test_hosts_that_cannot_be_prepared_stop_the_launcher(stubs, checkout, script, failing, code):
    stubs.answer((failing, "told why", code))
    slices = ("--slices=2",) if script == "tpu_multislice.sh" else ()
    options = ("--type=v4-32", *slices, "--data=gs://bucket/tokens")
    completed = stubs.run(script, *TPU, *options, *TRAIN, checkout=checkout)
    assert completed.returncode == code
    assert "told why" in completed.stdout
    # Nothing follows, neither on this host nor on the next.
    assert failing in " ".join([c for c in stubs.calls if "describe" not in c][-1])
    assert stubs.sleeps == 0


def test_a_tpu_that_is_lost_while_it_is_prepared(stubs):
    fetches = (("_fetch.py", "", 1), ("_fetch.py", "", 0))
    stubs.answer(*fetches, states=["READY", "PREEMPTED", "READY"])
    completed = stubs.run("tpu_vm.sh", *MADE, "--data=gs://bucket/tokens", *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert "preempted, or a host was lost (attempt 1 of 3)" in completed.stderr


def test_hosts_that_were_reached_before_are_tried_again(stubs):
    fetches = (("_fetch.py", "", status) for status in (0, 255, 0))
    runs = (("_host.sh", "taser-status 75 on a", 1), ("_host.sh", finished(), 0))
    stubs.answer(*fetches, *runs)
    completed = stubs.run("tpu_vm.sh", *MADE, "--data=gs://bucket/tokens", *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert "(attempt 2 of 3)" in completed.stderr


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_a_tpu_that_was_taken_away_is_made_anew(stubs, state):
    stubs.answer(states=[state])
    assert stubs.run("tpu_vm.sh", *MADE, *TRAIN).returncode == 0
    assert len(stubs.asked("tpu-vm", "delete")) == len(stubs.asked("tpu-vm", "create")) == 1


@pytest.mark.parametrize("state", ["CREATING", "STARTING", "REPAIRING", "MAINTENANCE"])
def test_a_tpu_that_is_being_made_ready_is_waited_for(stubs, state):
    stubs.answer(states=[state, state, "READY"])
    completed = stubs.run("tpu_vm.sh", *MADE, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count(f"TPU pod: {state}\n") == 1
    assert stubs.sleeps == 2
    assert stubs.asked("tpu-vm", "delete") == []


@pytest.mark.parametrize("state", ["STOPPED", "HIDDEN", "UNKNOWN"])
def test_a_tpu_with_a_disk_to_keep_is_left_alone(stubs, state):
    stubs.answer(states=[state])
    completed = stubs.run("tpu_vm.sh", *MADE, *TRAIN)
    assert completed.returncode == 2
    assert f"TPU pod in us-central2-b is {state}, expected READY" in completed.stderr
    assert "fix: start it, " in completed.stderr
    assert all("describe" in call for call in stubs.calls)


def test_a_queued_resource_that_fails_counts_as_an_attempt(stubs):
    """It is looked at, deleted, and asked for anew after a pause if capacity was lacking."""
    failed = queued("FAILED", code=8, message="no more capacity in the zone")
    stubs.answer(states=[failed, "ABSENT", failed, "ABSENT", failed])
    completed = stubs.run("tpu_multislice.sh", *SLICES, *SKIP, *TRAIN)
    assert completed.returncode == 75
    assert "no more capacity in the zone" in completed.stderr
    assert "queued resource pod: FAILED, no capacity (attempt 3 of 3)" in completed.stderr
    assert len(stubs.asked("queued-resources", "delete")) == 3
    # After each creation, and before each further attempt.
    assert stubs.sleeps == 2 + 2


@pytest.mark.parametrize(
    ("states", "status", "deleted"), [(["SUSPENDED", "ACTIVE"], 0, 1), (["SUSPENDED"], 75, 2)]
)
def test_slices_that_were_taken_away_are_asked_for_at_once_and_once(stubs, states, status, deleted):
    stubs.answer(states=states)
    options = ("--skip_install", "--retries=0")
    completed = stubs.run("tpu_multislice.sh", *SLICES, *options, *TRAIN)
    assert completed.returncode == status, completed.stderr
    assert len(stubs.asked("queued-resources", "delete")) == deleted
    assert stubs.sleeps == 1


@pytest.mark.parametrize(
    ("script", "options", "description"),
    [
        ("tpu_vm.sh", MADE, node("PREEMPTED", "taser_jax-somebody")),
        ("tpu_multislice.sh", SLICES, queued("FAILED", "")),
        ("tpu_multislice.sh", SLICES, queued("SUSPENDED", "")),
    ],
)
def test_what_others_made_is_not_made_anew(stubs, script, options, description):
    stubs.answer(states=[description])
    completed = stubs.run(script, *options, *TRAIN)
    assert completed.returncode == 2
    assert "none that others made\n  fix: start it, give another --name" in completed.stderr
    assert all("describe" in call for call in stubs.calls)


def test_an_interrupted_launcher_ends_its_connections(stubs):
    connection = f"echo $$ >>{stubs.folder}/pids; echo connected; exec tail -f /dev/null"
    stubs.gcloud(queued("ACTIVE"), f"*) {connection};;")
    launcher = stubs.start("tpu_multislice.sh", *SLICES, "--skip_install", *TRAIN)
    with launcher:
        # Both slices are connected, after the plan and the state.
        told = iter(launcher.stdout.readline, "connected\n")
        assert list(told)[-1] == "queued resource pod: ACTIVE\n"
        assert launcher.stdout.readline() == "connected\n"
        launcher.send_signal(signal.SIGINT)
        try:
            # Returns when nobody writes to the pipe any more.
            launcher.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            raise
    assert launcher.returncode == 130
    for pid in (stubs.folder / "pids").read_text().split():
        # Empty for a process that has ended and that nobody has asked for.
        program = pathlib.Path("/proc", pid, "cmdline")
        assert not program.exists() or not program.read_bytes()
