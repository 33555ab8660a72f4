import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_bert import encode, quick_jit, random_params, tiny_bert, tiny_model, tiny_tokens

from taser_jax.batch import Role, Tokens
from taser_jax.errors import ConfigError
from taser_jax.models.dual_encoder import init_params
from taser_jax.models.routing import (
    ExpertConfig,
    GateGradient,
    GateSharing,
    Routing,
    routing_statistics,
    straight_through_gates,
)

NO_DROPOUT = tiny_bert(dropout_rate=0.0, attention_dropout_rate=0.0)
LEARNED = [Routing.SEQUENCE, Routing.TOKEN]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (3, 6, 9, 12)),
        ({"shared_per_specialized": 3}, (4, 8, 12)),
        ({"pattern": "mod2"}, (2, 4, 6, 8, 10, 12)),
        ({"pattern": "mod3"}, (3, 6, 9, 12)),
        ({"pattern": "mod4"}, (4, 8, 12)),
        ({"pattern": "mod6"}, (6, 12)),
        ({"pattern": "mod12"}, (12,)),
        ({"pattern": "ge6mod3"}, (6, 9, 12)),
        ({"pattern": "le7mod3"}, (1, 4, 7)),
        ({"blocks": (12, 1)}, (1, 12)),
        ({"num_experts": 1}, ()),
    ],
)
def test_specialized_blocks(config, expected):
    assert ExpertConfig(**{"num_experts": 2, **config}).specialized_blocks(12) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": 3}, "even number"),
        ({"num_experts": 0}, "1 or more"),
        ({"num_experts": 2, "temperature": 0.0}, "above 0"),
        ({"num_experts": 2, "pattern": "mod5"}, "ge6mod3"),
        ({"num_experts": 2, "pattern": "mod2", "blocks": (1,)}, "drop one"),
        ({"num_experts": 2, "shared_per_specialized": -1}, "0 "),
    ],
)
def test_configurations_that_cannot_be(config, message):
    with pytest.raises(ConfigError, match=message):
        ExpertConfig(**config)


@pytest.mark.parametrize("config", [{"blocks": (13,)}, {"blocks": (0,)}, {"blocks": ()}])
def test_blocks_that_do_not_exist(config):
    with pytest.raises(ConfigError, match=r"all within 1\.\.12"):
        ExpertConfig(num_experts=2, **config).specialized_blocks(12)


@pytest.mark.parametrize("gradient", GateGradient)
def test_gates_are_one_hot_with_the_softmax_gradient(gradient):
    logits = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(4, 3, 5)).astype(np.float32)
    temperature = 0.7

    def gates(x):
        return straight_through_gates(x, noise_key=None, temperature=temperature, gradient=gradient)

    chosen = np.eye(5)[logits.argmax(-1)]
    np.testing.assert_array_equal(gates(jnp.asarray(logits)), chosen)

    # d(w·y)/dlogits = y ∘ (w − w·y) / τ in float64; entries not chosen lose their w.
    z = logits.astype(np.float64) / temperature
    soft = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    kept = weight * chosen if gradient is GateGradient.CHOSEN_EXPERT else weight
    expected = soft * (kept - (kept * soft).sum(-1, keepdims=True)) / temperature
    found = jax.grad(lambda x: (gates(x) * weight).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_noise_draws_experts_by_their_probability():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.7, 0.2, 0.1])), (20_000, 1, 3))
    gates = straight_through_gates(
        logits,
        noise_key=jax.random.key(0),
        temperature=1.0,
        gradient=GateGradient.CHOSEN_EXPERT,
    )
    np.testing.assert_allclose(gates.mean((0, 1)), [0.7, 0.2, 0.1], atol=0.015)


