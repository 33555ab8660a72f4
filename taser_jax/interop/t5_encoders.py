"""T5 encoders as directories that sentence-transformers loads: pooling, projection, normalisation.

    modules.json, 1_Pooling/, 2_Dense/, 2_Normalize/, config.json, model.safetensors, tokenizer.json

An embedding that is a decoder's output has no such modules and is refused.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from taser_jax.data.text.sentencepiece import MODEL_FILE, SentencePieceVocabulary
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.interop.leaves import Params, params_to_tensors
from taser_jax.interop.t5 import t5_leaves
from taser_jax.interop.t5_configs import t5_to_json
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError

_PROTO: Any = sentencepiece_model_pb2
# Pieces with this score are chosen only where nothing else is possible.
_NEVER = -1e6
_PROMPT = "[PROMPT]"
DENSE_DIR = "2_Dense"


def write_t5_encoder(tower: Params, config: T5DualEncoderConfig, directory: pathlib.Path) -> None:
    """Writes config.json and model.safetensors of Hugging Face's T5EncoderModel, and 2_Dense/.

    Args:
        tower: parameters of one tower, whose embedding is the mean of the encoder's states.
        config: its configuration.
        directory: an existing directory.
    """
    t5 = dataclasses.replace(config.t5, num_decoder_layers=0)
    (directory / "config.json").write_text(json.dumps(t5_to_json(t5), indent=2) + "\n")
    tensors = params_to_tensors(tower, t5_leaves(t5))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if config.projection_dim is None:
        return
    dense = directory / DENSE_DIR
    dense.mkdir()
    kernel = np.asarray(tower["projection_layer"]["kernel"], np.float32)
    save_file({"linear.weight": np.ascontiguousarray(kernel.T)}, dense / "model.safetensors")
    settings = {
        "in_features": kernel.shape[0],
        "out_features": kernel.shape[1],
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (dense / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_sentencepiece_tokenizer(
    vocabulary_dir: pathlib.Path,
    directory: pathlib.Path,
    *,
    max_length: int,
    prompt: Sequence[int] = (),
) -> None:
    """Writes what transformers' AutoTokenizer reads, with the same ids as our vocabulary.

    One text becomes `prompt text </s>`, and a pair becomes `title </s> text </s>`, truncated
    longest first, as by `query_ids` and `passage_ids`; a vocabulary with a start piece begins with
    it. The name of a control piece in a text is that piece, as in transformers' own T5.

    Args:
        vocabulary_dir: the model's vocabulary, a unigram model as T5's.
        directory: an existing directory.
        max_length: maximum number of tokens of a text.
        prompt: ids before every text or pair.

    Raises:
        ConfigError: it is not such a vocabulary.
    """
    vocabulary, proto = load_vocabulary(vocabulary_dir), _PROTO
    fix = "export it as saved_model or stablehlo, which take any vocabulary"
    if not isinstance(vocabulary, SentencePieceVocabulary):
        problem = f"a {vocabulary.kind} vocabulary, and T5 has SentencePiece"
        raise ConfigError(problem, where=str(vocabulary_dir), fix=fix)
    model = proto.ModelProto.FromString((vocabulary_dir / MODEL_FILE).read_bytes())
    trainer = model.trainer_spec
    if trainer.model_type != proto.TrainerSpec.UNIGRAM:
        problem = "a SentencePiece model that is not a unigram model, as T5's is"
        raise ConfigError(problem, where=str(vocabulary_dir), fix=fix)
    piece = proto.ModelProto.SentencePiece
    of_texts = (piece.NORMAL, piece.USER_DEFINED, piece.BYTE)
    pieces = [
        (each.piece, each.score if each.type in of_texts else _NEVER) for each in model.pieces
    ]
    # Text has no spaces when it is split, so it never yields these; a prompt may have them.
    extra = reversed(range(vocabulary.extra_ids))
    pieces += [(f"<extra id {number}>", _NEVER) for number in extra]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(pieces, unk_id=vocabulary.unk_id, byte_fallback=trainer.byte_fallback)
    )
    spaces = [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    charsmap = model.normalizer_spec.precompiled_charsmap
    before = [normalizers.Precompiled(charsmap)] if charsmap else []
    tokenizer.normalizer = normalizers.Sequence([*before, *spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = [name for name, _ in pieces]
    end = names[vocabulary.sep_id]
    special: list[Any] = [(end, vocabulary.sep_id)]
    start = ""
    if vocabulary.cls_id is not None:
        start = f"{names[vocabulary.cls_id]} "
        special.append((names[vocabulary.cls_id], vocabulary.cls_id))
    if prompt:
        tokens = [names[id] for id in prompt]
        special.append({"id": _PROMPT, "ids": list(prompt), "tokens": tokens})
        start += f"{_PROMPT} "
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start}$A {end}", pair=f"{start}$A {end} $B {end}", special_tokens=special
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": names[vocabulary.pad_id],
        "eos_token": end,
        "unk_token": names[vocabulary.unk_id],
        "split_special_tokens": True,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
