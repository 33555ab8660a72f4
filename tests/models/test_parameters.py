"""Parameters by number and name, and configurations as JSON, there and back, field by field."""

import functools
import json

import pytest
from tiny_models import tiny_bert, tiny_model, tiny_t5, tiny_t5_model

from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.batch import Normalization, Role
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.bert_layers import AttentionKernel
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.fusion import BertFusionConfig, FusedStates, T5FusionConfig
from taser_jax.models.parameters import (
    abstract_params,
    config_to_json,
    logical_axes,
    parameter_count,
    read_config,
)
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.models.stack import Remat
from taser_jax.models.t5 import PositionBias, T5Config, T5Initialization
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError, TaserError

SMALL = {"embed_dim": 512, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8}
SMALL_1_1 = {"embed_dim": 512, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
GATED = ("gelu", "linear")
SEQUENCE = {"num_experts": 2, "routing": Routing.SEQUENCE}
ONE_GATE = {"num_experts": 4, "routing": Routing.TOKEN, "gate_sharing": GateSharing.SHARED}
COUNTS = {
    "DPR": (DualEncoderConfig(towers=Towers.SEPARATE), 217_783_296),
    "Seq-R": (DualEncoderConfig(experts=ExpertConfig(**SEQUENCE)), 127_787_520 + 4 * 1_538),
    "one gate": (DualEncoderConfig(experts=ExpertConfig(**ONE_GATE)), 165_579_264 + 3_076),
    "t5-base": (T5DualEncoderConfig(), 222_903_552),
    "its encoder": (T5DualEncoderConfig(embedding=T5Embedding.ENCODER_MEAN), 109_628_544),
    "t5-small": (T5DualEncoderConfig(T5Config(mlp_dim=2048, **SMALL)), 60_506_624),
    # 76,961,152 with its language-model head, which is another table of 32,128 rows.
    "t5-v1_1-small": (
        T5DualEncoderConfig(T5Config(mlp_dim=1024, mlp_activations=GATED, **SMALL_1_1)),
        76_961_152 - 32_128 * 512,
    ),
}


@pytest.mark.parametrize(("config", "expected"), COUNTS.values(), ids=COUNTS)
def test_parameter_counts_of_published_models(config, expected):
    assert parameter_count(abstract_params(DualEncoder(config))) == expected


EMBED_HEADS, HEADS_EMBED = ("embed", "heads", "kv"), ("heads", "kv", "embed")
BERT_PARAMETERS = {
    "embeddings/token/embedding": ((50, 16), ("vocab", "embed")),
    "embeddings/position/embedding": ((12, 16), ("length", "embed")),
    "layers_0/attention/query/kernel": ((16, 2, 8), EMBED_HEADS),
    "layers_0/attention/out/kernel": ((2, 8, 16), HEADS_EMBED),
    "layers_0/mlp/wi/kernel": ((16, 24), ("embed", "mlp")),
    "layers_1/experts/wo/kernel": ((2, 24, 16), ("expert", "mlp", "embed")),
    "layers_1/experts/layer_norm/scale": ((2, 16), ("expert", "embed")),
    "layers_1/router/kernel": ((16, 2), ("embed", "expert")),
}
# The names are T5X's.
T5_PARAMETERS = {
    "token_embedder/embedding": ((50, 16), ("vocab", "embed")),
    "encoder/relpos_bias/rel_embedding": ((2, 8), ("heads", None)),
    "encoder/layers_1/attention/query/kernel": ((16, 2, 6), EMBED_HEADS),
    "encoder/layers_1/attention/out/kernel": ((2, 6, 16), HEADS_EMBED),
    "encoder/layers_1/pre_attention_layer_norm/scale": ((16,), ("embed",)),
    "encoder/layers_1/mlp/wi_1/kernel": ((16, 24), ("embed", "mlp")),
    "encoder/layers_1/mlp/wo/kernel": ((24, 16), ("mlp", "embed")),
    "decoder/layers_0/self_attention/value/kernel": ((16, 2, 6), EMBED_HEADS),
    "decoder/layers_0/encoder_decoder_attention/key/kernel": ((16, 2, 6), EMBED_HEADS),
    "decoder/layers_0/pre_cross_attention_layer_norm/scale": ((16,), ("embed",)),
    "decoder/decoder_norm/scale": ((16,), ("embed",)),
    "projection_layer/kernel": ((16, 10), ("embed", None)),
}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tiny_model(experts=SEQUENCE), BERT_PARAMETERS),
        (tiny_t5_model(t5=tiny_t5(mlp_activations=GATED), projection_dim=10), T5_PARAMETERS),
    ],
    ids=["bert", "t5"],
)
def test_parameter_paths_shapes_and_axes(model, expected):
    shapes, axes = (leaves_by_path(of(model)["encoder"]) for of in (abstract_params, logical_axes))
    for path, (shape, names) in expected.items():
        assert (shapes[path].shape, tuple(axes[path])) == (shape, names)
    assert shapes.keys() == axes.keys()


