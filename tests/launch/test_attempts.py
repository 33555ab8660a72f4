"""What the TPU launchers make of gcloud's answers: done, worth another attempt, or to be mended."""

import shlex

import pytest
from launch_stubs import EITHER, ONE, SEVERAL, TPU, TRAIN, attaches, finished, node, queued

pytestmark = pytest.mark.slow

SKIP = ("--skip_install", "--retries=2")
MADE = (*ONE, *SKIP)
CREATE = "ERROR: (gcloud.compute.tpus.tpu-vm.create) "
DENIED = "ERROR: (gcloud.compute.tpus) PERMISSION_DENIED: The caller does not have permission."
ONCE = ("--skip_install", "--retries=1")


def test_after_a_preemption_the_tpu_is_made_again_and_the_same_command_run(stubs):
    preempted = "taser-status 75 on host-0\ntaser-status 134 on host-1"
    runs = (("_host.sh", preempted, 1), ("_host.sh", finished(), 0))
    stubs.answer(*runs, states=["READY", "PREEMPTED", "READY"])
    completed = stubs.run(*ONE, "--spot", "--skip_install", *TRAIN)
    assert "preempted, or a host was lost (attempt 1 of 101)" in completed.stderr
    assert len(stubs.asked("tpu-vm", "delete")) == 1
    (create,) = stubs.asked("tpu-vm", "create")
    assert create[4:8] == [
        *("pod", "--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--spot")
    ]
    first, second = stubs.asked("tpu-vm", "ssh")
    assert first == second


@pytest.mark.parametrize(
    ("output", "gcloud", "states", "status", "attempts", "reconnections"),
    [
        # A message to act on: no other attempt changes it.
        (finished(status=2), 2, ["READY"], 2, 1, 0),
        # Host 1 says 2, and takes host 0 down.
        ("taser-status 134 on a\ntaser-status 2 on b", 1, ["READY"], 2, 1, 0),
        # A defect.
        (finished(status=1), 1, ["READY"], 1, 1, 0),
        # The same statuses, but the TPU is gone: a host was lost.
        (finished(1, status=134), 1, ["READY", "PREEMPTED"], 2, 1, 0),
        # ssh lost its connection; nothing was said. Connections are not made anew for ever.
        ("", 255, ["READY"], 75, 2, 10),
        # The same within a line.
        ("loss 1...", 255, ["READY"], 75, 2, 10),
        # The connection was lost with the TPU.
        ("loss 1.0", 255, ["READY", "PREEMPTED"], 2, 1, 0),
        # The job never started: no checkout on the host.
        ("bash: taser_jax/launch/_host.sh: No such file or directory", 127, ["READY"], 127, 1, 0),
        # It never started, as the TPU is gone.
        ("", 1, ["READY", "PREEMPTED"], 2, 1, 0),
        # One host was lost, another was told of it by its runtime: the command is over on all.
        (finished(1, status=134), 255, ["READY"], 75, 2, 0),
        # One host finished, and ssh to the other failed.
        (finished(1), 1, ["READY"], 75, 2, 10),
    ],
)
def test_preemption_is_distinguished_from_failure(
    stubs, output, gcloud, states, status, attempts, reconnections
):
    stubs.answer(("_host.sh", output, gcloud), states=states)
    completed = stubs.run("tpu_vm.sh", *TPU, *ONCE, *TRAIN, status=status)
    assert len(stubs.runs) == attempts
    assert sum(map(attaches, stubs.calls)) == reconnections
    if status == 75:
        assert "rerun the command to resume" in completed.stderr


def test_slices_are_asked_for_waited_for_and_run_together(stubs, checkout):
    stubs.answer(states=["ABSENT", "PROVISIONING", "ACTIVE"])
    stubs.run(*SEVERAL, *TRAIN, checkout=checkout)
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
    stubs.run(*SEVERAL, *ONCE, *TRAIN, status=75)
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
    completed = stubs.run(*MADE, *TRAIN)
    assert error in completed.stderr
    assert "(attempt 2 of 3)" in completed.stderr
    assert "preempted" not in completed.stderr
    assert stubs.sleeps == 2


@pytest.mark.parametrize(
    ("launcher", "failing", "code"),
    [
        *((ONE, "scp", 1), (ONE, "_install.sh", 1), (ONE, "_fetch.py", 2)),
        # Hosts that ssh has never reached.
        (ONE, "scp", 255),
        (SEVERAL, "_fetch.py", 1),
    ],
)
def test_hosts_that_cannot_be_prepared_stop_the_launcher(stubs, checkout, launcher, failing, code):
    stubs.answer((failing, "told why", code))
    data = "--data=gs://bucket/tokens"
    completed = stubs.run(*launcher, data, *TRAIN, checkout=checkout, status=code)
    assert "told why" in completed.stdout
    # Nothing follows, neither on this host nor on the next.
    assert failing in " ".join([c for c in stubs.calls if "describe" not in c][-1])
    assert stubs.sleeps == 0


