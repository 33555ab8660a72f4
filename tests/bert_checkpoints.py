"""Small Hugging Face directories for tests, written without PyTorch."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
}
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    **SIZES,
}


def tensor_shapes(*, prefix="", **sizes):
    """Every encoder tensor of a BertModel, written out by hand."""
    s = SIZES | sizes
    embed, mlp = s["hidden_size"], s["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (s["vocab_size"], embed),
        "embeddings.position_embeddings.weight": (s["max_position_embeddings"], embed),
        "embeddings.token_type_embeddings.weight": (s["type_vocab_size"], embed),
        "embeddings.LayerNorm.weight": (embed,),
        "embeddings.LayerNorm.bias": (embed,),
    }
    for i in range(s["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{layer}.attention.{name}.weight"] = (embed, embed)
            shapes[f"{layer}.attention.{name}.bias"] = (embed,)
        shapes[f"{layer}.intermediate.dense.weight"] = (mlp, embed)
        shapes[f"{layer}.intermediate.dense.bias"] = (mlp,)
        shapes[f"{layer}.output.dense.weight"] = (embed, mlp)
        shapes[f"{layer}.output.dense.bias"] = (embed,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}.{name}.weight"] = (embed,)
            shapes[f"{layer}.{name}.bias"] = (embed,)
    return {prefix + name: shape for name, shape in shapes.items()}


def random_tensors(seed=0, *, prefix="", **sizes):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0.3, 0.5, shape).astype(np.float32)
        for name, shape in tensor_shapes(prefix=prefix, **sizes).items()
    }


def write_config(directory, **changes):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return directory


def write_checkpoint(directory, *, tensors=None, **config):
    """A directory with config.json and model.safetensors; returns (directory, tensors)."""
    write_config(directory, **config)
    sizes = {name: config[name] for name in SIZES if name in config}
    tensors = random_tensors(**sizes) if tensors is None else tensors
    save_file(tensors, pathlib.Path(directory) / "model.safetensors")
    return pathlib.Path(directory), tensors


def write_with_vocabulary(directory, vocabulary, *, num_layers):
    """A tiny BERT that knows words, or those of a directory, and holds them; its path."""
    if not isinstance(vocabulary, list):
        text = (pathlib.Path(vocabulary) / "vocab.txt").read_text(encoding="utf-8")
        vocabulary = text.splitlines()
    directory, _ = write_checkpoint(
        directory,
        vocab_size=len(vocabulary),
        num_hidden_layers=num_layers,
        max_position_embeddings=32,
    )
    words = "".join(f"{word}\n" for word in vocabulary)
    (directory / "vocab.txt").write_text(words, encoding="utf-8")
    return directory


def write_modules(
    directory,
    *,
    kinds=("Transformer", "Pooling", "Normalize"),
    package="sentence_transformers.models",
    pooling=None,
    max_length=128,
    prompts=None,
):
    """The files by which sentence-transformers says how a model pools, normalises and prompts."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{package}.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "1_Pooling").mkdir()
    for name, value in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling or {"pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": max_length},
        "config_sentence_transformers.json": {"prompts": prompts or {}},
    }.items():
        (directory / name).write_text(json.dumps(value))
    return directory


# RoBERTa's, in its order.
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def byte_level_tokenizer(texts, *, size):
    """A byte-level BPE as RoBERTa has it, trained on some texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer
