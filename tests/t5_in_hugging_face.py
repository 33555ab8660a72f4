"""A T5's parameters and sizes as Hugging Face has them: what its models load."""

from taser_jax.interop.leaves import params_to_tensors
from taser_jax.interop.t5 import t5_leaves
from taser_jax.models.t5 import PositionBias


def t5_to_tensors(params, config):
    """Tensors by Hugging Face's names."""
    return params_to_tensors(params, t5_leaves(config))


def t5_to_json(config):
    """`config.json` of T5Model, or T5EncoderModel where there is no decoder."""
    is_t5 = config.position_bias is PositionBias.SHARED
    model = "Model" if config.num_decoder_layers else "EncoderModel"
    return {
        "architectures": [f"{'T5' if is_t5 else 'UMT5'}{model}"],
        "model_type": "t5" if is_t5 else "umt5",
        "vocab_size": config.vocab_size,
        "d_model": config.embed_dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers or config.num_layers,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "feed_forward_proj": "relu" if config.mlp_activations == ("relu",) else "gated-gelu",
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.rms_norm_epsilon,
        "is_encoder_decoder": bool(config.num_decoder_layers),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
