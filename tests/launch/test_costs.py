"""What a launch costs: the plan that is printed first, quotas, deletion, and the last line.

A TPU is deleted unasked only if training says that its model is in a bucket, and it is there.
"""

import pathlib
import signal

import pytest
from launch_stubs import EITHER, MINE, ONE, SEVERAL, TPU, TRAIN, Stubs, finished, node, queued

pytestmark = pytest.mark.slow

MADE = (*ONE, "--skip_install", "--retries=1")
DELETE = "gcloud compute tpus tpu-vm delete pod --zone=us-central2-b --quiet"
CREATE = "ERROR: (gcloud.compute.tpus.tpu-vm.create) "


def last_line(completed) -> str:
    return completed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "chips", "runtime", "price"),
    [
        ("v3-8", 4, "tpu-ubuntu2204-base", "not known for v3-8"),
        ("v4-32", 16, "tpu-ubuntu2204-base", "not known for v4-32; give --price_per_hour=DOLLARS"),
        # 4 chips at 4.20 dollars.
        ("v5p-8", 4, "v2-alpha-tpuv5", "about $16.80 an hour"),
        # 16 chips at 1.20 dollars.
        ("v5litepod-16", 16, "v2-alpha-tpuv5-lite", "about $19.20 an hour on demand, by the list"),
        ("v6e-8", 8, "v2-alpha-tpuv6e", "not known for v6e-8"),
    ],
)
def test_the_plan_names_chips_runtime_price_and_retries(stubs, kind, chips, runtime, price):
    options = (f"--type={kind}", "--retries=7")
    told = stubs.run("tpu_vm.sh", "--dry_run", *TPU, *options, *TRAIN).stdout
    assert f"us-central2-b: 1 TPU slice of {kind}, {chips} chips, runtime {runtime}\n" in told
    assert f"# price: on demand; {price}" in told
    assert "# retries: 7" in told
    assert f" By hand: {DELETE}\n" in told
    assert f"--version={runtime} " in told


def test_the_plan_of_several_slices_and_of_a_runtime_that_is_given(stubs):
    options = ("--version=mine", "--max_run_duration=10h")
    told = stubs.run(*SEVERAL, "--dry_run", *options, *TRAIN).stdout
    assert "2 TPU slices of v4-32, 32 chips, runtime mine\n" in told
    assert "# price: --max-run-duration=10h; " in told
    (request,) = (line.split() for line in told.splitlines() if "queued-resources create" in line)
    assert request[:2] == ["gcloud", "alpha"]
    assert {"--provisioning-model=flex-start", "--max-run-duration=10h"} <= set(request)
    # Each is paid for.
    told = stubs.run(*SEVERAL, "--dry_run", "--type=v5litepod-64", *TRAIN).stdout
    assert "# price: on demand; about $153.60 an hour" in told


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
    stubs.run(*MADE, *options, *TRAIN)
    (create,) = stubs.asked("tpu-vm", "create")
    assert create[7:-2] == [
        *("--reserved", "--internal-ips"),
        *(f"--labels=launcher={MINE},team=search,stage=", "--network=n", "--metadata=a=b c"),
    ]
    (run,) = stubs.asked("tpu-vm", "ssh")
    assert "--internal-ip" in run


def test_a_reservation_and_iap_are_of_the_alpha_commands(stubs):
    options = ("--reservation=mine", "--internal_ip", "--iap", "--setup=sudo mount /dev/sdb /mnt")
    completed = stubs.run(*MADE, "--dry_run", *options, *TRAIN)
    lines = [line for line in completed.stdout.splitlines() if line.startswith("gcloud ")]
    assert all(line.startswith("gcloud alpha compute tpus tpu-vm ") for line in lines)
    create, setup, run = lines
    assert "--reservation=mine --internal-ips" in create
    assert "--tunnel-through-iap" not in create
    assert "'--command=sudo mount /dev/sdb /mnt' --tunnel-through-iap" in setup
    assert "--tunnel-through-iap" in run


