"""ONNX models of a dual encoder's plain BERTs, from token ids to embeddings."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Mapping

from taser_jax.interop import sentence_transformers
from taser_jax.interop.export_source import PASSAGE_INPUTS, CardTexts, ExportSource
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.storage.errors import ConfigError, how_to_install

MODEL = "model.onnx"
_FORMAT = "onnx"
INPUTS, OUTPUT = ("input_ids", "attention_mask"), "sentence_embedding"
_PACKAGES = ("torch", "sentence_transformers", "onnx", "onnxscript")
_OPSET = 18


def check(config: ModelConfig) -> None:
    """Refuses, before anything is computed, models that are no plain BERTs.

    Raises:
        ConfigError: another model, or missing packages, with the extra that installs them.
    """
    sentence_transformers.check(config, format=_FORMAT)
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        problem = f"PyTorch's exporter needs {', '.join(absent)}"
        raise ConfigError(problem, where="format 'onnx'", fix=how_to_install("onnx"))


def export_onnx(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes model.onnx and tokenizer files, in query/ and passage/ where the two differ.

    The inputs are `input_ids` and `attention_mask`, int64 [batch, length], both sizes dynamic; the
    output is `sentence_embedding`, float32 [batch, dim], with the model's pooling. PyTorch exports
    the sentence-transformers model. The tokenizer of queries adds their prompt.

    Args:
        source: what to export.
        output_dir: an empty directory.

    Raises:
        DataError: the vocabulary is missing.
    """
    for name, role in _paths(source).items():
        directory = output_dir / name
        directory.mkdir(exist_ok=True)
        write_tokenizer(
            source.vocabulary_dir,
            directory,
            max_length=source.length(role),
            prompt=source.prompt(role),
        )
        with tempfile.TemporaryDirectory() as scratch:
            model = pathlib.Path(scratch)
            sentence_transformers.write_model(source, role, model, serves_both=False)
            _export(model, directory / MODEL)


def _paths(source: ExportSource) -> Mapping[str, Role]:
    prompt = source.query_settings.prompt or source.passage_prompt
    return sentence_transformers.plain_paths(source.config, prompt=prompt)


def card_texts(source: ExportSource) -> CardTexts:
    """This format's texts for the model card."""
    directories = list(_paths(source))
    form, example = PASSAGE_INPUTS[source.titles]
    names = " and ".join(f"`{name}/`" for name in directories if name) or "this directory"
    contents = (
        f"{names} has `{MODEL}` and the tokenizer's files. The inputs are `input_ids` and "
        "`attention_mask` (int64, [batch, length]; both sizes are dynamic); the output "
        f"`{OUTPUT}` (float32, [batch, {source.config.embedding_dim}]) is pooled and ready to "
        f"score. A passage is {form}.\n"
    )
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
passage_embeddings = encode_passages([{example}, "Without a title."])
scores = query_embeddings @ passage_embeddings.T
"""
    return CardTexts(_FORMAT, contents, code, ("onnx", "feature-extraction"))


def _export(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Writes a sentence-transformers directory as one ONNX file, pooling and normalisation too."""
    if "tensorflow" in sys.modules:
        # PyTorch's triton ends a process that has TensorFlow; an export needs none.
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer

    transformers.utils.logging.disable_progress_bar()
    model = SentenceTransformer(
        str(directory),
        device="cpu",
        local_files_only=True,
        model_kwargs={"attn_implementation": "eager"},
    )

    class Embedder(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
            for module in model:
                inputs = module(inputs)
            return inputs[OUTPUT]

    # Sizes of 1 would be treated as constants.
    ids = torch.zeros((2, 8), dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            Embedder().eval(),
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