PER_LAYER = PositionBias.PER_LAYER
GATED_BLOCKS = {"mlp_activations": GATED, "remat": Remat.BLOCK, "position_bias": PER_LAYER}
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
        t5=tiny_t5(initialization=T5Initialization.RESCALED, **GATED_BLOCKS),
        towers=Towers.SEPARATE,
        query_tasks=("nq", "fever"),
        embedding=T5Embedding.ENCODER_MEAN,
        projection_dim=12,
        normalization=Normalization.L2,
    ),
    T5FusionConfig(projection_dim=8),
    BertFusionConfig(decoder_layers=3, documents=FusedStates.EMBEDDINGS),
]


@pytest.mark.parametrize(
    ("task", "words"), [(None, "a query without a task"), ("tqa", "a query of task 'tqa'")]
)
def test_a_query_without_a_tower_is_refused_with_the_flags_and_the_tasks(task, words):
    config = DualEncoderConfig(towers=Towers.SEPARATE, query_tasks=("nq", "fever"))
    message = rf"{words}\n.*--gin\.ask\.task or export_model\.task, one of nq, fever"
    with pytest.raises(ConfigError, match=message):
        config.tower_name(Role.QUERY, task)


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


def test_files_of_berts_have_constants_that_fingerprints_include():
    value = json.loads(config_to_json(CONFIGS[2]))
    assert list(value)[-2:] == ["tower_init", "normalization"]
    assert list(value["experts"])[2:4] == ["pattern", "blocks"]


V1 = {"format_version": 1}
CHOICES = "field 'experts.routing'.*'deterministic', 'sequence', 'token'"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], r"model\.json"),
        ({"format_version": 2}, "(?s)format version 2.*expected: format version 1"),
        (V1 | {"bert": {"layers": 3}}, "unknown fields: bert.layers"),
        (V1 | {"experts": {"routing": "hard"}}, CHOICES),
        (V1 | {"experts": {"pattern": "mod3"}}, r"unknown fields: experts\.pattern"),
        (V1 | {"kind": "gpt"}, r"(?s)kind is 'gpt'.*one of bert, t5"),
        (V1 | {"kind": ["a"]}, r"model\.json"),
        (V1 | {"kind": "t5", "bert": {"a": 1}}, "unknown fields: bert.a"),
    ],
)
def test_files_that_cannot_be_used(value, message, read):
    with pytest.raises(TaserError, match=message):
        read(json.dumps(value))


TWO_BLOCKS, TWO_EXPERTS = BertConfig(num_layers=2), ExpertConfig(num_experts=2)
NO_DECODER, ENCODER_MEAN = tiny_t5(num_decoder_layers=0), T5Embedding.ENCODER_MEAN
SEPARATE = functools.partial(DualEncoderConfig, towers=Towers.SEPARATE)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (tiny_bert, {"dtype": "float16"}, "float32 or bfloat16"),
        (tiny_bert, {"dropout_rate": 1.0}, r"dropout_rate is 1\.0"),
        (tiny_t5, {"num_buckets": 7}, "num_buckets is 7"),
        (tiny_t5, {"max_distance": 2}, "max_distance is 2"),
        *(
            (tiny_t5, {"mlp_activations": names}, "(?s)mlp_activations.*'gelu', 'linear'")
            for names in ((), ("silu", "linear"), ("gelu",), ("linear", "gelu"))
        ),
        (ExpertConfig, {"num_experts": 3}, "even number"),
        (DualEncoderConfig, {"query_tasks": ("nq",)}, "query_tasks with tied towers"),
        (functools.partial(DualEncoderConfig, TWO_BLOCKS), {"experts": TWO_EXPERTS}, r"\(1 to 2\)"),
        (SEPARATE, {"experts": TWO_EXPERTS}, "in separate towers, experts"),
        (SEPARATE, {"query_tasks": ("nq", "nq")}, "distinct task names"),
        (SEPARATE, {"query_tasks": ("nq/dev",)}, "without a slash"),
        (T5DualEncoderConfig, {"t5": NO_DECODER}, "(?s)layers is 0.*ENCODER_MEAN"),
        (T5FusionConfig, {"embedding": ENCODER_MEAN}, "decoder attends to the documents"),
    ],
)
def test_configurations_that_cannot_be(make, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)
