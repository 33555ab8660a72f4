import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import encode, one_block, random_params, tiny_t5, tiny_t5_model, tiny_tokens

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.parameters import abstract_params, logical_axes
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError


def leaf(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def test_parameters_have_t5x_names_and_logical_axes():
    model = tiny_t5_model(projection_dim=10)
    shapes, axes = abstract_params(model), logical_axes(model)
    embed_heads, embed_mlp = ("embed", "heads", "kv"), ("embed", "mlp")
    expected = {
        "token_embedder/embedding": ((50, 16), ("vocab", "embed")),
        "encoder/relpos_bias/rel_embedding": ((2, 8), ("heads", None)),
        "encoder/layers_1/attention/query/kernel": ((16, 2, 6), embed_heads),
        "encoder/layers_1/attention/out/kernel": ((2, 6, 16), ("heads", "kv", "embed")),
        "encoder/layers_1/pre_attention_layer_norm/scale": ((16,), ("embed",)),
        "encoder/layers_1/pre_mlp_layer_norm/scale": ((16,), ("embed",)),
        "encoder/layers_1/mlp/wi/kernel": ((16, 24), embed_mlp),
        "encoder/layers_1/mlp/wo/kernel": ((24, 16), ("mlp", "embed")),
        "encoder/encoder_norm/scale": ((16,), ("embed",)),
        "decoder/relpos_bias/rel_embedding": ((2, 8), ("heads", None)),
        "decoder/layers_0/self_attention/value/kernel": ((16, 2, 6), embed_heads),
        "decoder/layers_0/encoder_decoder_attention/key/kernel": ((16, 2, 6), embed_heads),
        "decoder/layers_0/pre_self_attention_layer_norm/scale": ((16,), ("embed",)),
        "decoder/layers_0/pre_cross_attention_layer_norm/scale": ((16,), ("embed",)),
        "decoder/layers_0/pre_mlp_layer_norm/scale": ((16,), ("embed",)),
        "decoder/decoder_norm/scale": ((16,), ("embed",)),
        "projection_layer/kernel": ((16, 10), ("embed", None)),
    }
    for path, (shape, names) in expected.items():
        assert leaf(shapes["encoder"], path).shape == shape
        assert tuple(leaf(axes["encoder"], path)) == names
    gated = abstract_params(tiny_t5_model(t5=tiny_t5(mlp_activations=("gelu", "linear"))))
    assert gated["encoder"]["decoder"]["layers_0"]["mlp"].keys() == {"wi_0", "wi_1", "wo"}
    mean = abstract_params(tiny_t5_model(embedding=T5Embedding.ENCODER_MEAN))
    assert mean["encoder"].keys() == {"token_embedder", "encoder"}


def test_projection_and_norm_by_hand():
    plain = tiny_t5_model(embedding=T5Embedding.ENCODER_MEAN)
    model = tiny_t5_model(
        embedding=T5Embedding.ENCODER_MEAN, projection_dim=3, normalization=Normalization.L2
    )
    params = random_params(model)
    without = {"encoder": {n: p for n, p in params["encoder"].items() if n != "projection_layer"}}
    mean = np.asarray(encode(plain, without, tiny_tokens(), Role.QUERY).embeddings)
    projected = mean @ np.asarray(params["encoder"]["projection_layer"]["kernel"])
    expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    found = encode(model, params, tiny_tokens(), Role.QUERY).embeddings
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_sharded_equals_unsharded():
    mesh = MeshConfig(data=2, fsdp=2, model=2)
    model = tiny_t5_model(t5=one_block())
    params = random_params(model)
    queries, passages = tiny_tokens(batch=8, seed=3), tiny_tokens(batch=8, seed=4)
    rngs = {"dropout": jax.random.key(1)}

    @jax.jit
    def step(params, queries, passages):
        def loss(params):
            q, p = model.apply({"params": params}, queries, passages, train=True, rngs=rngs)
            return -jnp.diag(jax.nn.log_softmax(0.1 * q.embeddings @ p.embeddings.T)).mean()

        return jax.value_and_grad(loss)(params)

    expected = step(params, queries, passages)
    partitioner = Partitioner(make_mesh(mesh))
    shardings = partitioner.param_shardings(logical_axes(model), abstract_params(model))
    placed = jax.device_put(params, shardings)
    found = step(placed, partitioner.put_batch(queries), partitioner.put_batch(passages))
    kernel = placed["encoder"]["decoder"]["layers_0"]["mlp"]["wi"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), found, expected
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"projection_dim": 0}, "projection_dim is 0"),
        ({"t5": tiny_t5(num_decoder_layers=0)}, "(?s)num_decoder_layers is 0.*ENCODER_MEAN"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        T5DualEncoderConfig(**changes)
