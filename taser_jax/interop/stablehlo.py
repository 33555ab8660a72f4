"""Dual encoders as StableHLO: one `jax.export` program per role, and their parameters."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import safetensors.numpy

from taser_jax.interop import lowering
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.model_card import CardTexts, left_to_the_reader
from taser_jax.interop.tokenizer_files import write_tokenizer
from taser_jax.models import config_io
from taser_jax.models.batch import Role
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.json_fields import JsonField, JsonType
from taser_jax.storage.json_files import read_json

FORMAT_VERSION = 1
SIGNATURE_FILE = "signature.json"
PARAMETERS_FILE = "params.safetensors"
MODEL_FILE = "model.json"
VOCABULARY = "vocabulary"
# The tokenizer of queries, where a prompt precedes them.
QUERY_TOKENIZER = "query_tokenizer"
_VOCABULARY_FILE = "vocabulary.json"
_VOCABULARY_FIELDS = {
    "size": JsonField(JsonType.INTEGER, required=True, minimum=1),
    "kind": JsonField(JsonType.STRING, required=True),
}

# How to use an export without taser_jax. The reader supplies `directory`, and `ids` (int32) and
# `mask` (bool, True at real tokens), both [batch, length].
LOAD_SNIPPET = """\
import pathlib

import jax
from jax import export
from safetensors.numpy import load_file

directory = pathlib.Path(directory)
params = {}
for name, tensor in load_file(directory / "params.safetensors").items():
    *path, last = name.split("/")
    node = params
    for part in path:
        node = node.setdefault(part, {})
    node[last] = tensor

program = export.deserialize((directory / "encode_query.stablehlo").read_bytes())
embeddings = jax.jit(program.call)(params, ids, mask)  # float32 [batch, dim]
"""

# How to make `ids` and `mask` of queries without taser_jax, by kind of vocabulary.
TOKENIZE_SNIPPETS = {
    "wordpiece": """\
import numpy as np
from tokenizers import Tokenizer

directory = "."
texts = ["which river flows through Paris?"]  # of passages, in vocabulary/: (title, text)
tokenizer = Tokenizer.from_file(f"{directory}/%(folder)s/tokenizer.json")
tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
tokenizer.enable_truncation(%(length)d)
tokenizer.enable_padding()
encoded = tokenizer.encode_batch(texts)
ids = np.array([one.ids for one in encoded], np.int32)
mask = np.array([one.attention_mask for one in encoded], bool)
""",
    "sentencepiece": """\
import numpy as np
from sentencepiece import SentencePieceProcessor

