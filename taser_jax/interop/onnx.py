"""ONNX models of a dual encoder's plain BERTs, from token ids to embeddings."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

from taser_jax.interop.bert import config_to_json, encoder_to_tensors
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.model_card import CardTexts, left_to_the_reader
from taser_jax.interop.plain import plain_encoder
from taser_jax.interop.sentence_transformers import check_plain, length_of, plain_paths
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.encoded import Normalization
from taser_jax.storage.errors import ConfigError, how_to_install

MODEL = "model.onnx"
_FORMAT = "onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
_PACKAGES = ("torch", "transformers", "onnx", "onnxscript")
_OPSET = 18


def check_packages() -> None:
    """Checks, before anything is computed, that the exporter is installed.

    Raises:
        ConfigError: naming the missing packages and the extra that installs them.
    """
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"{', '.join(absent)} not installed",
            where="format 'onnx'",
            expected="PyTorch's ONNX exporter",
            fix=how_to_install("onnx"),
        )


def export_onnx(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes model.onnx and tokenizer files, in query/ and passage/ where the two differ.

    The inputs are `input_ids` and `attention_mask`, int64 [batch, length], both sizes dynamic; the
    output is `sentence_embedding`, float32 [batch, dim], with the model's pooling. PyTorch writes
    the model. The tokenizer of queries adds their prompt.

    Args:
        source: what to export.
        output_dir: an empty directory.

    Raises:
        ConfigError: learned routing, heads that BertModel cannot have, or a missing package.
        DataError: the vocabulary is missing or not a WordPiece vocabulary.
    """
    check_packages()
    config = check_plain(source.config, format=_FORMAT)
    prompt = source.query_settings.prompt
    for name, role in plain_paths(config, prompt=prompt).items():
        directory = output_dir / name
        directory.mkdir(exist_ok=True)
        write_tokenizer(
            source.vocabulary_dir,
            directory,
            max_length=length_of(source, role),
            rows=source.config.transformer.vocab_size,
            prompt=prompt if role is Role.QUERY else (),
        )
        _export(_embedder(source, config, role), directory / MODEL)


def card_texts(source: ExportSource) -> CardTexts:
    """This format's texts for the model card."""
    config = check_plain(source.config, format=_FORMAT)
    directories = list(plain_paths(config, prompt=source.query_settings.prompt))
    names = " and ".join(f"`{name}/`" for name in directories if name) or "this directory"
    contents = (
        f"{names} has `{MODEL}` and the tokenizer's files. The inputs are `input_ids` and "
        "`attention_mask` (int64, [batch, length]; both sizes are dynamic); the output "
        f"`{OUTPUT}` (float32, [batch, {config.bert.embed_dim}]) is pooled and ready to score. A "
        "passage is a pair `(title, text)`, or `text` alone where it has no title, which is not a "
        "pair with an empty one.\n"
    ) + left_to_the_reader(source)
    query, passage = (directories * 2)[:2]
    code = f"""
import numpy as np
import onnxruntime
from tokenizers import Tokenizer


def load(directory, max_length):
    tokenizer = Tokenizer.from_file(f"{{directory}}/tokenizer.json")
    tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding()
    session = onnxruntime.InferenceSession(f"{{directory}}/{MODEL}")

    def encode(texts):
        encoded = tokenizer.encode_batch(texts)
        inputs = {{
            "input_ids": np.array([text.ids for text in encoded]),
            "attention_mask": np.array([text.attention_mask for text in encoded]),
        }}
        return session.run(None, inputs)[0]

    return encode


encode_queries = load("{query or "."}", {source.query_length})
encode_passages = load("{passage or "."}", {source.passage_length})
query_embeddings = encode_queries(["on which river lies Paris"])
passage_embeddings = encode_passages([("Paris", "Paris lies on the Seine."), "Without a title."])
scores = query_embeddings @ passage_embeddings.T
"""
    return CardTexts(_FORMAT, contents, code, ("onnx", "feature-extraction"))


def _embedder(source: ExportSource, config: DualEncoderConfig, role: Role) -> Any:
    """A torch module: ids and mask to pooled embeddings."""
    import torch
    import transformers

    class Embedder(torch.nn.Module):
        def __init__(self, encoder: Any) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
            if config.pooling is Pooling.CLS:
                pooled = hidden[:, 0]
            else:
                weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
                pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1.0)
            if config.normalization is Normalization.L2:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            return pooled

    bert = config.bert
    settings = {**config_to_json(bert), "attn_implementation": "eager"}
    encoder = transformers.BertModel(transformers.BertConfig(**settings), add_pooling_layer=False)
    params = plain_encoder(source.params, config, role, task=source.task)
    tensors = encoder_to_tensors(params, bert)
    encoder.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    return Embedder(encoder).eval()


def _export(module: Any, path: pathlib.Path) -> None:
    import torch

    # Sizes of 1 would be treated as constants.
    ids = torch.zeros((2, 8), dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with _quiet():
        torch.onnx.export(
            module,
            (ids, torch.ones_like(ids)),
            path,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_shapes={name: axes for name in INPUTS},
            opset_version=_OPSET,
            dynamo=True,
            # One file up to protobuf's limit of 2 GB.
            external_data=False,
            verbose=False,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the exporter's notices."""
    names = ("torch.onnx", "onnxscript", "onnx_ir")
    former = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in former.items():
            logging.getLogger(name).setLevel(level)
