import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import bert_fusion

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.optim.optimizers import (
    OptimizerConfig,
    Update,
    build_optimizer,
    build_schedule,
    learning_rate_factors,
    trainable,
)
from taser_jax.storage.errors import ConfigError


def random_params(seed=0):
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "encoder": {
            "embeddings": {"embedding": leaf(5, 3), "layer_norm": {"scale": leaf(3)}},
            "layers_0": {"mlp": {"wi": {"kernel": leaf(3, 4), "bias": leaf(4)}}},
            "layers_1": {"experts": {"wi": {"kernel": leaf(2, 3, 4), "bias": leaf(2, 4)}}},
        }
    }


def flat(tree):
    return {path: np.asarray(leaf, np.float64) for path, leaf in leaves_by_path(tree).items()}


def oracle(params, gradients, config, rates, factors):
    """AdamW after clipping, in float64, parameter by parameter."""
    params = {name: value.copy() for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in params.items()}
    v = {name: np.zeros_like(value) for name, value in params.items()}
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        scale = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        for name in params:
            g = gradient[name] * scale
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            m_hat = m[name] / (1 - 0.9**t)
            v_hat = v[name] / (1 - 0.999**t)
            decay = 0.0 if name.endswith(("bias", "scale")) else config.weight_decay
            update = m_hat / (np.sqrt(v_hat) + 1e-8) + decay * params[name]
            params[name] = params[name] - rate * factors[name] * update
    return params


@pytest.mark.parametrize("clip_norm", [2.0, None])
def test_chain_equals_adamw_in_float64_over_several_steps(clip_norm):
    rate = {"learning_rate": 0.05, "warmup_steps": 2, "expert_learning_rate_factor": 3.0}
    config = OptimizerConfig(clip_norm=clip_norm, weight_decay=0.1, layer_decay=0.8, **rate)
    params = random_params()
    # Some gradients are above the clipping norm of 2 and some below.
    gradients = [
        jax.tree.map(lambda p, s=s: p * s, random_params(10 + i))
        for i, s in enumerate([5.0, 0.01, 1.0, 0.05, 0.3, 2.0])
    ]
    optimizer = build_optimizer(config, params, total_steps=6)
    state, trained = optimizer.init(params), params
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, trained)
        trained = optax.apply_updates(trained, updates)
    # Two layers: 0.8^4 for embeddings, 0.8^3 and 0.8^2 for the layers; experts three times that.
    factors = {name: 0.8**4 for name in flat(params)}
    factors |= {name: 0.8**3 for name in factors if "layers_0" in name}
    factors |= {name: 3 * 0.8**2 for name in factors if "layers_1" in name}
    rates = [float(build_schedule(config, 6)(step)) for step in range(6)]
    expected = oracle(flat(params), [flat(g) for g in gradients], config, rates, factors)
    for name, value in flat(trained).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert not np.allclose(value, flat(params)[name], atol=1e-3)


FREEZE_EMBEDDINGS = (
    (r"encoder/embeddings/.*", Update.FREEZE),
    (r"encoder/layers_.*", Update.TRAIN),
)


def test_frozen_parameters_keep_their_bits_and_have_no_moments():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.1, updates=FREEZE_EMBEDDINGS)
    params = random_params()
    optimizer = build_optimizer(config, params, total_steps=10)
    state = optimizer.init(params)
    sizes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert (5, 3) not in sizes
    assert sizes.count((3, 4)) == 2
    gradients, huge = random_params(1), random_params(1)
    huge["encoder"]["embeddings"]["embedding"] = jnp.full((5, 3), 1e6)
    updates = [optimizer.update(gradient, state, params)[0] for gradient in (gradients, huge)]
    results = [optax.apply_updates(params, each) for each in updates]
    # A frozen gradient does not count in the clipping norm either.
    jax.tree.map(np.testing.assert_array_equal, *results)
    frozen = results[0]["encoder"]["embeddings"]
    jax.tree.map(np.testing.assert_array_equal, frozen, params["encoder"]["embeddings"])
    mask = trainable(config, params)["encoder"]
    assert mask["embeddings"] == {"embedding": False, "layer_norm": {"scale": False}}
    assert mask["layers_0"]["mlp"]["wi"] == {"kernel": True, "bias": True}


