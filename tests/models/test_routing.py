import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bert_oracle import gelu, layer_norm
from tiny_models import assert_close, encode, random_params, tiny_model, tiny_tokens

from taser_jax.models.batch import Role
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import FeedForward
from taser_jax.models.routing import (
    ExpertConfig,
    GateGradient,
    Routing,
    SequenceSummary,
    expert_shares,
    logit_offset,
    logit_spread,
    routing_statistics,
    straight_through_gates,
)
from taser_jax.storage.errors import ConfigError

TWO_ROUTERS = {"num_experts": 2, "blocks": (1, 2)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (3, 6, 9, 12)),
        ({"shared_per_specialized": 3}, (4, 8, 12)),
        ({"shared_per_specialized": 0}, tuple(range(1, 13))),
        ({"shared_per_specialized": 11}, (12,)),
        ({"blocks": (12, 1)}, (1, 12)),
        ({"num_experts": 1}, ()),
    ],
)
def test_specialized_blocks(config, expected):
    assert ExpertConfig(**{"num_experts": 2, **config}).specialized_blocks(12) == expected


@pytest.mark.parametrize("config", [{"blocks": (13,)}, {"blocks": (0,)}, {"blocks": ()}])
def test_blocks_that_do_not_exist(config):
    with pytest.raises(ConfigError, match=r"set blocks \(1 to 12\)"):
        ExpertConfig(num_experts=2, **config).specialized_blocks(12)


@pytest.mark.parametrize("gradient", GateGradient)
def test_gates_are_one_hot_with_the_softmax_gradient(gradient):
    logits = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(4, 3, 5)).astype(np.float32)
    temperature = 0.7

    def gates(x):
        config = ExpertConfig(temperature=temperature, gate_gradient=gradient)
        return straight_through_gates(x, config, noise_key=None)

    chosen = np.eye(5)[logits.argmax(-1)]
    np.testing.assert_array_equal(gates(jnp.asarray(logits)), chosen)

    # d(w·y)/dlogits = y ∘ (w − w·y) / τ in float64; entries not chosen lose their w.
    z = logits.astype(np.float64) / temperature
    soft = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    upstream = weight * chosen if gradient is GateGradient.CHOSEN_EXPERT else weight
    expected = soft * (upstream - (upstream * soft).sum(-1, keepdims=True)) / temperature
    actual = jax.grad(lambda x: (gates(x) * weight).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_noise_draws_experts_by_their_probability():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.7, 0.2, 0.1])), (20_000, 1, 3))
    gates = straight_through_gates(logits, ExpertConfig(), noise_key=jax.random.key(0))
    np.testing.assert_allclose(gates.mean((0, 1)), [0.7, 0.2, 0.1], atol=0.015)


