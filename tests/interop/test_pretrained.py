import dataclasses

import jax
import numpy as np
import pytest
from bert_checkpoints import random_tensors, write_checkpoint, write_config
from tiny_models import encode, random_params, tiny_tokens

from taser_jax.interop.bert import encoder_from_tensors
from taser_jax.interop.bert_formats import bert_config
from taser_jax.interop.pretrained import load_pretrained, pretrained_bert
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.layers import Activation
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.stack import Remat
from taser_jax.storage.errors import ConfigError, DataError

EXPERTS = ExpertConfig(num_experts=2)


def loaded(source, config, **kwargs):
    params = random_params(DualEncoder(config))
    return load_pretrained(source, config=config, params=params, **kwargs)


def embed(config, params, role):
    texts = tiny_tokens(length=12)
    tokens = Tokens(texts.ids % config.bert.vocab_size, texts.mask)
    return encode(DualEncoder(config), params, tokens, role).embeddings


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))[0]


@pytest.fixture(scope="module")
def plain(checkpoint):
    return encoder_from_tensors(random_tensors(), bert_config(checkpoint), where="x")


def test_sizes_come_from_the_checkpoint(checkpoint):
    numerics = {"dropout_rate": 0.0, "attention_dropout_rate": 0.3, "dtype": "bfloat16"}
    numerics |= {"remat": Remat.BLOCK, "attention": AttentionKernel.CUDNN}
    config = pretrained_bert(str(checkpoint), numerics=BertConfig(embed_dim=8, **numerics))
    sizes = {"vocab_size": 40, "embed_dim": 16, "num_layers": 4, "num_heads": 2, "head_dim": 8}
    assert config == BertConfig(mlp_dim=24, max_length=12, **sizes, **numerics)
    assert pretrained_bert(checkpoint, num_layers=3).num_layers == 3


def test_shared_taser_and_dpr_start_with_exactly_the_plain_embeddings(checkpoint, plain):
    shared = DualEncoderConfig(bert=bert_config(checkpoint))
    expected = embed(shared, {"encoder": plain}, Role.QUERY)
    for changes in (
        {},
        {"experts": EXPERTS},
        {"experts": ExpertConfig(num_experts=4, blocks=(1, 4))},
        {"towers": Towers.SEPARATE},
    ):
        config = dataclasses.replace(shared, **changes)
        params = loaded(checkpoint, config)
        for role in Role:
            np.testing.assert_array_equal(embed(config, params, role), expected)


def test_learned_routing_starts_with_the_plain_embeddings(checkpoint, plain):
    shared = DualEncoderConfig(bert=bert_config(checkpoint))
    expected = embed(shared, {"encoder": plain}, Role.QUERY)
    config = dataclasses.replace(shared, experts=ExpertConfig(num_experts=3, routing=Routing.TOKEN))
    params = loaded(checkpoint, config)
    np.testing.assert_allclose(embed(config, params, Role.QUERY), expected, rtol=1e-4, atol=1e-5)


def test_the_first_layers_alone(checkpoint, plain):
    config = DualEncoderConfig(bert=pretrained_bert(checkpoint, num_layers=2))
    params = loaded(checkpoint, config, num_layers=2)["encoder"]
    jax.tree.map(np.testing.assert_array_equal, params["layers_1"], plain["layers_1"])


def test_two_checkpoints_one_a_role(checkpoint, plain, tmp_path):
    other, _ = write_checkpoint(tmp_path, tensors=random_tensors(5))
    config = DualEncoderConfig(bert=bert_config(checkpoint), towers=Towers.SEPARATE)
    params = loaded(checkpoint, config, passage_source=other)
    jax.tree.map(np.testing.assert_array_equal, params["query_encoder"], plain)
    expected = encoder_from_tensors(random_tensors(5), config.bert, where="x")
    jax.tree.map(np.testing.assert_array_equal, params["passage_encoder"], expected)
    tied = dataclasses.replace(config, towers=Towers.TIED)
    with pytest.raises(ConfigError, match="is not the passage encoder's"):
        loaded(checkpoint, tied, passage_source=other)


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({"vocab_size": 44}, "vocab_size 40", "vocab_size 44"),
        ({"embed_dim": 32, "head_dim": 16}, "embed_dim 16, head_dim 8", "embed_dim 32, head_dim"),
        ({"activation": Activation.RELU}, "activation gelu", "activation relu"),
    ],
)
def test_a_mismatch_says_both_numbers(checkpoint, changes, stored, expected):
    bert = dataclasses.replace(bert_config(checkpoint), **changes)
    config = DualEncoderConfig(bert=bert)
    message = f"(?s)the checkpoint has {stored}.*the model {expected}.*fix: .*pretrained_bert"
    # Told from config.json alone: neither weights nor drawn parameters are looked at.
    with pytest.raises(ConfigError, match=message):
        load_pretrained(checkpoint, config=config, params=None)


def test_blocks_that_are_not_there(checkpoint):
    with pytest.raises(ConfigError, match="5 layers of a checkpoint of 4"):
        pretrained_bert(checkpoint, num_layers=5)


@pytest.mark.parametrize("size", ["num_hidden_layers", "vocab_size"])
def test_sizes_that_would_fill_the_memory_are_refused_before_a_model_is_made(tmp_path, size):
    directory, _ = write_checkpoint(tmp_path)
    write_config(directory, **{size: 10**12})
    with pytest.raises(DataError, match=r"config.json: sizes of [\d,]+ numbers or more, and weig"):
        pretrained_bert(directory)
