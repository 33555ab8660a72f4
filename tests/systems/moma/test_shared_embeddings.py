"""Embeddings by text: passages of a frozen tower that nothing encodes twice."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.encode import encode
from taser_jax.commands.train import train
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Towers
from taser_jax.optim.optimizers import OptimizerConfig, Update
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.systems.moma.memory import add_memory

pytestmark = pytest.mark.slow

FROZEN = (("passage_encoder/.*", Update.FREEZE), ("query_encoder/.*", Update.TRAIN))


def training(updates=FROZEN, **changes):
    config = tiny_training.training_config(**{"train_steps": 3, **changes})
    # A constant rate: two steps and one more are three.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, floor=1.0, updates=updates)
    return dataclasses.replace(config, optimizer=optimizer)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A token store, a model, and its passage tower's embeddings by text."""
    root = tmp_path_factory.mktemp("shared")
    tiny_training.write_token_store(root / "store", num_passages=48, least_words=10)
    plain = tiny_training.model_config()
    # Its dropout is 0, as a frozen tower's is where its embeddings are read.
    config = DualEncoderConfig(plain.bert, pooling=plain.pooling, towers=Towers.SEPARATE)
    options = {"token_store": str(root / "store"), "model": config}
    tiny_training.write_untrained(root / "model", config, root / "store")
    encode(
        model_dir=str(root / "model"),
        token_store=options["token_store"],
        output_dir=str(root / "embeddings"),
        shared_embeddings=str(root / "shared"),
        query_splits=[],
    )
    return root, options


def test_training_on_embeddings_is_training_on_tokens_also_after_a_kill(world, tmp_path):
    root, options = world
    about = {"initial_checkpoint": str(root / "model" / "checkpoint_0"), "model": options["model"]}
    results = {}
    for name, steps, more in (
        ("tokens", 3, {}),
        ("embeddings", 2, {"shared_embeddings": str(root / "shared")}),
        ("embeddings", 3, {"shared_embeddings": str(root / "shared")}),
    ):
        config = training(evaluation_period=3, train_steps=steps)
        directory = str(tmp_path / name)
        data = TrainingData(options["token_store"], **more)
        summary = train(model_dir=directory, data=data, training=config, **about)
        results[name] = summary, load_model(directory, step=steps)
    (first, tokens), (second, embedded) = results.values()
    assert first.validation["nll"] == pytest.approx(second.validation["nll"], abs=1e-5)
    assert embedded.passage_fingerprint == load_model(root / "model").passage_fingerprint
    # Adam divides by gradients' size: equal to rounding in the loss, close in the weights.
    towers = (model.params["query_encoder"] for model in (tokens, embedded))
    for from_tokens, from_embeddings in zip(*map(jax.tree.leaves, towers), strict=True):
        np.testing.assert_allclose(from_tokens, from_embeddings, atol=2e-3)


def test_models_of_one_passage_tower_encode_a_text_once(world, tmp_path):
    root, options = world
    direct = {"model_dir": str(root / "model"), "token_store": options["token_store"]}
    encode(**direct, output_dir=str(tmp_path / "direct"), query_splits=[])
    shared, expected = (Embeddings(d) for d in (root / "embeddings", tmp_path / "direct"))
    np.testing.assert_allclose(shared[:], expected[:], atol=1e-6)
    assert shared.fingerprints == expected.fingerprints
    memory_dir = str(tmp_path / "memories")
    counts = add_memory(
        name="source", memory_dir=memory_dir, shared_embeddings=str(root / "shared"), **direct
    )
    assert counts == {"encoded": 0, "kept": len(TokenStore.open(options["token_store"]))}


def test_a_tower_that_is_trained_or_another_one_is_refused(world, tmp_path):
    root, options = world
    data = TrainingData(options["token_store"], shared_embeddings=str(root / "shared"))
    about = {"data": data, "model": options["model"]}
    with pytest.raises(ConfigError, match="passage_encoder is trained"):
        train(model_dir=str(tmp_path / "trained"), training=training(updates=None), **about)
    other = training(validates=False)
    other = dataclasses.replace(other, seed=9)
    with pytest.raises(FingerprintError, match="embeddings by text"):
        train(model_dir=str(tmp_path / "other"), training=other, **about)
