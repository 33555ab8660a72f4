"""A TPU is deleted unasked only if training says that its model is in a bucket, and it is there."""

import pytest
from launch_stubs import ONE, TPU, Stubs, finished

pytestmark = pytest.mark.slow

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
    assert result.stderr.splitlines()[-1] == "TPU pod was deleted; nothing is billed any more"


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
    last = result.stderr.splitlines()[-1]
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
    assert "(the command has reported no model in a bucket)" in result.stderr.splitlines()[-1]