def test_a_table_must_cover_every_parameter_and_train_something():
    params = random_params()
    partial = OptimizerConfig(updates=FREEZE_EMBEDDINGS[:1])
    with pytest.raises(ConfigError, match="encoder/layers_0/mlp/wi/bias matches 0 rules"):
        build_optimizer(partial, params, total_steps=1)
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        build_optimizer(OptimizerConfig(updates=((".*", Update.FREEZE),)), params, total_steps=1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2, "floor": 0.1}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0.1, 0.1]),
        # A floor of 1 keeps the rate; without a warm-up the first step has the peak rate.
        ({"warmup_steps": 2, "floor": 1.0}, [0, 0.5, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 0}, [1, 5 / 6, 4 / 6]),
    ],
)
def test_linear_by_hand(settings, expected):
    schedule = build_schedule(OptimizerConfig(learning_rate=1.0, **settings), 6)
    np.testing.assert_allclose([schedule(i) for i in range(len(expected))], expected, rtol=1e-6)


@pytest.mark.parametrize("wrong", [{"clip_norm": 0.0}, {"warmup_steps": 5}, {"layer_decay": 1.5}])
def test_impossible_numbers(wrong):
    with pytest.raises(ConfigError):
        build_optimizer(OptimizerConfig(**wrong), random_params(), total_steps=4)


def factors(params, *, decay):
    return leaves_by_path(learning_rate_factors(OptimizerConfig(layer_decay=decay), params))


def test_towers_decay_apart_and_a_router_has_the_depth_of_its_place():
    leaf = np.ones(1)
    tower = {"embeddings": leaf, "router": leaf}
    tower |= {f"layers_{i}": {"router": leaf, "wi": leaf} for i in range(3)}
    factor_of = factors({"query_encoder": tower, "passage_encoder": tower}, decay=0.5)
    for name in ("query_encoder", "passage_encoder"):
        assert factor_of[f"{name}/embeddings"] == 0.5**5
        assert [factor_of[f"{name}/layers_{i}/wi"] for i in range(3)] == [0.5**4, 0.5**3, 0.5**2]
        assert factor_of[f"{name}/layers_0/router"] == 0.5**4
        # Shared by all blocks: two thirds of three layers.
        assert factor_of[f"{name}/router"] == 0.5**3


def test_layer_decay_of_bert_base_is_what_tasers_code_logs():
    experts = ExpertConfig(num_experts=2, routing=Routing.SEQUENCE, gate_sharing=GateSharing.SHARED)
    model = DualEncoder(DualEncoderConfig(experts=experts))
    factor_of = factors(abstract_params(model), decay=0.8)
    logged = {"embeddings/token/embedding": 0.044, "layers_0/mlp/wi/kernel": 0.055}
    logged |= {"layers_11/experts/wi/kernel": 0.64, "router/kernel": 0.262}
    of_those = {path: factor_of[f"encoder/{path}"] for path in logged}
    assert of_those == pytest.approx(logged, abs=5e-4)
    assert max(factor_of.values()) < 1


def test_a_decoder_of_documents_lies_above_bert():
    factor_of = factors(abstract_params(bert_fusion(decoder_layers=2)), decay=0.5)
    assert factor_of["encoder/embeddings/token/embedding"] == 0.5**3
    assert factor_of["encoder/layers_0/mlp/wi/kernel"] == 0.5**2
    fusion = [factor for path, factor in factor_of.items() if path.startswith("encoder/fusion")]
    assert len(fusion) > 2
    assert set(fusion) == {1.0}


def test_parameters_without_a_depth_are_refused():
    t5 = {"token_embedder": {"embedding": np.ones(1)}, "encoder": {"layers_0": np.ones(1)}}
    for params in ({"wi": np.ones(1)}, t5):
        with pytest.raises(ConfigError, match="no parameter lies in a layer of BERT"):
            factors(params, decay=0.8)
