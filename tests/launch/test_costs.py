"""What a launch costs: the plan that is printed first, quotas, deletion, and the last line."""

import signal

import pytest
from launch_stubs import MINE, SLICES, TPU, TRAIN, Stubs, finished, node, queued

pytestmark = pytest.mark.slow

MADE = (*TPU, "--type=v4-32", "--skip_install", "--retries=1")
DELETE = "gcloud compute tpus tpu-vm delete pod --zone=us-central2-b --quiet"
CHECKPOINT = "gs://bucket/my model/checkpoint_1/"
CREATE = "ERROR: (gcloud.compute.tpus.tpu-vm.create) "


def last_line(completed) -> str:
    return completed.stderr.splitlines()[-1]


def plan(completed) -> str:
    return "\n".join(line for line in completed.stdout.splitlines() if line.startswith("# "))


@pytest.mark.parametrize(
    ("kind", "chips", "runtime"),
    [
        ("v3-8", 4, "tpu-ubuntu2204-base"),
        ("v4-32", 16, "tpu-ubuntu2204-base"),
        ("v5p-8", 4, "v2-alpha-tpuv5"),
        ("v5litepod-16", 16, "v2-alpha-tpuv5-lite"),
        ("v6e-8", 8, "v2-alpha-tpuv6e"),
    ],
)
def test_the_plan_names_chips_runtime_price_retries_and_deletion(stubs, kind, chips, runtime):
    options = (f"--type={kind}", "--spot", "--retries=7")
    completed = stubs.run("tpu_vm.sh", "--dry_run", *TPU, *options, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    told = plan(completed)
    assert f"us-central2-b: 1 TPU slice of {kind}, {chips} chips, runtime {runtime}" in told
    assert "price: --spot; " in told
    assert "retries: 7" in told
    assert "deletion (--delete=success): after the command has finished, if gs://" in told
    assert DELETE in told
    assert f"--version={runtime} " in completed.stdout


def test_the_plan_of_several_slices_and_of_a_runtime_that_is_given(stubs):
    options = ("--version=mine", "--max_run_duration=10h")
    completed = stubs.run("tpu_multislice.sh", "--dry_run", *SLICES, *options, *TRAIN)
    assert "2 TPU slices of v4-32, 32 chips, runtime mine" in plan(completed)
    assert "price: --max-run-duration=10h; " in plan(completed)
    request = next(
        line for line in completed.stdout.splitlines() if "queued-resources create" in line
    )
    words = request.split()
    assert words[:2] == ["gcloud", "alpha"]
    assert {"--provisioning-model=flex-start", "--max-run-duration=10h"} <= set(words)


def test_one_slice_of_flex_start_has_a_name_of_its_own(stubs):
    options = (*TPU, "--type=v6e-8", "--slices=1", "--max_run_duration=4h")
    completed = stubs.run("tpu_multislice.sh", "--dry_run", *options, *TRAIN)
    assert "--node-id=pod-0" in completed.stdout
    assert "--node-count" not in completed.stdout
    assert "MESH_REPLICA" not in completed.stdout


def test_flags_of_real_projects_reach_gcloud(stubs):
    options = (
        *("--reserved", "--internal_ip"),
        *("--labels=team=search,stage=", "--gcloud", "--network=n", "--metadata=a=b c"),
    )
    stubs.answer(states=["ABSENT"])
    completed = stubs.run("tpu_vm.sh", *MADE, *options, *TRAIN)
    assert completed.returncode == 0, completed.stderr
    (create,) = stubs.asked("tpu-vm", "create")
    assert create[7:-2] == [
        *("--reserved", "--internal-ips"),
        *(f"--labels=launcher={MINE},team=search,stage=", "--network=n", "--metadata=a=b c"),
    ]
    (run,) = stubs.asked("tpu-vm", "ssh")
    assert "--internal-ip" in run


def test_a_reservation_and_iap_are_of_the_alpha_commands(stubs):
    options = ("--reservation=mine", "--internal_ip", "--iap", "--setup=sudo mount /dev/sdb /mnt")
    completed = stubs.run("tpu_vm.sh", "--dry_run", *MADE, *options, *TRAIN)
    lines = [line for line in completed.stdout.splitlines() if line.startswith("gcloud ")]
    assert all(line.startswith("gcloud alpha compute tpus tpu-vm ") for line in lines)
    create, setup, run = lines
    assert "--reservation=mine --internal-ips" in create
    assert "--tunnel-through-iap" not in create
    assert "'--command=sudo mount /dev/sdb /mnt' --tunnel-through-iap" in setup
    assert "--tunnel-through-iap" in run


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Quota limit 'TPUV4PerProjectPerZoneForTPUAPI' has been exceeded. "
        "Limit: 0 in zone us-central2-b.",
        '{\n  "code": 8,\n  "message": "Quota \'TPUV4PerProjectPerZoneForTPUAPI\' exhausted. '
        'Limit 4 in zone z"\n}',
        "HTTPError 429: Quota limit 'TPUV4PerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0",
        "Quota 'IN_USE_ADDRESSES' exceeded.  Limit: 8.0 in region us-central2.",
        'Insufficient regional quota to satisfy request: resource "IN_USE_ADDRESSES"',
        "RESOURCE_EXHAUSTED: Insufficient quota to satisfy the request",
        "code: QUOTA_EXCEEDED",
        "HTTPError 403: Quota exceeded for resource 'TPUS'",
    ],
)
@pytest.mark.parametrize("script", ["tpu_vm.sh", "tpu_multislice.sh"])
def test_a_quota_of_any_kind_is_named_and_not_asked_for_again(stubs, script, said):
    slices = ("--slices=2",) if script == "tpu_multislice.sh" else ()
    stubs.answer((" create", CREATE + said, 1), states=["ABSENT"])
    completed = stubs.run(script, *MADE, *slices, *TRAIN)
    assert completed.returncode == 2
    assert "the project's quota is too small: " in completed.stderr
    assert said in completed.stderr
    assert "--internal_ip needs no address" in completed.stderr
    assert len([call for call in stubs.calls if "create" in call]) == 1
    assert stubs.sleeps == 0
    assert last_line(completed) == "TPU pod does not exist; nothing is billed"


