"""A TPU is deleted unasked only if all outputs are in a bucket, and are there at the end."""

import pathlib
import shutil
import subprocess

import pytest
from launch_stubs import LAUNCH, ONE, Stubs, launch

pytestmark = pytest.mark.slow

MODEL = "--gin.MODEL_DIR=gs://bucket/model"
GIN_FILES = {
    "bucket.gin": "# A model\ninclude 'part.gin'\nMODEL_DIR = 'gs://bucket/of_a_file'  # there\n",
    "part.gin": "include 'runs/taser_base.gin'\nTASKS = [\n    'nq',  # MODEL_DIR = 'no'\n]\n",
    "includes_it.gin": "include 'bucket.gin'\n",
    "disk.gin": "MODEL_DIR = 'model'\n",
    "project.gin": "MODEL_DIR = 'gs://bucket/model'\nOUTPUT_DIR = 'pipeline'\n",
    "bypass.gin": "train.model_dir = 'model'\n",
    "qualified.gin": "commands.train.train.model_dir = 'model'\n",
    "macro.gin": "PLACE = 'gs://bucket/of_a_macro'\nMODEL_DIR = %PLACE\n",
    "macro_value.gin": "MODEL_DIR/macro.value = 'model'\n",
    "circle.gin": "MODEL_DIR = %PLACE\nPLACE = %MODEL_DIR\n",
    "endless.gin": "include 'endless.gin'\n",
    "block.gin": "train:\n  model_dir = 'model'\n",
    "gin_configs/new.gin": "MODEL_DIR = 'model'\n",
    "folder/deep.gin": "MODEL_DIR = 'gs://bucket/of_a_folder'\n",
}


@pytest.fixture(scope="module")
def folder_of_files(tmp_path_factory) -> pathlib.Path:
    """The packaged Gin files and those of a user."""
    root = tmp_path_factory.mktemp("files") / "checkout"
    shutil.copytree(LAUNCH.parent / "gin_configs", root / "gin_configs")
    for name, text in GIN_FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root.parent / "outside.gin").write_text(GIN_FILES["bucket.gin"])
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=root, check=True)
    # Hosts find the packaged file of this name.
    (root / "new.gin").write_text(GIN_FILES["bucket.gin"])
    return root


@pytest.fixture
def files(folder_of_files, monkeypatch) -> None:
    """These files are those of the checkout that hosts get."""
    monkeypatch.setattr(launch, "ROOT", folder_of_files)


def planned(stubs: Stubs, *options: str) -> str:
    """The line about deletion of a dry run, without the command that does it by hand."""
    result = stubs.run(*ONE, "--dry_run", *options)
    assert stubs.calls == []
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("# deletion")]
    return line.partition(" By hand")[0]


