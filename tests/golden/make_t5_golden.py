"""Makes t5_*.npz: weights, inputs and outputs of Hugging Face's T5, T5 1.1 and umT5.

Run from the repository, where torch and transformers are installed:
    python tests/golden/make_t5_golden.py
"""

import json
import pathlib

import numpy as np

SIZES = {
    **{"vocab_size": 40, "d_model": 12, "d_kv": 5, "d_ff": 18, "num_heads": 3},
    **{"num_layers": 2, "num_decoder_layers": 3},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
}
KINDS = {
    "t5": {"feed_forward_proj": "relu"},
    "t5_1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"feed_forward_proj": "gated-gelu"},
}


def random_model(kind, *, seed=0):
    """A T5 whose weights are all large and random, so that a wrong term cannot hide."""
    import torch
    import transformers

    family = "UMT5" if kind == "umt5" else "T5"
    config_class = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}Model")(config_class(**SIZES | KINDS[kind]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def random_inputs(*, length, seed=0):
    """Rows of different lengths; ids under the padding are noise."""
    rng = np.random.default_rng(seed)
    lengths = np.array([length, 1, max(1, length // 2), length - 1])
    mask = np.arange(length) < lengths[:, None]
    return rng.integers(1, SIZES["vocab_size"], mask.shape).astype(np.int32), mask


def main():
    import torch

    for kind in KINDS:
        model = random_model(kind)
        ids, mask = random_inputs(length=20)
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor(ids, dtype=torch.long),
                attention_mask=torch.tensor(mask, dtype=torch.long),
                decoder_input_ids=torch.zeros((len(ids), 1), dtype=torch.long),
            )
        tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        tensors = {n: t.numpy() for n, t in model.state_dict().items() if n not in tied}
        np.savez_compressed(
            pathlib.Path(__file__).parent / f"t5_{kind.removeprefix('t5_')}.npz",
            config=json.dumps(model.config.to_diff_dict(), default=str),
            ids=ids,
            mask=mask,
            encoded=output.encoder_last_hidden_state.numpy(),
            decoded=output.last_hidden_state[:, 0].numpy(),
            **{f"tensor/{name}": tensor for name, tensor in tensors.items()},
        )


if __name__ == "__main__":
    main()
