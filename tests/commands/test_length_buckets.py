"""`length_buckets`: the training and validation of full padding, with less of it."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.plans import MultitaskTraining, TrainingConfig
from taser_jax.commands.train import train
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.storage.errors import ConfigError

TRAINING = dataclasses.replace(
    tiny_training.training_config(train_steps=3),
    multitask=MultitaskTraining(batching=TaskBatchingConfig(total=32, num_negatives=1)),
)


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ragged") / "tokens"
    tiny_training.write_token_store(directory, least_words=1)
    return directory


def metrics_and_facts(store_dir, model_dir, training: TrainingConfig):
    train(
        model_dir=str(model_dir),
        data=TrainingData(str(store_dir)),
        # Dropout draws by position in a batch's arrays.
        model=tiny_training.model_config(),
        training=training,
    )
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((model_dir / "run.json").read_text())


@pytest.mark.release
def test_metrics_are_those_of_full_padding(store_dir, tmp_path):
    plain, facts = metrics_and_facts(store_dir, tmp_path / "plain", TRAINING)
    assert "length_groups" not in facts
    grouped, facts = metrics_and_facts(
        store_dir, tmp_path / "grouped", dataclasses.replace(TRAINING, length_buckets=(5, 9))
    )
    assert " x 9, " in str(facts["length_groups"])
    assert plain[-1].keys() == grouped[-1].keys()
    names = [
        name
        for name in plain[-1]
        if name.startswith("validation/") or "loss" in name or "mrr" in name
    ]
    assert "validation/nll" in names
    for before, after in zip(plain, grouped, strict=True):
        for name in names:
            if name in before:
                np.testing.assert_allclose(after[name], before[name], rtol=1e-5, err_msg=name)
    assert grouped[-1]["train/padding"] < plain[-1]["train/padding"] - 0.05


def test_a_bucket_longer_than_the_model_is_refused(store_dir, tmp_path):
    training = dataclasses.replace(TRAINING, length_buckets=(8, 16))
    with pytest.raises(ConfigError, match=r"(?s)bucket of 16 tokens.*at most the 12 positions"):
        metrics_and_facts(store_dir, tmp_path, training)