def train(*flags: str) -> tuple[str, ...]:
    return "--", "train", *flags


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ((MODEL,), "gs://bucket/model"),
        (("--gin.MODEL_DIR", "gs://bucket/model"), "gs://bucket/model"),
        (("--gin_bindings=MODEL_DIR = 'gs://bucket/my model'",), "gs://bucket/my model"),
        (("--gin.train.model_dir=gs://bucket/model",), "gs://bucket/model"),
        # The last one wins.
        (("--gin.MODEL_DIR=model", MODEL), "gs://bucket/model"),
        # Inputs may be anywhere.
        ((MODEL, "--gin.TOKEN_STORE=data"), "gs://bucket/model"),
        (("--gin_file=bucket.gin",), "gs://bucket/of_a_file"),
        (("--gin_file", "includes_it.gin"), "gs://bucket/of_a_file"),
        (("--gin_file=macro.gin",), "gs://bucket/of_a_macro"),
        (("--gin_file=deep.gin", "--gin_search_paths=x,folder"), "gs://bucket/of_a_folder"),
        (("--gin_file=disk.gin", "--gin_file=bucket.gin"), "gs://bucket/of_a_file"),
        # Training does not write OUTPUT_DIR, which a project's file has for other commands.
        (("--gin_file=project.gin",), "gs://bucket/model"),
        # The command line wins over files, wherever it stands.
        ((MODEL, "--gin_file=disk.gin"), "gs://bucket/model"),
        ((MODEL, "--gin.OUTPUT_DIR=gs://bucket/o"), "gs://bucket/model is not empty, if gs://bucket/o"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("files")
def test_a_tpu_is_deleted_if_the_model_is_in_a_bucket(stubs, flags, address):
    assert planned(stubs, *train(*flags)) == (
        "# deletion (--delete=success): after the command has finished, "
        f"if {address} is not empty; after a failure or Ctrl-C the TPU stays and is billed."
    )


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (train(), "MODEL_DIR is neither on the command line nor in a Gin file"),
        (train("--gin_file=runs/taser_base.gin"), "MODEL_DIR is neither"),
        # Inputs say nothing about outputs.
        (
            train("--gin.MODEL_DIR=model", "--gin.TOKEN_STORE=gs://bucket/tokens"),
            "MODEL_DIR is model, which is not in a bucket",
        ),
        (train("--gin.NEGATIVES_DIRS=['gs://bucket/n']"), "MODEL_DIR is neither"),
        # Nor do outputs of other commands.
        (train("--gin.OUTPUT_DIR=gs://bucket/results"), "MODEL_DIR is neither"),
        (train(MODEL, "--gin.OUTPUT_DIR=results"), "OUTPUT_DIR is results, which is"),
        # The last one wins.
        (train(MODEL, "--gin.MODEL_DIR=model"), "MODEL_DIR is model"),
        (train(MODEL, "--gin_bindings=MODEL_DIR=model"), "MODEL_DIR is model"),
        (train(MODEL, "--gin.train.model_dir=model"), "train.model_dir is model"),
        (train("--gin_file=disk.gin"), "MODEL_DIR is 'model'"),
        (train("--gin_file=bucket.gin", "--gin_file=disk.gin"), "MODEL_DIR is 'model'"),
        (train("--gin_file=bucket.gin", "--gin.MODEL_DIR=model"), "MODEL_DIR is model"),
        # The parameter without its macro.
        (train(MODEL, "--gin_file=bypass.gin"), "train.model_dir is 'model'"),
        (train(MODEL, "--gin_file=qualified.gin"), "train.model_dir is 'model'"),
        (train("--gin_file=macro_value.gin"), "MODEL_DIR is 'model'"),
        # What cannot be resolved.
        (train("--gin.MODEL_DIR=%PLACE"), "PLACE is neither"),
        (train("--gin.MODEL_DIR=@place()"), "MODEL_DIR is @place()"),
        (train("--gin.MODEL_DIR=None"), "MODEL_DIR is None"),
        (train("--gin_file=circle.gin"), "is neither"),
        (train("--gin_file=endless.gin", MODEL), "cannot be read: maximum recursion depth"),
        (train("--gin_file=block.gin", MODEL), "a block, with model_dir, which the"),
        (train("--gin_file=mine.gin", MODEL), "mine.gin is not in git, so hosts do not get it"),
        (train("--gin_file=../outside.gin"), "../outside.gin is not in git"),
        # Hosts find another file of this name.
        (train("--gin_file=new.gin"), "MODEL_DIR is 'model'"),
        # Not buckets that were meant.
        (train("--gin.MODEL_DIR=gs:/bucket/model"), "MODEL_DIR is gs:/bucket/model"),
        (train("--gin.MODEL_DIR=gs://"), "MODEL_DIR is gs://,"),
        (train("--gin.MODEL_DIR=/mnt/gs://bucket"), "MODEL_DIR is /mnt/gs://bucket"),
        # These write to local paths, whatever they are given.
        (("--", "encode", MODEL, "--gin.EMBEDDINGS_DIR=gs://b/e"), "only train writes to a bucket"),
        (("--", "pipeline", "taser", "--gin.OUTPUT_DIR=gs://b/o"), "only train writes"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("files")
def test_a_tpu_whose_disks_may_hold_results_stays(stubs, command, reason):
    line = planned(stubs, *command)
    assert line.startswith("# deletion (--delete=never): never (")
    assert reason in line


@pytest.mark.usefixtures("files")
def test_a_gin_file_of_the_hosts_own_checkout_is_not_relied_on(stubs):
    """With --skip_install the file here may say something else."""
    line = planned(stubs, "--skip_install", *train("--gin_file=bucket.gin"))
    assert "(--delete=never): never (MODEL_DIR is neither" in line
    line = planned(stubs, "--skip_install", *train("--gin_file=bucket.gin", MODEL))
    assert "(--delete=success): after the command has finished, if gs://bucket/model" in line


@pytest.mark.parametrize(
    ("delete", "words"),
    [
        ("never", "never (as you say)"),
        ("success", "after the command has finished; after a"),
        ("always", "when the launcher ends, however it ends"),
    ],
)
@pytest.mark.parametrize("flag", [MODEL, "--gin.MODEL_DIR=model"])
def test_what_is_asked_for_is_done_wherever_results_go(stubs, delete, words, flag):
    line = planned(stubs, f"--delete={delete}", *train(flag))
    assert f"(--delete={delete}): {words}" in line


def ended(stubs: Stubs, listing: str, status: int, *options: str):
    """A run that has finished, after which gcloud lists the output as given."""
    stubs.answer(("storage ls", listing, status))
    return stubs.run(*ONE, "--skip_install", *options)


def test_the_model_is_looked_for_before_the_deletion(stubs):
    result = ended(stubs, "gs://bucket/model/checkpoint_1/", 0, "--project=p", *train(MODEL))
    look, delete = stubs.calls[-2:]
    assert look == ["storage", "ls", "gs://bucket/model/", "--project=p", "--quiet"]
    assert delete[2:5] == ["tpu-vm", "delete", "pod"]
    assert result.stderr.splitlines()[-1] == "TPU pod was deleted; nothing is billed any more"


@pytest.mark.parametrize(
    ("listing", "status", "reason"),
    [
        ("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.", 1, "found nothing"),
        ("ERROR: (gcloud.storage.ls) HTTPError 403: no permission", 1, "or could not look"),
        ("", 0, "gcloud found nothing in gs://bucket/model/"),
        # A folder that the console has made.
        ("gs://bucket/model/", 0, "found nothing in gs://bucket/model/"),
        # Listed in part.
        ("gs://bucket/model/checkpoint_1/", 1, "or could not look"),
    ],
)
def test_a_model_that_is_not_there_at_the_end_keeps_the_tpu(stubs, listing, status, reason):
    # The command has finished, all the same.
    result = ended(stubs, listing, status, *train(MODEL))
    assert stubs.asked("tpu-vm", "delete") == []
    last = result.stderr.splitlines()[-1]
    assert last.startswith("TPU pod is READY and billed until you delete it (")
    assert reason in last
    if listing.startswith("ERROR"):
        assert listing in result.stderr


def test_each_output_is_looked_for(stubs):
    model = ("ls gs://bucket/model/", "gs://bucket/model/a", 0)
    stubs.answer(model, ("ls gs://bucket/o/", "", 0))
    command = train(MODEL, "--gin.OUTPUT_DIR=gs://bucket/o")
    result = stubs.run(*ONE, "--skip_install", *command)
    assert stubs.asked("tpu-vm", "delete") == []
    assert "found nothing in gs://bucket/o/" in result.stderr.splitlines()[-1]