def test_statistics_by_hand():
    # P = (½, ½), (¾, ¼) and a padding token that would prefer the second expert.
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.75, 0.25], [0.01, 0.99]]]))
    statistics = routing_statistics(logits, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(statistics.probability_sum, [1.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(statistics.entropy_sum, 0.693147 + 0.562335, rtol=1e-5)
    np.testing.assert_array_equal(statistics.choice_count, [2, 0])
    assert statistics.count == 2


@pytest.mark.parametrize("routing", LEARNED)
def test_statistics_add_over_chunks_and_ignore_padding(routing):
    model = tiny_model(experts={"num_experts": 2, "routing": routing})
    params, tokens = random_params(model), tiny_tokens(batch=6)
    whole = encode(model, params, tokens, Role.QUERY).routing
    parts = [
        encode(model, params, Tokens(tokens.ids[s], tokens.mask[s]), Role.QUERY).routing
        for s in (slice(0, 3), slice(3, 6))
    ]
    padded = Tokens(np.pad(tokens.ids, ((0, 2), (0, 3))), np.pad(tokens.mask, ((0, 2), (0, 3))))
    with_padding = encode(model, params, padded, Role.QUERY).routing
    expected_count = 6 if routing is Routing.SEQUENCE else tokens.mask.sum()
    np.testing.assert_array_equal(whole.count, [expected_count, expected_count])
    for other in (parts[0] + parts[1], with_padding):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, other)


def retrieval_loss(model, params, rngs):
    queries, passages = tiny_tokens(seed=3), tiny_tokens(seed=4)
    q, p = model.apply({"params": params}, queries, passages, train=True, rngs=rngs)
    return -jnp.diag(jax.nn.log_softmax(0.1 * q.embeddings @ p.embeddings.T)).mean()


@pytest.mark.parametrize(
    ("routing", "sharing"),
    [
        (Routing.SEQUENCE, GateSharing.PER_BLOCK),
        (Routing.TOKEN, GateSharing.PER_BLOCK),
        (Routing.TOKEN, GateSharing.SHARED),
    ],
)
def test_retrieval_loss_reaches_the_routers(routing, sharing):
    experts = {"num_experts": 2, "routing": routing, "gate_sharing": sharing}
    model = tiny_model(bert=NO_DROPOUT, experts=experts)
    # From the real initialisation, where all experts are equal.
    params = init_params(model, jax.random.key(0))
    rngs = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}
    gradient = quick_jit(jax.grad(lambda p: retrieval_loss(model, p, rngs)))(params)["encoder"]
    if sharing is GateSharing.SHARED:
        routers = [gradient["router"]]
    else:
        routers = [gradient["layers_1"]["router"], gradient["layers_2"]["router"]]
    for router in routers:
        assert float(jnp.abs(router["kernel"]).max()) > 1e-6
        assert float(jnp.abs(router["bias"]).max()) > 1e-6


def test_full_straight_through_needs_experts_that_differ():
    experts = {
        "num_experts": 2,
        "routing": Routing.SEQUENCE,
        "gate_gradient": GateGradient.ALL_EXPERTS,
    }
    model = tiny_model(bert=NO_DROPOUT, experts=experts)
    rngs = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}

    gradients = quick_jit(jax.grad(lambda p: retrieval_loss(model, p, rngs)))

    def router_gradient(params):
        gradient = gradients(params)
        return float(jnp.abs(gradient["encoder"]["layers_1"]["router"]["kernel"]).max())

    assert router_gradient(init_params(model, jax.random.key(0))) < 1e-7
    assert router_gradient(random_params(model)) > 1e-5


def test_drawn_experts_depend_on_the_routing_key_alone():
    model = tiny_model(bert=NO_DROPOUT, experts={"num_experts": 2, "routing": Routing.TOKEN})
    params, tokens = random_params(model), tiny_tokens()

    def embeddings(dropout, routing):
        rngs = {"dropout": jax.random.key(dropout), "routing": jax.random.key(routing)}
        return encode(model, params, tokens, Role.QUERY, train=True, rngs=rngs).embeddings

    np.testing.assert_array_equal(embeddings(0, 0), embeddings(1, 0))
    assert np.abs(np.asarray(embeddings(0, 0) - embeddings(0, 1))).max() > 1e-3