def test_statistics_by_hand():
    # P = (½, ½), (¾, ¼) and a padding token that would prefer the second expert.
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.75, 0.25], [0.01, 0.99]]]))
    statistics = routing_statistics(logits, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(statistics.probability_sum, [1.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(statistics.entropy_sum, 0.693147 + 0.562335, rtol=1e-5)
    np.testing.assert_array_equal(statistics.choice_count, [2, 0])
    assert statistics.count == 2
    blocks = jax.tree.map(lambda leaf: leaf[None], statistics)
    np.testing.assert_array_equal(expert_shares(blocks), [[1, 0]])
    np.testing.assert_array_equal(expert_shares(jax.tree.map(jnp.zeros_like, blocks)), [[0, 0]])
    # Centred logits: (0, 0) and ±ln(3)/2.
    np.testing.assert_allclose(statistics.logit_sum, [0.549306, -0.549306], rtol=1e-5)
    np.testing.assert_allclose(statistics.logit_square_sum, [0.301737, 0.301737], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "summary"),
    [
        (Routing.SEQUENCE, SequenceSummary.CLS),
        (Routing.SEQUENCE, SequenceSummary.MEAN),
        (Routing.TOKEN, SequenceSummary.CLS),
    ],
)
def test_statistics_add_over_chunks_and_ignore_padding(routing, summary):
    model = tiny_model(experts=TWO_ROUTERS | {"routing": routing, "sequence_summary": summary})
    params, tokens = random_params(model), tiny_tokens(batch=6)

    def statistics_of(change):
        return encode(model, params, jax.tree.map(change, tokens), Role.QUERY).routing

    whole = statistics_of(lambda leaf: leaf)
    in_parts = statistics_of(lambda leaf: leaf[:3]) + statistics_of(lambda leaf: leaf[3:])
    with_padding = statistics_of(lambda leaf: np.pad(leaf, ((0, 2), (0, 3))))
    expected_count = 6 if routing is Routing.SEQUENCE else tokens.mask.sum()
    np.testing.assert_array_equal(whole.count, [expected_count, expected_count])
    for other in (in_parts, with_padding):
        assert_close(other, whole, rtol=1e-5, atol=0)


def feed_forward64(p, hidden, gates):
    """LN(h + Σ_e gate_e·FFN_e(h)) with gated scale and bias, in float64. [batch, length, embed]"""
    inner = np.einsum("blxd,edm->blem", hidden[:, :, None], p["wi"]["kernel"]) + p["wi"]["bias"]
    outputs = np.einsum("blem,emd->bled", gelu(inner), p["wo"]["kernel"]) + p["wo"]["bias"]
    total = hidden + np.einsum("ble,bled->bld", gates, outputs)
    return layer_norm(total, {name: gates @ value for name, value in p["layer_norm"].items()})


def test_a_gated_feed_forward_and_its_gradient_equal_float64():
    """Of any gates: with the gradient of the gates, this is the router's."""
    rng, embed, num_experts = np.random.default_rng(0), 4, 3
    layer = FeedForward(
        BertConfig(mlp_dim=6, dropout_rate=0.0), deterministic=False, num_experts=num_experts
    )
    hidden, weight = rng.normal(size=(2, 2, 5, embed))
    gates, direction = rng.normal(size=(2, 2, 5, num_experts))
    init = functools.partial(layer.init, expert=0)
    shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), jnp.asarray(hidden))["params"])
    drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), drawn)

    def total(gates):
        output = layer.apply({"params": params}, jnp.asarray(hidden), gates=gates)
        return (output * weight).sum(), output

    gradient, output = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(gates))
    np.testing.assert_allclose(output, feed_forward64(drawn, hidden, gates), rtol=1e-4, atol=1e-4)
    moved = [feed_forward64(drawn, hidden, gates + step * direction) for step in (1e-6, -1e-6)]
    slope = ((moved[0] - moved[1]) * weight).sum() / 2e-6
    assert (gradient * direction).sum() == pytest.approx(slope, rel=2e-4)


def test_drawn_experts_depend_on_the_routing_key_alone():
    model = tiny_model(experts={"num_experts": 2, "routing": Routing.TOKEN})
    params, tokens = random_params(model), tiny_tokens()

    def embeddings(dropout, routing):
        rngs = {"dropout": jax.random.key(dropout), "routing": jax.random.key(routing)}
        return encode(model, params, tokens, Role.QUERY, train=True, rngs=rngs).embeddings

    np.testing.assert_array_equal(embeddings(0, 0), embeddings(1, 0))
    assert np.abs(np.asarray(embeddings(0, 0) - embeddings(0, 1))).max() > 1e-3


def test_models_that_differ_above_their_frozen_blocks_share_states():
    bert = BertConfig(num_layers=6)
    shared, taser = (
        DualEncoderConfig(bert=bert, experts=ExpertConfig(num_experts=experts), pooling=pooling)
        for experts, pooling in ((1, Pooling.CLS), (2, Pooling.MEAN))
    )
    assert taser.frozen_settings(2) == shared.frozen_settings(2)
    # Block 3 is TASER's first with experts.
    assert taser.frozen_settings(3) != shared.frozen_settings(3)
    assert taser.frozen_settings(2) != DualEncoderConfig(bert=BertConfig()).frozen_settings(2)


def of_logits(logits):
    """Statistics of logits [blocks, inputs, experts]."""
    real = jnp.ones((1, np.shape(logits)[1]), bool)
    blocks = [routing_statistics(jnp.asarray([block], jnp.float32), real) for block in logits]
    return jax.tree.map(lambda *sums: jnp.stack(sums), *blocks)


def test_offset_and_spread_are_those_of_all_pairs_of_experts():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 50, 4)) + 3 * rng.normal(size=(2, 1, 4))
    pairs = [(i, j) for i in range(4) for j in range(i)]
    differences = np.stack([logits[..., i] - logits[..., j] for i, j in pairs])
    statistics = of_logits(logits)
    offset = np.sqrt(np.mean(differences.mean(-1) ** 2, axis=0))
    spread = np.sqrt(np.mean(differences.var(-1), axis=0))
    np.testing.assert_allclose(logit_offset(statistics), offset, rtol=1e-5)
    np.testing.assert_allclose(logit_spread(statistics), spread, rtol=1e-5)
    # What every input's logits have in common changes the offset alone.
    moved = of_logits(logits + np.array([5.0, 0, 0, 0]))
    np.testing.assert_allclose(logit_spread(moved), spread, rtol=1e-4)
    assert (np.asarray(logit_offset(moved)) > offset).any()
