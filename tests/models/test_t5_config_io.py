import json

import pytest
from tiny_t5 import tiny_t5

from taser_jax.models import config_io
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import Normalization, Towers
from taser_jax.models.layers import Remat
from taser_jax.models.t5 import PositionBias, T5Initialization
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import TaserError

CONFIGS = [
    T5DualEncoderConfig(),
    T5DualEncoderConfig(
        t5=tiny_t5(
            mlp_activations=("gelu", "linear"),
            remat=Remat.BLOCK,
            initialization=T5Initialization.RESCALED,
            position_bias=PositionBias.PER_LAYER,
        ),
        towers=Towers.SEPARATE,
        query_tasks=("nq", "fever"),
        embedding=T5Embedding.ENCODER_MEAN,
        projection_dim=12,
        normalization=Normalization.L2,
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config, tmp_path):
    assert config_io.from_json(config_io.to_json(config)) == config
    config_io.save(config, tmp_path / "model.json")
    assert config_io.from_json((tmp_path / "model.json").read_text()) == config


def test_the_file_says_its_kind_and_a_berts_none():
    value = json.loads(config_io.to_json(CONFIGS[1]))
    assert value["kind"] == "t5"
    assert value["t5"]["mlp_activations"] == ["gelu", "linear"]
    assert value["query_tasks"] == ["nq", "fever"]
    assert "kind" not in json.loads(config_io.to_json(DualEncoderConfig()))
    assert config_io.from_json('{"format_version": 1, "kind": "bert"}') == DualEncoderConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"kind": "gpt"', r"(?s)kind is 'gpt'.*one of bert, t5"),
        ('"kind": "t5", "bert": {}', "unknown fields: bert"),
        ('"t5": {}', "unknown fields: t5"),
        ('"kind": "t5", "query_tasks": ["nq", 3]', r"query_tasks\[1\] is 3: expected a string"),
        ('"kind": "t5", "query_tasks": "nq"', "expected a list, got a string"),
        ('"kind": "t5", "t5": {"num_heads": 0}', "num_heads is 0"),
    ],
)
def test_files_that_cannot_be_used(fields, message):
    with pytest.raises(TaserError, match=message):
        config_io.from_json(f'{{"format_version": 1, {fields}}}')