def test_a_tpu_that_is_lost_while_it_is_prepared(stubs):
    fetches = (("_fetch.py", "", 1), ("_fetch.py", "", 0))
    stubs.answer(*fetches, states=["READY", "PREEMPTED", "READY"])
    completed = stubs.run(*MADE, "--data=gs://bucket/tokens", *TRAIN)
    assert "preempted, or a host was lost (attempt 1 of 3)" in completed.stderr


def test_hosts_that_were_reached_before_are_tried_again(stubs):
    fetches = (("_fetch.py", "", status) for status in (0, 255, 0))
    runs = (("_host.sh", "taser-status 75 on a", 1), ("_host.sh", finished(), 0))
    stubs.answer(*fetches, *runs)
    completed = stubs.run(*MADE, "--data=gs://bucket/tokens", *TRAIN)
    assert "(attempt 2 of 3)" in completed.stderr


def test_a_state_that_is_not_to_be_had_for_now(stubs):
    stubs.answer(states=["ERROR: (gcloud) UNAVAILABLE: try again", "READY"])
    assert "(attempt 1 of 3)" in stubs.run(*MADE, *TRAIN).stderr
    assert stubs.asked("tpu-vm", "create") == []


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_a_tpu_that_was_taken_away_is_made_anew(stubs, state):
    stubs.answer(states=[state])
    stubs.run(*MADE, *TRAIN)
    assert len(stubs.asked("tpu-vm", "delete")) == len(stubs.asked("tpu-vm", "create")) == 1


@pytest.mark.parametrize("state", ["CREATING", "STARTING", "REPAIRING", "MAINTENANCE"])
def test_a_tpu_that_is_being_made_ready_is_waited_for(stubs, state):
    stubs.answer(states=[state, state, "READY"])
    assert stubs.run(*MADE, *TRAIN).stdout.count(f"TPU pod: {state}\n") == 1
    assert stubs.sleeps == 2
    assert stubs.asked("tpu-vm", "delete") == []


LEFT = "none that others made\n  fix: start it, give another --name or a --type, or delete it: "


@pytest.mark.parametrize(
    ("launcher", "said", "words"),
    [
        (("tpu_vm.sh", *TPU), "ABSENT", "TPU pod in us-central2-b is ABSENT, expected READY, or a"),
        # A disk to keep.
        (ONE, "STOPPED", "TPU pod in us-central2-b is STOPPED, expected READY"),
        (ONE, "HIDDEN", "is HIDDEN"),
        (ONE, "UNKNOWN", "is UNKNOWN"),
        # Others made it.
        (ONE, node("PREEMPTED", "taser_jax-somebody"), "is PREEMPTED"),
        (SEVERAL, queued("FAILED", ""), "is FAILED"),
        (SEVERAL, queued("SUSPENDED", ""), "is SUSPENDED"),
    ],
)
def test_a_tpu_that_is_not_to_be_made_anew_is_left_alone(stubs, launcher, said, words):
    stubs.answer(states=[said])
    completed = stubs.run(*launcher, *TRAIN, status=2)
    assert words in completed.stderr
    assert LEFT in completed.stderr
    assert all("describe" in call for call in stubs.calls)


@EITHER
def test_what_gcloud_says_in_place_of_a_state_is_shown(stubs, launcher):
    stubs.answer(states=[DENIED])
    completed = stubs.run(*launcher, *TRAIN, status=2)
    assert DENIED in completed.stderr
    assert "ABSENT" not in completed.stderr
    assert all("describe" in call for call in stubs.calls)


def test_a_queued_resource_that_fails_counts_as_an_attempt(stubs):
    """It is looked at, deleted, and asked for anew after a pause if capacity was lacking."""
    failed = queued("FAILED", code=8, message="no more capacity in the zone")
    stubs.answer(states=[failed, "ABSENT", failed, "ABSENT", failed])
    completed = stubs.run(*SEVERAL, *SKIP, *TRAIN, status=75)
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
    stubs.run(*SEVERAL, "--skip_install", "--retries=0", *TRAIN, status=status)
    assert len(stubs.asked("queued-resources", "delete")) == deleted
    assert stubs.sleeps == 1
