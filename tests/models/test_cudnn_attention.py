"""cuDNN's attention without a GPU: the program lowers for CUDA, and what it is asked is right."""

import functools
import re

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params

pytestmark = pytest.mark.slow

LENGTH = 8
LENGTHS = np.array([8, 3, 1, 0])
MASK = np.arange(LENGTH) < LENGTHS[:, None]
IDS = np.random.default_rng(0).integers(2, 20, MASK.shape).astype(np.int32) * MASK


def model(kernel, pooling, dtype, num_layers=2):
    bert = BertConfig(
        vocab_size=20,
        embed_dim=16,
        num_layers=num_layers,
        num_heads=2,
        head_dim=8,
        mlp_dim=16,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        dtype=dtype,
        attention=kernel,
    )
    return DualEncoder(DualEncoderConfig(bert=bert, pooling=pooling))


def total(params, model):
    tokens = Tokens(IDS, MASK)
    variables = {"params": params}
    encoded = model.apply(variables, tokens, role=Role.PASSAGE, method="encode")
    return encoded.embeddings.astype("float32")


@pytest.mark.parametrize(("pooling", "calls"), [(Pooling.MEAN, 1), (Pooling.CLS, 0)])
def test_a_training_step_lowers_for_cuda(monkeypatch, pooling, calls):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    ours = model(AttentionKernel.CUDNN, pooling, "bfloat16", num_layers=1)
    shapes = jax.eval_shape(functools.partial(init_params, ours), jax.random.key(0))
    step = jax.jit(jax.grad(lambda params: total(params, ours).sum()))
    text = step.trace(shapes).lower(lowering_platforms=("cuda",)).as_text()
    # [CLS] pooling's last block has one query, an odd number.
    assert len(re.findall(r"@__cudnn\$fmhaSoftmaxBackward\(", text)) == calls


@pytest.mark.parametrize("pooling", Pooling)
def test_it_is_asked_for_what_the_others_compute(monkeypatch, pooling):
    # A block that another test traced would call no attention here.
    jax.clear_caches()
    asked = []
    attention = jax.nn.dot_product_attention

    def record(*arrays, implementation, **options):
        asked.append(implementation)
        return attention(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    einsum = model(AttentionKernel.EINSUM, pooling, "float32")
    params = jax.jit(functools.partial(init_params, einsum))(jax.random.key(0))
    wanted = np.asarray(total(params, einsum))
    found = np.asarray(total(params, model(AttentionKernel.CUDNN, pooling, "float32")))
    assert "cudnn" in asked
    real = LENGTHS > 0
    np.testing.assert_allclose(found[real], wanted[real], atol=1e-5)
    assert np.isfinite(found).all()
