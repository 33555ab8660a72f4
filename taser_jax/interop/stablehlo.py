"""Dual encoders as StableHLO: one `jax.export` program a role, and their parameters beside them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import export
from jaxtyping import Array, Bool, Float, Int

from taser_jax.batch import Role
from taser_jax.errors import ConfigError, DataError
from taser_jax.interop.export_source import ExportSource
from taser_jax.interop.lowering import (
    PLATFORMS,
    STABLEHLO_VERSION,
    Lengths,
    check_params,
    check_source,
    lower_encoder,
    named_leaves,
    nested,
)
from taser_jax.models import config_io

FORMAT_VERSION = 1
SIGNATURE_FILE = "signature.json"
PARAMETERS_FILE = "params.safetensors"
MODEL_FILE = "model.json"
VOCABULARY = "vocabulary"
_VOCABULARY_FILE = "vocabulary.json"
_FIX = "export the model again with `taser export`"

# How to use an export without taser_jax; `directory`, `ids` (int32) and `mask` (bool, True at real
# tokens), both [batch, length], are the reader's.
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


@dataclasses.dataclass(frozen=True)
class StableHloEncoder:
    """A loaded export.

    Attributes:
        params: nested dicts of arrays, given to every program.
        programs: (params, ids, mask) -> embeddings of each role.
        signature: what signature.json says.
    """

    params: Any
    programs: Mapping[Role, Callable[[Any, Any, Any], Any]]
    signature: Mapping[str, Any]

    def encode(
        self, role: Role, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
    ) -> Float[Array, "batch dim"]:
        """Embeddings of tokenised texts; any batch size, each compiled once.

        Args:
            role: query or passage.
            ids: with special tokens, 0-padded. [batch, length], int32
            mask: True at real tokens. [batch, length]

        Raises:
            ConfigError: shapes that the program cannot take.
        """
        limit = self.signature["functions"][f"encode_{role.value}"]["max_length"]
        if ids.ndim != 2 or ids.shape != mask.shape or not 1 <= ids.shape[1] <= limit:
            raise ConfigError(
                f"ids {list(ids.shape)} and mask {list(mask.shape)}",
                where="StableHloEncoder.encode",
                expected=f"[batch, length] both, length 1 to {limit}",
            )
        if not len(ids):
            return jnp.zeros((0, self.signature["output"]["shape"][1]), jnp.float32)
        ids, mask = jnp.asarray(ids, jnp.int32), jnp.asarray(mask, jnp.bool_)
        return self.programs[role](self.params, ids, mask)


def export_stablehlo(source: ExportSource, output_dir: pathlib.Path) -> None:
    """Writes `encode_query.stablehlo`, `encode_passage.stablehlo` and what they need.

    The programs hold no weights: both take those of `params.safetensors`, under taser_jax's
    parameter paths. They run on cpu, cuda and tpu, for any batch size of 1 or more and any length
    up to the position table's, or T5's up to that of training. Text becomes ids outside, with the
    vocabulary beside them.

    Args:
        source: the model; learned routing is exported as it routes at inference.
        output_dir: an existing, empty directory.

    Raises:
        ConfigError: lengths or parameters do not fit the model, or there is no vocabulary.
    """
    check_source(source)
    vocabulary = _vocabulary_metadata(source)
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(source.params).items()}
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(leaf) for name, leaf in params.items()},
        output_dir / PARAMETERS_FILE,
    )
    shutil.copytree(source.vocabulary_dir, output_dir / VOCABULARY)
    config_io.save(source.config, output_dir / MODEL_FILE)
    lengths = {Role.QUERY: source.query_length, Role.PASSAGE: source.passage_length}
    functions: dict[str, dict[str, Any]] = {}
    for role, length in lengths.items():
        limit = source.config.max_length or length
        program = lower_encoder(
            source.config, role, length=limit, lengths=Lengths.UP_TO, task=source.task
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
        "stablehlo_version": STABLEHLO_VERSION,
        "platforms": list(PLATFORMS),
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


def load_stablehlo(directory: str | pathlib.Path) -> StableHloEncoder:
    """Opens what `export_stablehlo` wrote; no Flax module runs.

    Example:
        >>> encoder = load_stablehlo("exported/stablehlo")
        >>> encoder.encode(Role.QUERY, tokens.ids, tokens.mask).shape
        (2, 768)

    Raises:
        DataError: files are missing or damaged.
        ConfigError: the parameters are not those of the programs.
    """
    directory = pathlib.Path(directory)
    signature = _read_signature(directory)
    params = params_from_stablehlo_export(directory)
    programs = {}
    for role in Role:
        path = directory / signature["functions"][f"encode_{role.value}"]["file"]
        program = _read_program(path)
        (expected, *_), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        check_params(params, expected, where=str(directory / PARAMETERS_FILE))
        programs[role] = jax.jit(program.call)
    return StableHloEncoder(
        params=jax.tree.map(jnp.asarray, params), programs=programs, signature=signature
    )


def params_from_stablehlo_export(directory: str | pathlib.Path) -> dict[str, Any]:
    """The parameters of an export, bit for bit: nested dicts of NumPy arrays.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = pathlib.Path(directory) / PARAMETERS_FILE
    try:
        return nested(safetensors.numpy.load_file(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(
            f"parameters cannot be read ({error})", where=str(path), fix=_FIX
        ) from error


def _vocabulary_metadata(source: ExportSource) -> dict[str, Any]:
    path = source.vocabulary_dir / _VOCABULARY_FILE
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        size, kind = metadata["size"], metadata["kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no vocabulary ({error})",
            where=str(path),
            expected="the vocabulary that the model was trained with",
            fix="copy it into the model directory's vocabulary/, or make it with `taser vocab`",
        ) from error
    rows = source.config.transformer.vocab_size
    if size > rows:
        raise ConfigError(
            f"the vocabulary has {size} ids",
            where=str(path),
            expected=f"at most {rows}, the rows of the model's table",
        )
    return {"kind": kind, "size": size, "fingerprint": metadata.get("fingerprint")}


def _read_signature(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / SIGNATURE_FILE
    try:
        signature = json.loads(path.read_text(encoding="utf-8"))
        version = signature["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"no StableHLO export ({error})",
            where=str(path),
            expected="a directory that `taser export` wrote",
            fix=_FIX,
        ) from error
    if version != FORMAT_VERSION:
        raise DataError(
            f"format_version is {version!r}",
            where=str(path),
            expected=str(FORMAT_VERSION),
            fix=_FIX,
        )
    return signature


def _read_program(path: pathlib.Path) -> export.Exported:
    if not path.is_file():
        raise DataError("no such file", where=str(path), expected="a program", fix=_FIX)
    try:
        return export.deserialize(bytearray(path.read_bytes()))
    # The reader of a damaged file raises whatever its bytes led it to.
    except Exception as error:
        raise DataError(
            f"the program cannot be read ({error})", where=str(path), fix=_FIX
        ) from error
