"""None"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf
from tiny_models import encode, random_params, tiny_model, tiny_tokens

from taser_jax.models.batch import Role, RoutingStatistics, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_config import Traits
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import FeedForward
from taser_jax.models.layers import Activation
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import (
    ExpertConfig,
    GateGradient,
    GateSharing,
    Routing,
    SequenceSummary,
    entropy,
    expert_shares,
    input_information,
    logit_offset,
    logit_spread,
    router_logits,
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": 3}, "even number"),
        ({"num_experts": 0}, "1 or more"),
        ({"num_experts": 2, "temperature": 0.0}, "above 0"),
        ({"num_experts": 2, "shared_per_specialized": -1}, "0 "),
    ],
)
def test_configurations_that_cannot_be(config, message):
    with pytest.raises(ConfigError, match=message):
        ExpertConfig(**config)


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
        gradient=GateGradient.ALL_EXPERTS,
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


def feed_forward64(parameters, hidden, gates):
    """LN(h + Σ_e gate_e·FFN_e(h)) with gated scale and bias, in float64. [batch, length, embed]"""
    h = hidden[:, :, None]
    inner = np.einsum("blxd,edm->blem", h, parameters["wi"]) + parameters["bi"]
    inner = 0.5 * inner * (1 + erf(inner / np.sqrt(2)))
    outputs = np.einsum("blem,emd->bled", inner, parameters["wo"]) + parameters["bo"]
    total = hidden + np.einsum("ble,bled->bld", gates, outputs)
    centred = total - total.mean(-1, keepdims=True)
    normal = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-12)
    return normal * (gates @ parameters["scale"]) + gates @ parameters["norm_bias"]


@pytest.mark.parametrize("gradient", GateGradient)
def test_router_gradients_equal_float64_differences(gradient):
    """The straight-through estimator is the derivative of F(onehot + y(A, c) − y(A₀, c₀))."""
    rng, num_experts, embed, temperature = np.random.default_rng(0), 3, 4, 0.7
    key = jax.random.key(5)
    layer = FeedForward(
        mlp_dim=6,
        activation=Activation.GELU,
        dropout_rate=0.0,
        epsilon=1e-12,
        kernel_init=jax.nn.initializers.normal(0.5),
        deterministic=False,
        num_experts=num_experts,
        traits=Traits(),
    )
    hidden = rng.normal(size=(2, 5, embed))
    weight = rng.normal(size=hidden.shape)
    init = functools.partial(layer.init, expert=0)
    shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), jnp.asarray(hidden))["params"])
    drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    router = {"kernel": rng.normal(size=(embed, num_experts)), "bias": rng.normal(size=num_experts)}

    def loss(router):
        logits = router_logits(jnp.asarray(hidden), router["kernel"], router["bias"])
        gates = straight_through_gates(
            logits, noise_key=key, temperature=temperature, gradient=gradient
        )
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), drawn)
        return (layer.apply({"params": params}, jnp.asarray(hidden), gates=gates) * weight).sum()

    as_float32 = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), router)
    found = jax.jit(jax.grad(loss))(as_float32)

    noise = np.asarray(jax.random.gumbel(key, (2, 5, num_experts)), np.float64)

    def logits64(router):
        return hidden @ router["kernel"] + router["bias"] + noise

    def softmax64(router):
        exponents = np.exp(logits64(router) / temperature)
        return exponents / exponents.sum(-1, keepdims=True)

    chosen = np.eye(num_experts)[logits64(router).argmax(-1)]
    parameters = {
        "wi": drawn["wi"]["kernel"],
        "bi": drawn["wi"]["bias"],
        "wo": drawn["wo"]["kernel"],
        "bo": drawn["wo"]["bias"],
        "scale": drawn["layer_norm"]["scale"],
        "norm_bias": drawn["layer_norm"]["bias"],
    }

    def loss64(moved):
        gates = chosen + softmax64(moved) - softmax64(router)
        if gradient is GateGradient.CHOSEN_EXPERT:
            gates = gates * chosen
        return (feed_forward64(parameters, hidden, gates) * weight).sum()

    def difference(name, place, step=1e-6):
        values = []
        for sign in (1, -1):
            moved = {key: value.copy() for key, value in router.items()}
            moved[name][place] += sign * step
            values.append(loss64(moved))
        return (values[0] - values[1]) / (2 * step)

    for name, value in router.items():
        expected = [difference(name, place) for place in np.ndindex(value.shape)]
        np.testing.assert_allclose(found[name].reshape(-1), expected, rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def router_gradients():
    """Function of (routing, sharing, gradient, params) -> the routers' gradients.

    At this temperature no router's softmax is so near 0 or 1 that its gradient vanishes.
    """

    @functools.cache
    def compiled(experts):
        model = tiny_model(experts=dict(experts))
        rngs = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}
        return model, jax.jit(jax.value_and_grad(lambda p: retrieval_loss(model, p, rngs)))

    def of(params_of, **experts):
        model, value_and_grad = compiled(
            tuple({**TWO_ROUTERS, "temperature": 5.0, **experts}.items())
        )
        params = params_of(model)
        loss, gradient = value_and_grad(params)
        found = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
            if "router" in jax.tree_util.keystr(path)
        ]
        return float(loss), found

    return of


def initial(model, router_scale=1.0):
    """The real initialisation, where all experts are equal."""
    params = jax.jit(functools.partial(init_params, model))(jax.random.key(0))
    for layer in params["encoder"].values():
        if "router" in layer:
            layer["router"] = jax.tree.map(lambda leaf: leaf * router_scale, layer["router"])
    return params


@pytest.mark.parametrize(
    ("experts", "routers"),
    [
        ({"routing": Routing.SEQUENCE}, 2),
        ({"routing": Routing.TOKEN, "gate_sharing": GateSharing.SHARED}, 1),
    ],
)
def test_retrieval_loss_reaches_the_routers(router_gradients, experts, routers):
    _, gradients = router_gradients(random_params, **experts)
    assert len(gradients) == 2 * routers
    assert all(float(jnp.abs(leaf).max()) > 1e-6 for leaf in gradients)


def test_equal_experts_give_the_router_no_gradient(router_gradients):
    """As it must be: the loss does not depend on the router then."""
    loss, gradients = router_gradients(initial, routing=Routing.SEQUENCE)
    other_loss, _ = router_gradients(
        functools.partial(initial, router_scale=-50.0), routing=Routing.SEQUENCE
    )
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert norm(gradients) < 1e-6


@pytest.mark.slow
def test_the_chosen_expert_alone_gives_equal_experts_a_gradient(router_gradients):
    _, gradients = router_gradients(
        initial, routing=Routing.SEQUENCE, gate_gradient=GateGradient.CHOSEN_EXPERT
    )
    assert norm(gradients) > 1e-3


def norm(leaves):
    return float(jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in leaves)))


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


def sums_of(probabilities):
    """Statistics of P(expert | input), shape [blocks, inputs, experts]."""
    p = np.asarray(probabilities, np.float32)
    chosen = np.eye(p.shape[-1], dtype=np.float32)[p.argmax(-1)]
    entropies = -(p * np.log(np.where(p > 0, p, 1.0))).sum((1, 2))
    count = np.full(len(p), p.shape[1], np.float32)
    logits = np.zeros((len(p), p.shape[-1]), np.float32)
    sums = (p.sum(1), entropies, chosen.sum(1), count, logits, logits)
    return RoutingStatistics(*map(jnp.asarray, sums))


def choices(*blocks):
    """So many inputs of each block sent to each of two experts, with certainty."""
    return sums_of([[[1, 0]] * first + [[0, 1]] * second for first, second in blocks])


CERTAIN = [[[1.0, 0.0], [0.0, 1.0]]]
UNDECIDED = [[[0.5, 0.5], [0.5, 0.5]]]
COLLAPSED = [[[1.0, 0.0], [1.0, 0.0]]]


def test_entropy_by_hand():
    found = entropy(jnp.array([[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]]))
    np.testing.assert_allclose(found, [np.log(2), 0.0, 0.5623351], rtol=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "shares"),
    [
        (CERTAIN, [[0.5, 0.5]]),
        (COLLAPSED, [[1.0, 0.0]]),
        (CERTAIN + COLLAPSED, [[0.5, 0.5], [1.0, 0.0]]),
    ],
)
def test_shares_by_hand(probabilities, shares):
    np.testing.assert_allclose(expert_shares(sums_of(probabilities)), shares)


def test_shares_of_no_input_are_none():
    np.testing.assert_array_equal(expert_shares(sums_of(np.zeros((2, 0, 2)))), np.zeros((2, 2)))


def test_input_information_by_hand():
    # Roles that never meet: ln 2, however many passages there are for a query.
    found = input_information(sums_of([[[1.0, 0.0]]]), sums_of([[[0.0, 1.0], [0.0, 1.0]]]))
    assert found == pytest.approx(np.log(2), rel=1e-6)
    # A certain query and two undecided passages: H(3/4, 1/4) − ln 2 / 2.
    found = input_information(sums_of([[[1.0, 0.0]]]), sums_of(UNDECIDED))
    assert found == pytest.approx(0.5623351 - np.log(2) / 2, rel=1e-5)
    for alike in (UNDECIDED, COLLAPSED):
        assert input_information(sums_of(alike), sums_of(alike)) == pytest.approx(0.0, abs=1e-6)


def of_logits(logits):
    """Statistics of logits [blocks, inputs, experts]."""
    real = jnp.ones((1, np.shape(logits)[1]), bool)
    blocks = [routing_statistics(jnp.asarray([block], jnp.float32), real) for block in logits]
    return jax.tree.map(lambda *sums: jnp.stack(sums), *blocks)


def test_offset_and_spread_of_two_experts_by_hand():
    # Differences 1 and 3; −5 and −5.
    statistics = of_logits([[[1.0, 0.0], [3.0, 0.0]], [[0.0, 5.0], [2.0, 7.0]]])
    np.testing.assert_allclose(logit_offset(statistics), [2.0, 5.0], rtol=1e-6)
    np.testing.assert_allclose(logit_spread(statistics), [1.0, 0.0], atol=1e-6)


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
