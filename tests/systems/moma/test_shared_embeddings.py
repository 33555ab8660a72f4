"""Embeddings by text: passages of a frozen tower that nothing encodes twice."""

import dataclasses

import numpy as np
import pytest
import tiny_training
from tiny_models import assert_close

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.encode import encode
from taser_jax.commands.train import train
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Towers
from taser_jax.optim.optimizers import OptimizerConfig, Update
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.systems.moma.memory import add_memory

pytestmark = pytest.mark.slow

FROZEN = (("passage_encoder/.*", Update.FREEZE), ("query_encoder/.*", Update.TRAIN))
PLAIN = tiny_training.model_config()
# Its dropout is 0, as a frozen tower's is where its embeddings are read.
MODEL = DualEncoderConfig(PLAIN.bert, pooling=PLAIN.pooling, towers=Towers.SEPARATE)


def training(updates=FROZEN, **changes):
    config = tiny_training.training_config(**{"train_steps": 3, **changes})
    # A constant rate: two steps and one more are three.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, floor=1.0, updates=updates)
    return dataclasses.replace(config, optimizer=optimizer)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A token store, a model, and its passage tower's embeddings by text; as text, by name."""
    root = tmp_path_factory.mktemp("shared")
    world = {name: str(root / name) for name in ("store", "model", "embeddings", "shared")}
    tiny_training.write_token_store(root / "store", num_passages=48, least_words=10)
    tiny_training.write_untrained(root / "model", MODEL, root / "store")
    encode(
        model_dir=world["model"],
        token_store=world["store"],
        output_dir=world["embeddings"],
        shared_embeddings=world["shared"],
        query_splits=[],
    )
    return world


def test_training_on_embeddings_is_training_on_tokens_also_after_a_kill(world, tmp_path):
    results = {}
    on_embeddings = {"shared_embeddings": world["shared"]}
    for name, steps, data in (
        ("tokens", 3, {}),
        ("embeddings", 2, on_embeddings),
        ("embeddings", 3, on_embeddings),
    ):
        summary = train(
            model_dir=str(tmp_path / name),
            data=TrainingData(world["store"], **data),
            model=MODEL,
            training=training(evaluation_period=3, train_steps=steps),
            initial_checkpoint=f"{world['model']}/checkpoint_0",
        )
        results[name] = summary, load_model(tmp_path / name, step=steps)
    (first, tokens), (second, embedded) = results.values()
    assert first.validation["nll"] == pytest.approx(second.validation["nll"], abs=1e-5)
    assert embedded.passage_fingerprint == load_model(world["model"]).passage_fingerprint
    # Adam divides by gradients' size: equal to rounding in the loss, close in the weights.
    towers = (model.params["query_encoder"] for model in (tokens, embedded))
    assert_close(*towers, rtol=0, atol=2e-3)


def test_models_of_one_passage_tower_encode_a_text_once(world, tmp_path):
    direct = {"model_dir": world["model"], "token_store": world["store"]}
    encode(**direct, output_dir=str(tmp_path / "direct"), query_splits=[])
    shared, expected = (Embeddings(d) for d in (world["embeddings"], tmp_path / "direct"))
    np.testing.assert_allclose(shared[:], expected[:], atol=1e-6)
    assert shared.fingerprints == expected.fingerprints
    memories = {"memory_dir": str(tmp_path / "memories"), "shared_embeddings": world["shared"]}
    assert add_memory(name="source", **memories, **direct) == {"encoded": 0, "kept": 48}


def test_a_tower_that_is_trained_or_another_one_is_refused(world, tmp_path):
    data = TrainingData(world["store"], shared_embeddings=world["shared"])
    trained, other = training(updates=None), training(validates=False)
    for config, error, message in (
        (trained, ConfigError, "passage_encoder is trained"),
        (dataclasses.replace(other, seed=9), FingerprintError, "embeddings by text"),
    ):
        with pytest.raises(error, match=message):
            train(model_dir=str(tmp_path / "model"), data=data, model=MODEL, training=config)
