"""Pretrained BERTs as towers and experts of dual encoders, and plain encoders out of them again."""

import dataclasses

import jax
import numpy as np
import pytest
from bert_checkpoints import random_tensors, write_checkpoint, write_config
from tiny_models import encode, random_params, tiny_tokens

from taser_jax.interop.bert import encoder_from_tensors, plain_encoder
from taser_jax.interop.bert_formats import bert_config
from taser_jax.interop.pretrained import (
    Pretrained,
    from_plain_encoders,
    pretrained_bert,
    read_pretrained,
)
from taser_jax.interop.t5x import write_t5x
from taser_jax.models.batch import Role, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.layers import Activation
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.models.stack import Remat
from taser_jax.storage.errors import ConfigError, DataError

SYSTEMS = {
    "shared": {},
    "taser": {"experts": ExpertConfig(num_experts=2)},
    "taser of 4": {"experts": ExpertConfig(num_experts=4, blocks=(1, 4))},
    "dpr": {"towers": Towers.SEPARATE},
    "a query tower a task": {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")},
}


def loaded(source, config, **weights):
    params = random_params(DualEncoder(config))
    return read_pretrained(Pretrained(str(source), **weights), config=config, params=params)


def embed(config, params, role, task=None):
    texts = tiny_tokens(length=12)
    tokens = Tokens(texts.ids % config.bert.vocab_size, texts.mask)
    return encode(DualEncoder(config), params, tokens, role, task).embeddings


def same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))[0]


@pytest.fixture(scope="module")
def shared(checkpoint):
    # The mean over tokens, so that every hidden state counts.
    return DualEncoderConfig(bert=bert_config(checkpoint), pooling=Pooling.MEAN)


@pytest.fixture(scope="module")
def plain(shared):
    return encoder_from_tensors(random_tensors(), shared.bert, where="x")


def test_sizes_come_from_the_checkpoint(checkpoint):
    numerics = {"dropout_rate": 0.0, "attention_dropout_rate": 0.3, "dtype": "bfloat16"}
    numerics |= {"remat": Remat.BLOCK, "attention": AttentionKernel.CUDNN}
    config = pretrained_bert(str(checkpoint), numerics=BertConfig(embed_dim=8, **numerics))
    sizes = {"vocab_size": 40, "embed_dim": 16, "num_layers": 4, "num_heads": 2, "head_dim": 8}
    assert config == BertConfig(mlp_dim=24, max_length=12, **sizes, **numerics)
    with pytest.raises(ConfigError, match="5 layers of a checkpoint of 4"):
        pretrained_bert(checkpoint, num_layers=5)


def test_a_model_that_t5x_trained_is_read_and_its_sizes_are_to_be_given(shared, tmp_path):
    trained = jax.tree.map(lambda leaf: leaf + 1, random_params(DualEncoder(shared)))
    write_t5x(tmp_path, trained, step=3)
    same(loaded(tmp_path, shared), trained)
    with pytest.raises(ConfigError, match=r"(?s)a T5X checkpoint.*bert = @BertConfig\(\)"):
        pretrained_bert(str(tmp_path))


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_starts_with_exactly_the_plain_embeddings(checkpoint, shared, plain, system):
    config = dataclasses.replace(shared, **SYSTEMS[system])
    params = loaded(checkpoint, config)
    task = "fever" if config.query_tasks else None
    for role in Role:
        expected = embed(shared, {"encoder": plain}, role)
        np.testing.assert_array_equal(embed(config, params, role, task), expected)


def test_learned_routing_starts_with_plain_embeddings_and_drawn_routers(checkpoint, shared, plain):
    routing = {"routing": Routing.TOKEN, "gate_sharing": GateSharing.SHARED}
    experts = ExpertConfig(num_experts=3, blocks=(2, 3), **routing)
    config = dataclasses.replace(shared, experts=experts)
    params = loaded(checkpoint, config)
    expected = embed(shared, {"encoder": plain}, Role.QUERY)
    np.testing.assert_allclose(embed(config, params, Role.QUERY), expected, rtol=1e-4, atol=1e-5)
    same(params["encoder"]["router"], random_params(DualEncoder(config))["encoder"]["router"])


def test_the_first_layers_alone(checkpoint, plain):
    config = DualEncoderConfig(bert=pretrained_bert(checkpoint, num_layers=2))
    params = loaded(checkpoint, config, num_layers=2)["encoder"]
    same(params["layers_1"], plain["layers_1"])


@pytest.mark.parametrize("system", list(SYSTEMS)[1:])
def test_a_path_taken_out_gives_the_same_embeddings_and_returns(shared, system):
    config = dataclasses.replace(shared, **SYSTEMS[system])
    model, task = DualEncoder(config), "fever" if config.query_tasks else None
    params = random_params(model)
    query, passage = (plain_encoder(params, config, role, task=task) for role in Role)
    embeddings = {}
    for role, path in ((Role.QUERY, query), (Role.PASSAGE, passage)):
        embeddings[role] = embed(shared, {"encoder": path}, role)
        np.testing.assert_array_equal(embeddings[role], embed(config, params, role, task))
    assert not np.allclose(*embeddings.values())
    again = from_plain_encoders(query, passage, config=config, params=random_params(model, 5))
    for role, path in ((Role.QUERY, query), (Role.PASSAGE, passage)):
        for name in config.query_tasks or (None,):
            same(plain_encoder(again, config, role, task=name), path)
    if system == "taser of 4":
        copies = [each["layers_0"]["mlp"] for each in (query, query, passage, passage)]
        experts = again["encoder"]["layers_0"]["experts"]
        same(experts, jax.tree.map(lambda *leaves: np.stack(leaves), *copies))


def test_two_checkpoints_one_a_role(checkpoint, shared, plain, tmp_path):
    other, tensors = write_checkpoint(tmp_path, tensors=random_tensors(5))
    separate = dataclasses.replace(shared, towers=Towers.SEPARATE)
    params = loaded(checkpoint, separate, passage_source=str(other))
    passage = encoder_from_tensors(tensors, shared.bert, where="x")
    same(params, {"query_encoder": plain, "passage_encoder": passage})
    same(loaded(checkpoint, shared, passage_source=str(checkpoint)), {"encoder": plain})
    message = r"(?s)passage_source.*embeddings/.* is not the passage encoder's.*towers='separate'"
    with pytest.raises(ConfigError, match=message):
        loaded(checkpoint, shared, passage_source=str(other))


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({"embed_dim": 32, "head_dim": 16}, "embed_dim 16, head_dim 8", "embed_dim 32, head_dim"),
        ({"activation": Activation.RELU}, "activation gelu", "activation relu"),
    ],
)
def test_a_mismatch_says_both_numbers(checkpoint, shared, changes, stored, expected):
    config = dataclasses.replace(shared, bert=dataclasses.replace(shared.bert, **changes))
    message = f"(?s)the checkpoint has {stored}.*the model {expected}.*fix: .*pretrained_bert"
    # Told from config.json alone: neither weights nor drawn parameters are looked at.
    with pytest.raises(ConfigError, match=message):
        read_pretrained(Pretrained(str(checkpoint)), config=config, params=None)


def test_sizes_that_would_fill_the_memory_are_refused_before_a_model_is_made(tmp_path):
    directory, _ = write_checkpoint(tmp_path)
    write_config(directory, vocab_size=10**12)
    with pytest.raises(DataError, match=r"config.json: sizes of [\d,]+ numbers or more, and weig"):
        pretrained_bert(directory)
