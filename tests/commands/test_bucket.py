"""A model directory in a bucket: what is written beside the checkpoints, and read again."""

import inspect
import logging
import pathlib

import pytest
import tiny_training

from taser_jax.assembly import model_directory as models
from taser_jax.commands import train
from taser_jax.commands.encode import encode
from taser_jax.commands.export import export_model
from taser_jax.commands.search import bm25
from taser_jax.storage.errors import ConfigError
from taser_jax.training.checkpoints import Checkpoints

ADDRESS = "gs://bucket/models/tiny"


@pytest.mark.parametrize("command", [bm25, encode, export_model])
def test_other_commands_refuse_a_bucket(command):
    arguments = inspect.signature(command).parameters
    required = {name: "x" for name, each in arguments.items() if each.default is each.empty}
    with pytest.raises(ConfigError, match="writes no buckets"):
        command(**required | {"output_dir": ADDRESS})
    assert not pathlib.Path("gs:").exists()


def test_a_model_is_trained_into_a_bucket_and_opened_from_it(
    bucket, tmp_path, tiny_store_dir, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="taser")
    opened = []

    def checkpoints(directory, *args, **options):
        # Orbax and TensorStore have their own way to a bucket.
        opened.append(str(directory))
        return Checkpoints(tmp_path / "checkpoints", *args, **options)

    monkeypatch.setattr(train, "Checkpoints", checkpoints)
    monkeypatch.setattr(models, "Checkpoints", checkpoints)
    training = tiny_training.training_config(train_steps=2, validates=False)
    tiny_training.start(ADDRESS, tiny_store_dir, training, config_text="TRAIN_STEPS = 2\n")
    # Launchers look for this line before they delete a TPU.
    assert caplog.messages[-1] == f"the model is in {ADDRESS}"
    model = models.load_model(ADDRESS)
    assert opened == [ADDRESS, ADDRESS]
    assert model.step == 2
    assert (model.vocabulary_dir / "vocabulary.json").read_text() == "{}"
    names = {path.name for path in (bucket.folder / "bucket/models/tiny").iterdir()}
    assert names == {
        *("config.gin", "model.json", "model-info.txt", "run.json"),
        *("metrics.jsonl", "vocabulary", "train", "checksums.txt"),
    }
    assert not (pathlib.Path("gs:")).exists()
