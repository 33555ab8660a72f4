"""Hugging Face's `config.json` and tensor names of each family of encoders."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import field

from taser_jax.interop.tensors import Kind, Layers, check_room, read_config
from taser_jax.models.bert_config import BertConfig, Family, RotaryConfig
from taser_jax.models.layers import Activation
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Positive, PositiveNumber, Share, typed

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swiglu": Activation.SILU,
}
# The first name of each is written.
_WRITTEN_ACTIVATIONS = {activation: name for name, activation in reversed(_ACTIVATIONS.items())}
_ANOTHER = "choose another checkpoint"
# As `Format.constants`, in every family.
_ENCODERS = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}


class _Bert(msgspec.Struct, kw_only=True):
    """Fields of `BertConfig` under the names of Hugging Face."""

    vocab_size: Positive
    embed_dim: Positive = field(name="hidden_size")
    num_layers: Layers = field(name="num_hidden_layers")
    num_heads: Positive = field(name="num_attention_heads")
    mlp_dim: Positive = field(name="intermediate_size")
    max_length: Positive = field(name="max_position_embeddings")
    type_vocab_size: Positive = 2
    activation: str = field(name="hidden_act", default="gelu")
    dropout_rate: Share = field(name="hidden_dropout_prob", default=0.1)
    attention_dropout_rate: Share = field(name="attention_probs_dropout_prob", default=0.1)
    layer_norm_epsilon: PositiveNumber = field(name="layer_norm_eps", default=1e-12)
    initializer_stddev: Share = field(name="initializer_range", default=0.02)


class _DistilBert(_Bert, kw_only=True):
    embed_dim: Positive = field(name="dim")
    num_layers: Layers = field(name="n_layers")
    num_heads: Positive = field(name="n_heads")
    mlp_dim: Positive = field(name="hidden_dim")
    activation: str = field(name="activation", default="gelu")
    dropout_rate: Share = field(name="dropout", default=0.1)
    attention_dropout_rate: Share = field(name="attention_dropout", default=0.1)


class _Rope(msgspec.Struct, frozen=True):
    rope_theta: PositiveNumber
    rope_type: str = "default"


class _ModernBert(_Bert, kw_only=True):
    """Newer files have the last two fields instead of thetas and the number of layers."""

    activation: str = field(name="hidden_activation", default="gelu")
    dropout_rate: Share = field(name="mlp_dropout", default=0.0)
    attention_dropout_rate: Share = field(name="attention_dropout", default=0.0)
    layer_norm_epsilon: PositiveNumber = field(name="norm_eps", default=1e-5)
    global_rope_theta: PositiveNumber = 160_000.0
    local_rope_theta: PositiveNumber = 10_000.0
    local_attention: Positive = 128
    global_attn_every_n_layers: Positive = 3
    rope_parameters: dict[str, _Rope] | None = None
    layer_types: list[str] | None = None


class _NomicBert(_Bert, kw_only=True):
    rope_parameters: _Rope = _Rope(1000.0)


class _NomicBertOfHub(_Bert, kw_only=True):
    """With the names of GPT-2, for the code in the model's own repository."""

    embed_dim: Positive = field(name="n_embd")
    num_layers: Layers = field(name="n_layer")
    num_heads: Positive = field(name="n_head")
    mlp_dim: Positive = field(name="n_inner")
    max_length: Positive = field(name="n_positions")
    activation: str = field(name="activation_function", default="swiglu")
    dropout_rate: Share = field(name="resid_pdrop", default=0.0)
    attention_dropout_rate: Share = field(name="attn_pdrop", default=0.0)
    layer_norm_epsilon: PositiveNumber = field(name="layer_norm_epsilon", default=1e-12)
    rotary_emb_base: PositiveNumber = 1000.0


@dataclasses.dataclass(frozen=True)
class Format:
    """How Hugging Face writes the encoders of one family.

    Attributes:
        architecture: name of the class of models.
        file: type of `config.json`.
        constants: fields of `config.json` that must have these values, where they are present.
        block: names of a block's tensors start with it and the block's number.
        names: our parameter in a block, or beside the blocks -> name of its module.
        fused: name of a module -> our kernels in a block that its weight joins, in this order.
        unused: fields of `config.json` that are written as null, whose defaults may be too large.
        has_pooler: whether the class adds an unused pooler unless told otherwise.
    """

    architecture: str
    file: type[_Bert]
    constants: Mapping[str, object]
    block: str
    names: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    has_pooler: bool = True