@pytest.mark.parametrize(
    "error",
    [
        {"code": 8, "message": "Insufficient quota to satisfy the request"},
        {"code": 8, "message": "Quota 'IN_USE_ADDRESSES' exceeded. Limit: 8.0"},
        {"code": 7, "message": "no permission"},
        {"code": 9, "message": "the reservation does not exist"},
        {},
    ],
)
def test_a_queued_resource_that_failed_is_an_error_unless_capacity_lacked(stubs, error):
    stubs.answer(states=[queued("FAILED", **error), "ABSENT"])
    completed = stubs.run("tpu_multislice.sh", *SLICES, "--skip_install", *TRAIN)
    assert completed.returncode == 2
    assert "queued resource pod FAILED: {" in completed.stderr
    assert error.get("message", "") in completed.stderr
    # Its name is free for the next request.
    assert len(stubs.asked("queued-resources", "delete")) == 1
    assert stubs.asked("queued-resources", "create") == []
    assert stubs.sleeps == 0


def ending(stubs: Stubs, *options: str, status: int = 0, label: str = MINE):
    run = ("_host.sh", finished(status=status), int(status != 0))
    stubs.answer(run, ("storage ls", CHECKPOINT, 0), states=[node("READY", label)])
    return stubs.run("tpu_vm.sh", *MADE, *options, *TRAIN)


@pytest.mark.parametrize(
    ("options", "status", "deleted"),
    [
        ((), 0, True),
        ((), 1, False),
        (("--delete=success",), 2, False),
        (("--delete=always",), 0, True),
        (("--delete=always",), 1, True),
        (("--delete=never",), 0, False),
    ],
)
def test_what_is_deleted_and_what_is_still_billed(stubs, options, status, deleted):
    completed = ending(stubs, *options, status=status)
    assert completed.returncode == status
    assert len(stubs.asked("tpu-vm", "delete")) == deleted
    if deleted:
        assert last_line(completed) == "TPU pod was deleted; nothing is billed any more"
    else:
        assert last_line(completed).startswith("TPU pod is READY and billed until you delete it")
        assert last_line(completed).endswith(f": {DELETE}")


def test_a_tpu_that_others_made_is_left_alone(stubs):
    completed = ending(stubs, "--delete=always", label="taser_jax-somebody")
    assert completed.returncode == 0
    assert stubs.asked("tpu-vm", "delete") == []
    assert "billed until you delete it (others made it)" in last_line(completed)


def test_a_deletion_that_fails_is_reported(stubs):
    refused = (" delete ", "ERROR: (gcloud) PERMISSION_DENIED: no", 1)
    stubs.answer(("storage ls", CHECKPOINT, 0), refused)
    completed = stubs.run("tpu_vm.sh", *MADE, *TRAIN)
    assert completed.returncode == 0
    assert "PERMISSION_DENIED" in completed.stderr
    assert "billed until you delete it (gcloud did not delete it): gcloud" in last_line(completed)


def test_a_state_that_gcloud_does_not_tell_may_be_billed(stubs):
    stubs.answer(states=["READY", "ERROR: (gcloud) UNAVAILABLE: x"])
    completed = stubs.run("tpu_vm.sh", *MADE, "--delete=never", *TRAIN)
    assert last_line(completed) == f"TPU pod may still run and be billed; delete it: {DELETE}"


@pytest.mark.parametrize("delete", ["always", "success"])
def test_ctrl_c_asks_nothing_and_prints_the_same(stubs, delete):
    stubs.gcloud(node("READY"), "*ssh*) echo connected; exec tail -f /dev/null;;")
    with stubs.start("tpu_vm.sh", *MADE, f"--delete={delete}", *TRAIN) as launcher:
        for line in launcher.stdout:
            if line == "connected\n":
                break
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    asked = stubs.asked_of_gcloud
    if delete == "always":
        assert errors.splitlines()[-1] == "TPU pod was deleted; nothing is billed any more"
        assert "tpu-vm delete pod" in asked
    else:
        assert "the command has not finished; --delete=success" in errors.splitlines()[-1]
        assert "tpu-vm delete" not in asked
