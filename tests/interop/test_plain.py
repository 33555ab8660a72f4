import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import encode, random_params, tiny_bert, tiny_tokens

from taser_jax.interop.bert import from_plain_encoders, plain_encoder
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.storage.errors import ConfigError

BERT = tiny_bert(num_layers=3)
MODELS = {
    "shared": DualEncoderConfig(bert=BERT),
    "dpr": DualEncoderConfig(bert=BERT, towers=Towers.SEPARATE),
    "taser": DualEncoderConfig(bert=BERT, experts=ExpertConfig(num_experts=2)),
    "taser of 4": DualEncoderConfig(bert=BERT, experts=ExpertConfig(num_experts=4, blocks=(1, 3))),
}


def embed(config, params, role):
    return encode(DualEncoder(config), params, tiny_tokens(), role).embeddings


@pytest.mark.parametrize("name", ["dpr", "taser", "taser of 4"])
@pytest.mark.parametrize("role", Role)
def test_a_path_alone_gives_the_same_embeddings_bit_for_bit(name, role):
    # The mean over tokens, so that every hidden state counts.
    config = dataclasses.replace(MODELS[name], pooling=Pooling.MEAN)
    params = random_params(DualEncoder(config))
    plain = {"encoder": plain_encoder(params, config, role)}
    plain_config = DualEncoderConfig(bert=BERT, pooling=Pooling.MEAN)
    expected = embed(config, params, role)
    np.testing.assert_array_equal(embed(plain_config, plain, role), expected)
    other = Role.PASSAGE if role is Role.QUERY else Role.QUERY
    wrong = {"encoder": plain_encoder(params, config, other)}
    assert not np.allclose(embed(plain_config, wrong, role), expected)


def test_every_expert_of_a_group_is_a_copy_of_its_roles():
    config = MODELS["taser of 4"]
    params = random_params(DualEncoder(config))
    query, passage = (plain_encoder(params, config, role) for role in Role)
    imported = from_plain_encoders(query, passage, config=config, params=params)
    copies = [encoder["layers_0"]["mlp"] for encoder in (query, query, passage, passage)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *copies)
    experts = imported["encoder"]["layers_0"]["experts"]
    jax.tree.map(np.testing.assert_array_equal, experts, expected)


def test_learned_routers_are_kept_and_their_experts_equal():
    experts = ExpertConfig(
        num_experts=3, blocks=(2, 3), routing=Routing.SEQUENCE, gate_sharing=GateSharing.SHARED
    )
    config = DualEncoderConfig(bert=BERT, experts=experts)
    params = random_params(DualEncoder(config))
    plain = plain_encoder(
        random_params(DualEncoder(MODELS["shared"]), 3), MODELS["shared"], Role.QUERY
    )
    encoder = from_plain_encoders(plain, plain, config=config, params=params)["encoder"]
    routers = (tower["router"] for tower in (encoder, params["encoder"]))
    jax.tree.map(np.testing.assert_array_equal, *routers)
    np.testing.assert_array_equal(
        encoder["layers_1"]["experts"]["layer_norm"]["scale"],
        np.stack([plain["layers_1"]["mlp"]["layer_norm"]["scale"]] * 3),
    )


def test_every_query_tower_is_a_copy_and_is_taken_out_by_its_task():
    towers = {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever")}
    config = DualEncoderConfig(bert=BERT, **towers)
    query, passage = (
        plain_encoder(random_params(DualEncoder(MODELS["shared"]), seed), MODELS["shared"], role)
        for seed, role in enumerate(Role)
    )
    drawn = random_params(DualEncoder(config), 5)
    params = from_plain_encoders(query, passage, config=config, params=drawn)
    names = ("query_encoder_nq", "query_encoder_fever", "passage_encoder")
    for tower, expected in zip(names, (query, query, passage), strict=True):
        jax.tree.map(np.testing.assert_array_equal, params[tower], expected)
    params["query_encoder_nq"] = passage
    for task, expected in (("nq", passage), ("fever", query)):
        encoder = plain_encoder(params, config, Role.QUERY, task=task)
        jax.tree.map(np.testing.assert_array_equal, encoder, expected)
    with pytest.raises(ConfigError, match="without a task"):
        plain_encoder(params, config, Role.QUERY)


def test_paths_that_differ_where_the_encoder_is_tied():
    config = MODELS["taser"]
    params = random_params(DualEncoder(config))
    query, passage = (plain_encoder(params, config, role) for role in Role)
    passage = jax.tree.map(np.copy, passage)
    passage["layers_2"]["mlp"]["wo"]["bias"] += 1
    from_plain_encoders(query, passage, config=config, params=params)
    passage["layers_0"]["attention"]["query"]["bias"] += 1
    with pytest.raises(ConfigError, match="layers_0/attention/query/bias of the query encoder"):
        from_plain_encoders(query, passage, config=config, params=params)