_EMBEDDINGS = {
    "embeddings/token": "embeddings.word_embeddings",
    "embeddings/position": "embeddings.position_embeddings",
    "embeddings/type": "embeddings.token_type_embeddings",
    "embeddings/layer_norm": "embeddings.LayerNorm",
}
_BERT_NAMES = {
    **_EMBEDDINGS,
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/out": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "mlp/wi": "intermediate.dense",
    "mlp/wo": "output.dense",
    "mlp/layer_norm": "output.LayerNorm",
}
_QKV = ("attention/query", "attention/key", "attention/value")
FORMATS = {
    Family.BERT: Format("BertModel", _Bert, {"pad_token_id": 0}, "encoder.layer.", _BERT_NAMES),
    Family.DISTILBERT: Format(
        "DistilBertModel",
        _DistilBert,
        {"pad_token_id": 0},
        "transformer.layer.",
        {
            **_EMBEDDINGS,
            "attention/query": "attention.q_lin",
            "attention/key": "attention.k_lin",
            "attention/value": "attention.v_lin",
            "attention/out": "attention.out_lin",
            "attention_layer_norm": "sa_layer_norm",
            "mlp/wi": "ffn.lin1",
            "mlp/wo": "ffn.lin2",
            "mlp/layer_norm": "output_layer_norm",
        },
        has_pooler=False,
    ),
    Family.ROBERTA: Format(
        "RobertaModel", _Bert, {"pad_token_id": 1}, "encoder.layer.", _BERT_NAMES
    ),
    Family.MPNET: Format(
        "MPNetModel",
        _Bert,
        {"pad_token_id": 1, "relative_attention_num_buckets": Family.MPNET.traits.relative_buckets},
        "encoder.layer.",
        {
            **_BERT_NAMES,
            "attention/query": "attention.attn.q",
            "attention/key": "attention.attn.k",
            "attention/value": "attention.attn.v",
            "attention/out": "attention.attn.o",
            "attention_layer_norm": "attention.LayerNorm",
            "relative_bias": "encoder.relative_attention_bias",
        },
    ),
    Family.MODERNBERT: Format(
        "ModernBertModel",
        _ModernBert,
        {"attention_bias": False, "mlp_bias": False, "norm_bias": False},
        "layers.",
        {
            "embeddings/token": "embeddings.tok_embeddings",
            "embeddings/layer_norm": "embeddings.norm",
            "attention/out": "attn.Wo",
            "attention_layer_norm": "attn_norm",
            "mlp/wo": "mlp.Wo",
            "mlp/layer_norm": "mlp_norm",
            "final_layer_norm": "final_norm",
        },
        {"attn.Wqkv": _QKV, "mlp.Wi": ("mlp/wi", "mlp/wi_gate")},
        tuple(f"{token}_token_id" for token in ("pad", "bos", "eos", "cls", "sep")),
        has_pooler=False,
    ),
    Family.NOMIC_BERT: Format(
        "NomicBertModel",
        _NomicBert,
        {
            "prenorm": False,
            "use_rms_norm": False,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_scaling_factor": None,
        },
        "encoder.layers.",
        {
            **_EMBEDDINGS,
            "embeddings/layer_norm": "emb_ln",
            "attention/out": "attn.out_proj",
            "attention_layer_norm": "norm1",
            "mlp/wi": "mlp.fc12",
            "mlp/wi_gate": "mlp.fc11",
            "mlp/wo": "mlp.fc2",
            "mlp/layer_norm": "norm2",
        },
        {"attn.Wqkv": _QKV},
        has_pooler=False,
    ),
}
_MODEL_TYPES = {family.value: family for family in Family} | {
    "xlm-roberta": Family.ROBERTA,
    "camembert": Family.ROBERTA,
}


def bert_config(directory: pathlib.Path) -> BertConfig:
    """Reads the sizes and numerics from a checkpoint's `config.json`.

    Args:
        directory: the checkpoint's directory.

    Raises:
        DataError: there is no config.json, it is not JSON, or a size is missing, invalid, or too
            large for the weights.
        ConfigError: another architecture, or an unsupported variant of one.
    """
    where, values, kind = read_config(directory)
    family = _family(kind, where)
    format = FORMATS[family]
    of_hub = family is Family.NOMIC_BERT and "n_embd" in values
    file: _Bert = typed(values, _NomicBertOfHub if of_hub else format.file, where=where)
    for name, constant in {**_ENCODERS, **format.constants}.items():
        if values.get(name, constant) not in (constant, None):
            problem = f"{name} is {values[name]!r}; only {constant!r} is implemented"
            raise ConfigError(problem, where=where, fix=_ANOTHER)
    fields: dict[str, Any] = {name: getattr(file, name) for name in _Bert.__struct_fields__}
    if file.activation not in _ACTIVATIONS:
        problem = f"hidden_act is {file.activation!r}, not one of {', '.join(_ACTIVATIONS)}"
        raise ConfigError(problem, where=where, fix=_ANOTHER)
    fields["max_length"] -= family.traits.first_position or 0
    fields |= {
        "family": family,
        "head_dim": fields["embed_dim"] // fields["num_heads"],
        "activation": _ACTIVATIONS[file.activation],
        "rotary": _rotary(file, where),
    }
    config = BertConfig(**fields)
    check_room(directory, config)
    return config


