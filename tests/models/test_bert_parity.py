"""The encoder against a float64 NumPy oracle written without batches, masks or heads."""

import itertools

import bert_oracle
import jax
import numpy as np
import pytest
from tiny_models import NUM_HEADS, encode, random_params, tiny_model, tiny_tokens

from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.routing import GateSharing, RouterInput, Routing, SequenceSummary

ROLES = {Role.QUERY: 0, Role.PASSAGE: 1}


def oracle(params, tokens, **kwargs):
    return bert_oracle.encode(params, tokens.ids, tokens.mask, num_heads=NUM_HEADS, **kwargs)


POOL = {
    Pooling.CLS: lambda hidden: hidden[0],
    Pooling.MEAN: lambda hidden: hidden.mean(0),
    Pooling.LAST: lambda hidden: hidden[-1],
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("num_experts", "pooling"), [*((2, pooling) for pooling in Pooling), (4, Pooling.CLS)]
)
def test_inference_runs_the_first_expert_of_the_roles_group(role, num_experts, pooling):
    model = tiny_model(experts={"num_experts": num_experts}, pooling=pooling)
    params, tokens = random_params(model), tiny_tokens()
    hidden = oracle(params["encoder"], tokens, choose=ROLES[role] * num_experts // 2)
    expected = [POOL[pooling](h) for h in hidden]
    embeddings = encode(model, params, tokens, role).embeddings
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(embeddings, np.stack(expected), atol=1e-5, rtol=0)


OPTIONS = ("routing", "gate_sharing", "router_input", "sequence_summary")
LEARNED = [*itertools.product([Routing.SEQUENCE, Routing.TOKEN], GateSharing, RouterInput)]
# Every two of the three options meet in these four of the eight combinations.
BY_CLS = [((*LEARNED[place], SequenceSummary.CLS), Pooling.CLS) for place in (0, 3, 5, 6)]
# With [CLS] pooling the last block computes one row, and its router still reads all tokens.
BY_MEAN = [
    ((Routing.SEQUENCE, GateSharing.PER_BLOCK, router_input, SequenceSummary.MEAN), pooling)
    for router_input, pooling in itertools.product(RouterInput, (Pooling.CLS, Pooling.MEAN))
]


@pytest.mark.parametrize(("options", "pooling"), BY_CLS + BY_MEAN)
def test_learned_routing_takes_the_argmax_at_inference(options, pooling):
    experts = {"num_experts": 3, "blocks": (1, 2)} | dict(zip(OPTIONS, options, strict=True))
    model = tiny_model(experts=experts, pooling=pooling)
    params, tokens = random_params(model), tiny_tokens(batch=8)
    routing, _, router_input, summary = (option.value for option in options)
    of_router = {"choose": routing, "router_input": router_input}
    hidden = oracle(params["encoder"], tokens, summary=summary, **of_router)
    encoded = encode(model, params, tokens, Role.QUERY)
    expected = np.stack([POOL[pooling](h) for h in hidden])
    np.testing.assert_allclose(encoded.embeddings, expected, atol=1e-5, rtol=0)
    # The draw uses more than one expert, or the test would prove little.
    assert (np.asarray(encoded.routing.choice_count) > 0).sum() > len(encoded.routing.count)
    if summary == "mean":
        # [CLS] would have chosen otherwise.
        from_cls = [POOL[pooling](h) for h in oracle(params["encoder"], tokens, **of_router)]
        assert np.abs(from_cls - expected).max() > 1e-2


@pytest.mark.parametrize(("role", "group"), [(Role.QUERY, {0, 1}), (Role.PASSAGE, {2, 3})])
def test_training_with_four_experts_draws_within_the_roles_group(role, group):
    model = tiny_model(experts={"num_experts": 4, "blocks": (1, 2)})
    params, tokens = random_params(model), tiny_tokens(batch=10)
    by_expert = [[h[0] for h in oracle(params["encoder"], tokens, choose=e)] for e in range(4)]
    rngs = {"dropout": jax.random.key(0), "routing": jax.random.key(1)}
    embeddings = np.asarray(encode(model, params, tokens, role, train=True, rngs=rngs).embeddings)
    drawn = [
        next(e for e in range(4) if np.allclose(row, by_expert[e][i], atol=1e-5))
        for i, row in enumerate(embeddings)
    ]
    assert set(drawn) == group
