"""What files hold of models: configurations as JSON, there and back, field by field."""

import functools
import json

import pytest
from tiny_models import tiny_bert, tiny_t5

from taser_jax.models.batch import Normalization
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.fusion import BertFusionConfig, FusedStates, T5FusionConfig
from taser_jax.models.parameters import config_to_json, read_config
from taser_jax.models.routing import ExpertConfig, Routing
from taser_jax.models.stack import Remat
from taser_jax.models.t5 import PositionBias, T5Initialization
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError, TaserError

CONFIGS = [
    DualEncoderConfig(),
    DualEncoderConfig(towers=Towers.SEPARATE, pooling=Pooling.MEAN),
    DualEncoderConfig(
        bert=BertConfig(dtype="bfloat16", remat=Remat.BLOCK, attention=AttentionKernel.CUDNN),
        experts=ExpertConfig(num_experts=3, routing=Routing.TOKEN, blocks=(2, 12)),
    ),
    DualEncoderConfig(experts=ExpertConfig(num_experts=2, blocks=(6, 9, 12))),
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
    T5FusionConfig(projection_dim=8),
    BertFusionConfig(decoder_layers=3, documents=FusedStates.EMBEDDINGS),
]


@pytest.fixture
def read(tmp_path):
    """Text of a model's file -> its configuration."""

    def read_text(text):
        (tmp_path / "model.json").write_text(text)
        return read_config(tmp_path / "model.json")

    return read_text


@pytest.mark.parametrize("config", CONFIGS)
def test_round_trip(config, read):
    assert read(config_to_json(config)) == config


def test_a_berts_file_has_no_kind_and_no_tasks(read):
    """Embeddings carry a fingerprint of this text: it may not change for models that are there."""
    assert not {"kind", "query_tasks"} & json.loads(config_to_json(DualEncoderConfig())).keys()
    assert read('{"format_version": 1, "kind": "bert"}') == DualEncoderConfig()


def test_files_of_berts_have_constants_that_fingerprints_include(read):
    value = json.loads(config_to_json(CONFIGS[2]))
    assert list(value)[-2:] == ["tower_init", "normalization"]
    assert list(value["experts"])[2:4] == ["pattern", "blocks"]
    value["experts"]["pattern"] = "mod3"
    with pytest.raises(TaserError, match=r"unknown fields: experts\.pattern"):
        read(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"model\.json"),
        ('{"format_version": 2}', "(?s)format version 2.*expected: format version 1"),
        ('{"format_version": 1, "bert": {"layers": 3}}', "unknown fields: bert.layers"),
        (
            '{"format_version": 1, "experts": {"routing": "hard"}}',
            "field 'experts.routing'.*'deterministic', 'sequence', 'token'",
        ),
        ('{"format_version": 1, "kind": "gpt"}', r"(?s)kind is 'gpt'.*one of bert, t5"),
        ('{"format_version": 1, "kind": "t5", "bert": {}}', "unknown fields: bert"),
    ],
)
def test_files_that_cannot_be_used(text, message, read):
    with pytest.raises(TaserError, match=message):
        read(text)


TWO_EXPERTS = ExpertConfig(num_experts=2)
SEPARATE = functools.partial(DualEncoderConfig, towers=Towers.SEPARATE)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (tiny_bert, {"dtype": "float16"}, "float32 or bfloat16"),
        (tiny_bert, {"dropout_rate": 1.0}, r"dropout_rate is 1\.0"),
        (tiny_t5, {"num_buckets": 7}, "num_buckets is 7"),
        (tiny_t5, {"max_distance": 2}, "max_distance is 2"),
        (tiny_t5, {"mlp_activations": ("silu", "linear")}, "(?s)mlp_activations.*'gelu', 'linear'"),
        (ExpertConfig, {"num_experts": 3}, "even number"),
        (DualEncoderConfig, {"query_tasks": ("nq",)}, "query_tasks with tied towers"),
        (
            *(DualEncoderConfig, {"bert": BertConfig(num_layers=2), "experts": TWO_EXPERTS}),
            r"set blocks \(1 to 2\)",
        ),
        (SEPARATE, {"experts": TWO_EXPERTS}, "in separate towers, experts"),
        (SEPARATE, {"query_tasks": ("nq", "nq")}, "distinct task names"),
        (SEPARATE, {"query_tasks": ("nq/dev",)}, "without a slash"),
        (
            *(T5DualEncoderConfig, {"t5": tiny_t5(num_decoder_layers=0)}),
            "(?s)num_decoder_layers is 0.*ENCODER_MEAN",
        ),
        (
            *(T5FusionConfig, {"embedding": T5Embedding.ENCODER_MEAN}),
            "the decoder attends to the documents",
        ),
    ],
)
def test_configurations_that_cannot_be(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)