directory = "."
texts = ["which river flows through Paris?"]
tokenizer = SentencePieceProcessor(model_file=f"{directory}/vocabulary/sentencepiece.model")
start = [tokenizer.bos_id()] if tokenizer.bos_id() >= 0 else []
start += %(prompt)r  # the prompt
rows = [
    [*start, *row][: %(length)d - 1] + [tokenizer.eos_id()] for row in tokenizer.encode(texts)
]
lengths = np.array([len(row) for row in rows])
mask = np.arange(lengths.max()) < lengths[:, None]
ids = np.zeros(mask.shape, np.int32)
ids[mask] = np.concatenate(rows)
""",
}


def export_stablehlo(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes `encode_query.stablehlo`, `encode_passage.stablehlo` and what they need.

    The programs contain no weights: both take those of `params.safetensors`, under taser_jax's
    parameter paths. They run on cpu, cuda and tpu, for any batch size of 1 or more and any length
    up to that of the position table, or of training for T5. Texts are converted to ids outside the
    programs, with the vocabulary beside them.

    Args:
        source: the model; learned routing is exported as at inference.
        output_dir: an existing, empty directory.

    Raises:
        ConfigError: lengths or parameters do not fit the model, or there is no vocabulary.
    """
    lowering.check_source(source)
    vocabulary = _vocabulary_metadata(source)
    params = {name: np.asarray(leaf) for name, leaf in lowering.named_leaves(source.params).items()}
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(leaf) for name, leaf in params.items()},
        output_dir / PARAMETERS_FILE,
    )
    shutil.copytree(source.vocabulary_dir, output_dir / VOCABULARY)
    if vocabulary["kind"] == "wordpiece":
        longest = max(source.query_length, source.passage_length)
        write_tokenizer(source.vocabulary_dir, output_dir / VOCABULARY, max_length=longest)
        if prompt := source.query_settings.prompt:
            folder = output_dir / QUERY_TOKENIZER
            folder.mkdir()
            write_tokenizer(
                source.vocabulary_dir, folder, max_length=source.query_length, prompt=prompt
            )
    config_io.save(source.config, output_dir / MODEL_FILE)
    lengths = {Role.QUERY: source.query_length, Role.PASSAGE: source.passage_length}
    functions: dict[str, dict[str, Any]] = {}
    for role, length in lengths.items():
        limit = source.config.max_length or length
        program = lowering.lower_encoder(
            source.config, role, length=limit, lengths=lowering.Lengths.UP_TO, task=source.task
        )
        file = output_dir / f"encode_{role.value}.stablehlo"
        file.write_bytes(program.serialize())
        functions[f"encode_{role.value}"] = {
            "file": file.name,
            "length": length,
            "max_length": limit,
        }
        (embeddings,) = program.out_avals
    functions["encode_query"]["normalization"] = source.query_settings.normalization.value
    functions["encode_query"]["prompt"] = list(source.query_settings.prompt)
    functions["encode_passage"]["titles"] = source.titles.value
    signature = {
        "format_version": FORMAT_VERSION,
        "stablehlo_version": lowering.STABLEHLO_VERSION,
        "platforms": list(lowering.PLATFORMS),
        "functions": functions,
        "inputs": [
            {"name": "params", "file": PARAMETERS_FILE},
            {"name": "ids", "shape": ["batch", "length"], "dtype": "int32"},
            {"name": "mask", "shape": ["batch", "length"], "dtype": "bool"},
        ],
        "output": {
            "name": "embedding",
            "shape": ["batch", int(embeddings.shape[1])],
            "dtype": str(embeddings.dtype),
        },
        "vocabulary": {"directory": VOCABULARY, **vocabulary},
        "model_fingerprint": source.fingerprint,
    }
    text = json.dumps(signature, indent=2) + "\n"
    (output_dir / SIGNATURE_FILE).write_text(text, encoding="utf-8")


def card_texts(source: ExportSource) -> CardTexts:
    """Model-card texts of a StableHLO export, for JAX and other runtimes."""
    contents = (
        "`encode_query.stablehlo` and `encode_passage.stablehlo` are programs of `jax.export` for "
        "cpu, cuda and tpu, for any batch size and length. Both take the parameters in "
        "`params.safetensors`, `ids` (int32 [batch, length]) and `mask` (bool, True at tokens); "
        f"the output is float32 [batch, {source.config.embedding_dim}]. `signature.json` has "
        "the same, machine-readable. The code converts queries to ids, with their prompt, by "
        "the files beside it, without taser_jax; passages have their own length. With taser_jax, "
        "use `taser_jax.data.text.preprocessors.encode_queries` and `encode_passages`.\n"
    ) + left_to_the_reader(source)
    kind = _vocabulary_metadata(source)["kind"]
    prompt = list(source.query_settings.prompt)
    tokenize = TOKENIZE_SNIPPETS[kind] % {
        "length": source.query_length,
        "folder": QUERY_TOKENIZER if prompt else VOCABULARY,
        "prompt": prompt,
    }
    return CardTexts("stablehlo", contents, f"{tokenize}\n{LOAD_SNIPPET}", ("jax",))


def _vocabulary_metadata(source: ExportSource) -> dict[str, Any]:
    path = source.vocabulary_dir / _VOCABULARY_FILE
    try:
        metadata = read_json(path, fields=_VOCABULARY_FIELDS)
        size, kind = metadata["size"], metadata["kind"]
    except DataError as error:
        raise ConfigError(
            f"no vocabulary ({error})",
            where=str(path),
            expected="the vocabulary that the model was trained with",
            fix="copy it into the model directory's vocabulary/, or make it with `taser vocab`",
        ) from error
    rows = source.config.transformer.vocab_size
    if size > rows:
        raise DataError(
            f"the vocabulary has {size:,} ids",
            where=f"{path}, field 'size'",
            expected=f"at most {rows:,}, the rows of the model's embedding table (vocab_size)",
            fix="give the vocabulary that the model was trained with",
        )
    return {"kind": kind, "size": size, "fingerprint": metadata.get("fingerprint")}