def _family(kind: Kind, where: str) -> Family:
    model_type = kind.model_type
    if model_type is None and all(name.startswith("Bert") for name in kind.architectures):
        model_type = Family.BERT.value
    if model_type not in _MODEL_TYPES:
        named = f" (architecture {', '.join(kind.architectures)})" if kind.architectures else ""
        problem = f"model_type is {kind.model_type!r}{named}"
        fix = f"give a checkpoint of {', '.join(_MODEL_TYPES)}, or of t5 to a T5"
        raise ConfigError(problem, where=where, fix=fix)
    return _MODEL_TYPES[model_type]


def _rotary(file: _Bert, where: str) -> RotaryConfig:
    if isinstance(file, _NomicBertOfHub):
        return RotaryConfig(theta=file.rotary_emb_base, global_every=1)
    if isinstance(file, _NomicBert):
        return RotaryConfig(theta=_theta(file.rope_parameters, where), global_every=1)
    if not isinstance(file, _ModernBert):
        return RotaryConfig()
    thetas = {"full_attention": file.global_rope_theta, "sliding_attention": file.local_rope_theta}
    ropes = file.rope_parameters or {}
    thetas |= {kind: _theta(rope, where) for kind, rope in ropes.items()}
    rotary = RotaryConfig(
        thetas["full_attention"],
        thetas["sliding_attention"],
        file.local_attention,
        file.global_attn_every_n_layers,
    )
    if file.layer_types is None:
        return rotary
    local = [kind == "sliding_attention" for kind in file.layer_types]
    for every in (rotary.global_every, *range(1, len(local) + 2)):
        rotary = dataclasses.replace(rotary, global_every=every)
        if local == [rotary.is_local(block) for block in range(1, len(local) + 1)]:
            return rotary
    problem = "layer_types is not one global block and then a fixed number of local ones, repeated"
    raise ConfigError(problem, where=where, fix=_ANOTHER)


def _theta(rope: _Rope, where: str) -> float:
    if rope.rope_type != "default":
        problem = f"rope_type is {rope.rope_type!r}; only 'default' is implemented"
        raise ConfigError(problem, where=where, fix=_ANOTHER)
    return rope.rope_theta


def config_to_json(config: BertConfig) -> dict[str, object]:
    """`config.json` of Hugging Face's model for a plain encoder.

    Raises:
        ConfigError: the heads together are not as wide as the hidden states, as those models
            require.
    """
    if config.num_heads * config.head_dim != config.embed_dim:
        raise ConfigError(
            f"{config.num_heads} heads of {config.head_dim} with embed_dim {config.embed_dim}: "
            "Hugging Face's BERT has heads x head_dim = embed_dim",
            where="BertConfig",
            fix="export as saved_model or stablehlo",
        )
    format, family, rotary = FORMATS[config.family], config.family, config.rotary
    fields = {name: getattr(config, name) for name in _Bert.__struct_fields__}
    fields["max_length"] += family.traits.first_position or 0
    fields["activation"] = _WRITTEN_ACTIVATIONS[config.activation]
    if family is Family.MODERNBERT:
        fields |= {
            "global_rope_theta": rotary.theta,
            "local_rope_theta": rotary.local_theta,
            "local_attention": rotary.local_window,
            "global_attn_every_n_layers": rotary.global_every,
        }
    if family is Family.NOMIC_BERT:
        if rotary.global_every != 1:
            problem = "a nomic_bert with blocks that attend to near tokens alone"
            fix = "set RotaryConfig.global_every=1, or export as saved_model or stablehlo"
            raise ConfigError(problem, where="RotaryConfig.global_every", fix=fix)
        fields["rope_parameters"] = _Rope(rotary.theta)
    written = msgspec.to_builtins(format.file(**fields))
    return {
        "architectures": [format.architecture],
        "model_type": family.value,
        **{name: value for name, value in written.items() if value is not None},
        **{name: value for name, value in format.constants.items() if value is not None},
        **dict.fromkeys(format.unused),
    }