QUOTAS = [
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
]
REFUSED = [
    "PERMISSION_DENIED: The caller does not have permission.",
    'INVALID_ARGUMENT: Accelerator type "v4-33" was not found [EID: 0x503]',
    "Invalid choice: 'v4-429'",
]


@pytest.mark.parametrize("said", [*QUOTAS, *REFUSED])
@EITHER
def test_what_gcloud_refuses_is_named_and_not_asked_for_again(stubs, launcher, said):
    stubs.answer((" create", CREATE + said, 1), states=["ABSENT"])
    completed = stubs.run(*launcher, "--skip_install", *TRAIN, status=2)
    assert said in completed.stderr
    quota = ["the project's quota is too small: ", "--internal_ip needs no address"]
    for words in quota if said in QUOTAS else ["fix it and start again"]:
        assert words in completed.stderr
    assert len([call for call in stubs.calls if "create" in call]) == 1
    assert stubs.sleeps == 0
    assert last_line(completed) == "TPU pod does not exist; nothing is billed"


@pytest.mark.parametrize(
    "error",
    [
        {"code": 8, "message": "Insufficient quota to satisfy the request"},
        {"code": 9, "message": "the reservation does not exist"},
        {},
    ],
)
def test_a_queued_resource_that_failed_is_an_error_unless_capacity_lacked(stubs, error):
    stubs.answer(states=[queued("FAILED", **error), "ABSENT"])
    completed = stubs.run(*SEVERAL, "--skip_install", *TRAIN, status=2)
    assert "queued resource pod FAILED: {" in completed.stderr
    assert error.get("message", "") in completed.stderr
    # Its name is free for the next request.
    assert len(stubs.asked("queued-resources", "delete")) == 1
    assert stubs.asked("queued-resources", "create") == []
    assert stubs.sleeps == 0


DELETED = "TPU pod was deleted; nothing is billed any more"
UNFINISHED = "the command has not finished; --delete=success"
BILLED = "TPU pod is READY and billed until you delete it"


@pytest.mark.parametrize(
    ("delete", "status", "label", "last"),
    [
        ("success", 0, MINE, DELETED),
        ("success", 1, MINE, f"{BILLED} ({UNFINISHED}): {DELETE}"),
        ("always", 0, MINE, DELETED),
        ("always", 1, MINE, DELETED),
        ("never", 0, MINE, f"{BILLED} (as you say): {DELETE}"),
        ("always", 0, "taser_jax-somebody", f"{BILLED} (others made it): {DELETE}"),
    ],
)
def test_what_is_deleted_and_what_is_still_billed(stubs, delete, status, label, last):
    run = ("_host.sh", finished(status=status), int(status != 0))
    stubs.answer(run, states=[node("READY", label)])
    assert last_line(stubs.run(*MADE, f"--delete={delete}", *TRAIN, status=status)) == last
    assert len(stubs.asked("tpu-vm", "delete")) == (last == DELETED)


def test_a_deletion_that_fails_is_reported(stubs):
    stubs.answer((" delete ", "ERROR: (gcloud) PERMISSION_DENIED: no", 1))
    completed = stubs.run(*MADE, "--delete=always", *TRAIN)
    assert "PERMISSION_DENIED" in completed.stderr
    assert last_line(completed) == f"TPU pod may still run and be billed; delete it: {DELETE}"


def test_a_state_that_gcloud_does_not_tell_may_be_billed(stubs):
    stubs.answer(states=["READY", "ERROR: (gcloud) UNAVAILABLE: x"])
    completed = stubs.run(*MADE, "--delete=never", *TRAIN)
    assert last_line(completed) == f"TPU pod may still run and be billed; delete it: {DELETE}"


