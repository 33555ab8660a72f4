"""Passages of the last steps as further negatives."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import TinyEncoder, init, make_batch

from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.models.batch import Batch, Role
from taser_jax.models.encoded import Encoded
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.ensemble_files import EnsembleTraining
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints
from taser_jax.training.state import (
    PassageQueue,
    QueueSize,
    TrainState,
    init_state,
    state_shardings,
)
from taser_jax.training.step import make_train_step

MODEL = TinyEncoder(dropout=0.0, routed=False)
OPTIMIZER = optax.sgd(0.5)
QUERIES, PASSAGES = 8, 16
SIZE = QueueSize(steps=2, passages=PASSAGES, dim=8)


def fresh(**kwargs) -> TrainState:
    initialise = functools.partial(init, MODEL)
    return init_state(initialise, OPTIMIZER, jax.random.key(0), queue=SIZE, **kwargs)


def batch_of(step: int) -> Batch:
    """A batch whose first query knows the queue's third passage as a positive of its own."""
    batch = make_batch(QUERIES, seed=step)
    queued = np.zeros((QUERIES, SIZE.steps * PASSAGES), bool)
    queued[0, 2] = True
    return dataclasses.replace(batch, ignore=np.concatenate([batch.ignore, queued], axis=1))


def embeddings(params, tokens, role) -> np.ndarray:
    encoded = MODEL.apply({"params": params}, tokens, role=role, method="encode")
    return np.asarray(encoded.embeddings, np.float64)


def test_each_loss_is_over_the_batch_and_what_the_steps_before_it_encoded():
    step, state = make_train_step(MODEL, OPTIMIZER), fresh()
    places: dict[int, np.ndarray] = {}
    for number in range(5):
        batch = batch_of(number)
        queries = embeddings(state.params, batch.queries, Role.QUERY)
        passages = embeddings(state.params, batch.passages, Role.PASSAGE)
        logits = [queries @ passages.T]
        for place, queued in sorted(places.items()):
            scores = queries @ queued.T
            if place == 0:
                scores[0, 2] = -np.inf
            logits.append(scores)
        scores = np.concatenate(logits, axis=1)
        positive = scores[np.arange(QUERIES), batch.positive_index]
        expected = np.mean(np.log(np.exp(scores).sum(axis=1)) - positive)
        rank = 1 + (scores > positive[:, None]).sum(axis=1)
        state, metrics = step(state, {"toy": batch})
        assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
        assert float(metrics["mean_rank"]) == pytest.approx(rank.mean())
        assert "passages" not in metrics
        places[number % SIZE.steps] = passages
    for place, passages in places.items():
        np.testing.assert_allclose(state.queue.embeddings[place], passages, rtol=1e-5, atol=1e-6)
    assert state.queue.filled.tolist() == [True, True]


def test_passages_of_a_skipped_step_are_left_out():
    step = make_train_step(MODEL, OPTIMIZER)
    state, _ = step(fresh(), {"toy": batch_of(0)})
    kernel = state.params["wi"]["kernel"]
    broken = state.params | {"wi": state.params["wi"] | {"kernel": kernel * np.nan}}
    state, metrics = step(dataclasses.replace(state, params=broken), {"toy": batch_of(1)})
    assert metrics["skipped"] == 1
    assert state.queue.filled.tolist() == [True, False]
    assert np.isfinite(state.queue.embeddings).all()


def test_by_hand_a_queue_of_one_passage_a_step():
    queue = QueueSize(steps=2, passages=1, dim=1).empty()
    for step, value in enumerate((3.0, 5.0, 7.0)):
        queue = queue.pushed(jnp.array([[value]]), step=jnp.int32(step), is_taken=jnp.array(True))
    assert queue.embeddings.tolist() == [[[7.0]], [[5.0]]]
    joined = queue.joined(Encoded(jnp.array([[1.0]]), None))
    assert joined.embeddings.tolist() == [[1.0], [7.0], [5.0]]
    half = PassageQueue(queue.embeddings, jnp.array([True, False]))
    assert half.ignored(jnp.array([[False, True, False]])).tolist() == [[False, True, True]]


def test_no_gradient_reaches_the_queue():
    def loss(queue):
        return queue.joined(Encoded(jnp.ones((2, 8)), None)).embeddings.sum()

    gradient = jax.grad(loss, allow_int=True)(SIZE.empty())
    assert not np.any(gradient.embeddings)


def test_devices_do_not_change_it():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda _: replicated, fresh().params)
    shardings = state_shardings(fresh(), shapes)
    plain, spread = fresh(), jax.device_put(fresh(), shardings)
    steps = [
        make_train_step(MODEL, OPTIMIZER, num_chunks=chunks, state_shardings=placed)
        for chunks, placed in ((1, None), (1, shardings))
    ]
    by_row = NamedSharding(mesh, PartitionSpec("data"))
    for number in range(3):
        batch = batch_of(number)
        plain, expected = steps[0](plain, {"toy": batch})
        spread, metrics = steps[1](spread, {"toy": jax.device_put(batch, by_row)})
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert spread.queue.embeddings.sharding.is_fully_replicated
    np.testing.assert_allclose(spread.queue.embeddings, plain.queue.embeddings, rtol=1e-4)
    assert steps[1].compilations == 1


def test_a_checkpoint_holds_it(tmp_path):
    state, _ = make_train_step(MODEL, OPTIMIZER)(fresh(), {"toy": batch_of(0)})
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(state, step=1, about={})
    checkpoints.wait()
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    restored = checkpoints.restore(shapes, step=1, about={})
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert isinstance(restored.queue, PassageQueue)


def test_members_of_an_ensemble_have_none():
    with pytest.raises(ConfigError, match="and a queue is set"):
        EnsembleTraining(batching=BatchingConfig(batch_size=4, queue_steps=2))
