import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_encoder import TinyEncoder, init
from tiny_models import assert_close, tiny_batch

from taser_jax.models.batch import Role
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.losses import RoutingRegularizer, contrastive_loss
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.state import (
    SkippedSteps,
    TrainState,
    init_state,
    named_key,
    parameter_table,
)
from taser_jax.training.step import make_train_step

MODEL = TinyEncoder()
PLAIN = TinyEncoder(dropout=0.0, routed=False)
OPTIMIZER = optax.adam(2e-2)
BATCH = tiny_batch(16)
BATCHES = {"toy": BATCH}


def fresh(model=MODEL, optimizer=OPTIMIZER, **kwargs) -> TrainState:
    return init_state(functools.partial(init, model), optimizer, jax.random.key(0), **kwargs)


@functools.cache
def default_step():
    return make_train_step(MODEL, OPTIMIZER, seed=3, schedule=lambda step: 0.5 / (1 + step))


def test_named_keys_are_stable_and_distinct():
    # First four bytes of SHA-256("dropout"), little endian; not Python's salted hash.
    pair = named_key(7, "dropout"), jax.random.fold_in(jax.random.key(7), 0x290A4C1B)
    assert jnp.array_equal(*map(jax.random.key_data, pair))
    keys = [named_key(0, "dropout"), named_key(0, "routing"), named_key(1, "dropout")]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 3


def test_steps_of_a_gpu_have_options_of_their_own(monkeypatch):
    plain, _ = default_step()(fresh(), BATCHES)
    jit = mock.Mock(wraps=jax.jit)
    monkeypatch.setattr(jax, "jit", jit)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    step = make_train_step(MODEL, OPTIMIZER, seed=3, schedule=lambda step: 0.5 / (1 + step))
    state, _ = step(fresh(), BATCHES)
    options = [call.kwargs.get("compiler_options") for call in jit.call_args_list]
    assert {"xla_gpu_dot_merger_threshold_mb": 0} in options
    assert_close(state.params, plain.params, atol=0)


def test_training_learns_and_reports():
    step, state = default_step(), fresh()
    history = []
    for _ in range(50):
        state, metrics = step(state, BATCHES)
        history.append({name: float(value) for name, value in metrics.items()})
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert int(state.step) == 50
    assert history[3]["learning_rate"] == pytest.approx(0.125)
    first = history[0]
    assert set(first) == {
        "loss", "tokens", "nll", "accuracy", "mean_rank", "mrr", "grad_norm", "param_norm",
        "skipped", "skipped_in_a_row", "skipped_total", "learning_rate",
        "routing/entropy", "routing/mutual_information", "routing/logit_offset",
        "routing/logit_spread",
        "routing/query/expert_0_share", "routing/query/expert_1_share",
        "routing/passage/expert_0_share", "routing/passage/expert_1_share",
    }  # fmt: skip
    assert first["skipped"] == first["skipped_total"] == 0
    assert first["param_norm"] == pytest.approx(float(optax.global_norm(fresh().params)), rel=1e-5)
    shares = [first[f"routing/query/expert_{expert}_share"] for expert in (0, 1)]
    assert sum(shares) == pytest.approx(1.0)
    assert 1 / 32 <= first["mrr"] <= 1 <= first["mean_rank"] <= 32
    # Skipped steps are no steps of the schedule.
    state = dataclasses.replace(state, skipped=SkippedSteps(jnp.int32(0), jnp.int32(40)))
    assert float(step(state, BATCHES)[1]["learning_rate"]) == pytest.approx(0.5 / 11)


def test_a_step_depends_on_seed_and_step_alone():
    def losses(step, start):
        state = dataclasses.replace(fresh(), step=jnp.int32(start))
        return float(step(state, BATCHES)[1]["loss"])

    step = default_step()
    assert losses(step, 5) == losses(step, 5)
    assert losses(step, 5) != losses(step, 6)
    other_seed, _ = jax.jit(make_loss(MODEL, seed=4))(fresh().params, BATCH, step=jnp.int32(5))
    assert losses(step, 5) != float(other_seed)