@pytest.mark.parametrize(
    ("launcher", "state", "connections", "delete", "last"),
    [
        (ONE, node("READY"), 1, "always", DELETED),
        (SEVERAL, queued("ACTIVE"), 2, "success", UNFINISHED),
    ],
)
def test_ctrl_c_ends_connections_asks_nothing_and_prints_the_same(
    stubs, launcher, state, connections, delete, last
):
    connection = f"$ echo $$ >>{stubs.folder}/pids; echo connected; exec tail -f /dev/null"
    stubs.answer((" ssh ", connection, 0), states=[state])
    with stubs.start(*launcher, "--skip_install", f"--delete={delete}", *TRAIN) as started:
        for _ in range(connections):
            assert "connected\n" in iter(started.stdout.readline, "")
        started.send_signal(signal.SIGINT)
        # Returns when nobody writes to the pipe any more.
        _, errors = started.communicate(timeout=30)
    assert started.returncode == 130
    assert last in errors.splitlines()[-1]
    assert len(stubs.asked("tpu-vm", "delete")) == (last == DELETED)
    for pid in (stubs.folder / "pids").read_text().split():
        # Empty for a process that has ended and that nobody has asked for.
        program = pathlib.Path("/proc", pid, "cmdline")
        assert not program.exists() or not program.read_bytes()


COMMAND = ("--", "train", "--gin_file=of_hosts.gin")
MODEL = "the model is in gs://bucket/my model"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ONE, "success): after the command has finished, if its model is in a bucket; otherwise"),
        (("tpu_vm.sh", *TPU), "never): never: the TPU stays and is billed"),
        ((*ONE, "--delete=never"), "never): never: the TPU stays and is billed"),
        ((*ONE, "--delete=success"), "success): after the command has finished; otherwise, as"),
        ((*ONE, "--delete=always"), "always): when the launcher ends, however it ends"),
    ],
)
def test_the_plan_says_when_a_tpu_is_deleted(stubs, options, words):
    assert f"\n# deletion (--delete={words}" in stubs.run(*options, "--dry_run", *COMMAND).stdout


def ended(stubs: Stubs, listing: str, status: int, *options: str, said: str = MODEL):
    """A run that has finished, after which gcloud lists the output as given."""
    stubs.answer(("storage ls", listing, status), ("_host.sh", f"{said}\n{finished()}", 0))
    return stubs.run(*ONE, "--skip_install", *options, *COMMAND)


def test_the_model_is_looked_for_before_the_deletion(stubs):
    result = ended(stubs, "gs://bucket/my model/checkpoint_1/", 0, "--project=p")
    look, delete = stubs.calls[-2:]
    assert look == ["storage", "ls", "gs://bucket/my model/", "--project=p", "--quiet"]
    assert delete[2:5] == ["tpu-vm", "delete", "pod"]
    assert last_line(result) == "TPU pod was deleted; nothing is billed any more"


@pytest.mark.parametrize(
    ("listing", "status", "reason"),
    [
        ("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.", 1, "found nothing"),
        ("ERROR: (gcloud.storage.ls) HTTPError 403: no permission", 1, "or could not look"),
        ("", 0, "gcloud found nothing in gs://bucket/my model/"),
        # A folder that the console has made.
        ("gs://bucket/my model/", 0, "found nothing in gs://bucket/my model/"),
        # Listed in part.
        ("gs://bucket/my model/checkpoint_1/", 1, "or could not look"),
    ],
)
def test_a_model_that_is_not_there_at_the_end_keeps_the_tpu(stubs, listing, status, reason):
    # The command has finished, all the same.
    result = ended(stubs, listing, status)
    assert stubs.asked("tpu-vm", "delete") == []
    last = last_line(result)
    assert last.startswith("TPU pod is READY and billed until you delete it (")
    assert reason in last
    if listing.startswith("ERROR"):
        assert listing in result.stderr


@pytest.mark.parametrize(
    "said",
    [
        # A model on the hosts' disks, another command, hosts that have not the line.
        "loss 1.0",
        "embeddings: gs://bucket/e",
        "the model is in /home/me/gs://bucket/model",
    ],
)
def test_a_tpu_whose_disks_may_hold_results_stays(stubs, said):
    result = ended(stubs, "gs://bucket/my model/checkpoint_1/", 0, said=said)
    assert stubs.asked("tpu-vm", "delete") == []
    assert "(the command has reported no model in a bucket)" in last_line(result)
