"""Eight devices, parameters split over four of them, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_bert import random_params, tiny_bert, tiny_model, tiny_tokens

from taser_jax.models.parameters import logical_axes
from taser_jax.models.routing import Routing

RULES = {
    "mlp": {"mlp": "model", "embed": "model"},
    "expert": {"expert": "model"},
}


def shardings(mesh, axes, rules):
    def place(spec):
        names, used = [], set()
        for name in spec:
            axis = rules.get(name)
            names.append(None if axis in used else axis)
            used.add(axis)
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree.map(place, axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routing", "rules"),
    [
        pytest.param(Routing.DETERMINISTIC, "mlp", marks=pytest.mark.release),
        (Routing.TOKEN, "expert"),
    ],
)
def test_sharded_equals_unsharded(routing, rules):
    bert = tiny_bert(num_layers=1, dropout_rate=0.1, attention_dropout_rate=0.1)
    model = tiny_model(bert=bert, experts={"num_experts": 4, "routing": routing, "blocks": (1,)})
    params = random_params(model)
    queries, passages = tiny_tokens(batch=4, seed=3), tiny_tokens(batch=4, seed=4)
    rngs = {"dropout": jax.random.key(1), "routing": jax.random.key(2)}

    @jax.jit
    def step(params, queries, passages):
        def loss(params):
            q, p = model.apply({"params": params}, queries, passages, train=True, rngs=rngs)
            scores = 0.1 * q.embeddings @ p.embeddings.T
            value = -jnp.diag(jax.nn.log_softmax(scores)).mean()
            if q.routing is not None:
                value += q.routing.entropy_sum.sum() / q.routing.count.sum()
            return value

        return jax.value_and_grad(loss)(params)

    expected = step(params, queries, passages)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put(params, shardings(mesh, logical_axes(model), RULES[rules]))
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    found = step(placed, *(jax.device_put(t, by_batch) for t in (queries, passages)))
    kernel = placed["encoder"]["layers_0"]["experts"]["wi"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), found, expected
    )
