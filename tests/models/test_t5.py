import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import assert_close, encode, one_block, random_params, tiny_t5_model, tiny_tokens

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner, leaves_by_path
from taser_jax.models.batch import Role
from taser_jax.models.parameters import abstract_params, logical_axes
from taser_jax.models.t5 import T5Initialization
from taser_jax.models.t5_layers import relative_position_bucket

KINDS = {"t5": {}, "1.1": {"mlp_activations": ("gelu", "linear")}}


TOKENS = tiny_tokens()


def embeddings(model, params, tokens=TOKENS, **kwargs):
    return np.asarray(encode(model, params, tokens, Role.QUERY, **kwargs).embeddings)


def test_buckets_by_hand():
    distance = np.array([0, -1, -7, -8, -16, -128, -(10**6), 1, 8, 128])
    buckets = relative_position_bucket(distance, num_buckets=32, max_distance=128)
    assert buckets.tolist() == [0, 1, 7, 8, 10, 15, 15, 17, 24, 31]


@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_initialisation_gives_the_same_outputs(kind):
    standard, rescaled = (
        tiny_t5_model(t5=one_block(initialization=i, rms_norm_epsilon=1e-12, **KINDS[kind]))
        for i in T5Initialization
    )
    params = random_params(standard)
    assert standard.config.initial_params(params) == params
    scaled = rescaled.config.initial_params(params)
    outputs = embeddings(rescaled, scaled), embeddings(standard, params)
    np.testing.assert_allclose(*outputs, atol=1e-4)

    def ratio(a, b):
        return round(float(jnp.abs(a).sum() / jnp.abs(b).sum()), 3)

    ratios = leaves_by_path(jax.tree.map(ratio, params, scaled))
    divided = {"token_embedder/embedding": 100, "out/kernel": 100, "wo/kernel": 10}
    divided["wi/kernel" if kind == "t5" else "wi_1/kernel"] = 10
    for path, ratio in ratios.items():
        assert ratio == divided.get("/".join(path.split("/")[-2:]), 1), path


def test_dropout_acts_in_training_only_and_differs_by_key():
    model = tiny_t5_model(t5=one_block(dropout_rate=0.5))
    params = random_params(model)
    plain, first, other = (
        embeddings(model, params, train=train, rngs={"dropout": jax.random.key(i)})
        for i, train in ((1, False), (1, True), (2, True))
    )
    assert np.abs(first - plain).max() > 0.1
    assert np.abs(first - other).max() > 0.1


def test_sharded_equals_unsharded():
    model = tiny_t5_model(t5=one_block(dropout_rate=0.0))
    params = random_params(model)
    queries, passages = tiny_tokens(batch=8, seed=3), tiny_tokens(batch=8, seed=4)

    @jax.jit
    def step(params, queries, passages):
        def loss(params):
            q, p = model.apply({"params": params}, queries, passages)
            return -jnp.diag(jax.nn.log_softmax(0.1 * q.embeddings @ p.embeddings.T)).mean()

        return jax.value_and_grad(loss)(params)

    partitioner = Partitioner(make_mesh(MeshConfig(data=2, fsdp=2, model=2)))
    shardings = partitioner.param_shardings(logical_axes(model), abstract_params(model))
    placed = jax.device_put(params, shardings)
    sharded = step(placed, partitioner.put_batch(queries), partitioner.put_batch(passages))
    kernel = placed["encoder"]["decoder"]["layers_0"]["mlp"]["wi"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    assert_close(sharded, step(params, queries, passages), atol=3e-5)