def test_steps_of_one_shape_compile_once_whatever_the_tasks_name():
    step = make_train_step(PLAIN, OPTIMIZER)
    for task in ("nq", "fever", "nq", "wow"):
        step(fresh(PLAIN), {task: BATCH})
    assert step.compilations == 1
    step(fresh(PLAIN), {"nq": tiny_batch(8)})
    assert step.compilations == 2
    # A model that encodes two tasks apart has a program for each of them.
    apart = make_train_step(TinyEncoder(dropout=0.0, query_tasks=("nq", "fever")), OPTIMIZER)
    for task in ("nq", "fever", "nq"):
        apart(fresh(), {task: BATCH})
    assert apart.compilations == 2


def test_a_step_takes_one_task_unless_its_tasks_are_given():
    with pytest.raises(ConfigError, match="one batch of one task"):
        default_step()(fresh(), {"nq": BATCH, "fever": BATCH})


def test_update_is_that_of_the_optimizer_on_the_gradient_of_the_loss():
    optimizer = optax.sgd(0.1)
    state = fresh(PLAIN, optimizer)

    def nll(params):
        def embed(tokens, role):
            return PLAIN.apply({"params": params}, tokens, role=role, method="encode").embeddings

        sides = embed(BATCH.queries, Role.QUERY), embed(BATCH.passages, Role.PASSAGE)
        positives = jnp.asarray(BATCH.positive_index)
        return contrastive_loss(*sides, positive_index=positives, temperature=0.5).loss

    gradient = jax.jit(jax.grad(nll))(state.params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient)
    step = make_train_step(PLAIN, optimizer, objective=ObjectiveConfig(temperature=0.5))
    after, metrics = step(state, BATCHES)
    assert_close(after.params, expected, rtol=1e-5, atol=1e-7)
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(gradient)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_regulariser_joins_the_loss_and_needs_a_router():
    objective = ObjectiveConfig(regularizer=RoutingRegularizer(weight=2.0))
    regularized = jax.jit(make_loss(MODEL, objective=objective))
    loss, metrics = regularized(fresh().params, BATCH, step=jnp.int32(0))
    assert float(metrics["regularization"]) < 0
    assert float(loss) == pytest.approx(float(metrics["nll"] + metrics["regularization"]))
    entropy = float(metrics["routing/entropy"])
    assert float(metrics["regularization"]) == pytest.approx(-2 * entropy, rel=1e-5)
    with pytest.raises(ConfigError, match="no learned routing"):
        make_loss(PLAIN, objective=objective)(fresh(PLAIN).params, BATCH, step=jnp.int32(0))


def test_a_state_is_born_sharded_with_its_moments():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), fresh(PLAIN).params)
    by_model = NamedSharding(mesh, PartitionSpec(None, "model"))
    shardings["wi"]["kernel"] = by_model
    # As a combiner's averages: a copy of the parameters for each of two tasks.
    averages = optax.GradientTransformation(
        lambda params: {"average": jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params)},
        lambda updates, state, params=None: (updates, state),
    )
    state = fresh(PLAIN, optax.chain(averages, OPTIMIZER), param_shardings=shardings)
    average, (adam, *_) = state.opt_state
    assert average["average"]["wi"]["kernel"].sharding.spec == PartitionSpec(None, None, "model")
    assert state.params["wi"]["kernel"].sharding == by_model
    assert adam.mu["wi"]["kernel"].sharding == by_model
    assert adam.nu["wi"]["kernel"].addressable_shards[0].data.shape == (8, 8)
    assert adam.count.sharding.is_fully_replicated
    assert state.step.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, state.params, fresh(PLAIN).params)


def test_table_by_hand():
    params = {"encoder": {"wi": np.zeros((768, 3072)), "bias": np.zeros(3)}}
    axes = {"encoder": {"wi": PartitionSpec("embed", "mlp"), "bias": PartitionSpec(None)}}
    specs = {"encoder": {"wi": PartitionSpec("fsdp", "model"), "bias": PartitionSpec()}}
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    lines = parameter_table(params, logical_axes=axes, shardings=shardings).splitlines()
    assert [line.split() for line in lines] == [
        ["parameter", "shape", "axes", "sharding", "count"],
        ["encoder/bias", "3", "-", "3"],
        ["encoder/wi", "768", "x", "3072", "embed,", "mlp", "fsdp,", "model", "2,359,296"],
        ["total", "2,359,299"],
    ]
    assert len({len(line) for line in lines}) == 1
