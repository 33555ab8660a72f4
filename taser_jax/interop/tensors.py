"""Named tensors of a Hugging Face checkpoint as NumPy arrays, and as parameters of our tree.

A model's tree gives the shapes, and one function the names of Hugging Face.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by it
import msgspec
import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float
from numpy.typing import ArrayLike
from safetensors import SafetensorError

from taser_jax.models.dual_encoder import Params
from taser_jax.models.layers import TransformerConfig
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.typed_files import read_json, read_typed, typed

CONFIG_FILE = "config.json"
SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"

_LISTED = 5
_FIX_DIRECTORY = "give the directory that the model's save_pretrained wrote"

# Of a config.json: more would be traced for hours before anything else is noticed.
Layers = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Tensors = dict[str, np.ndarray]
Path = tuple[str, ...]


class Kind(msgspec.Struct):
    """Read first of a config.json, since other architectures have other fields."""

    model_type: str | None = None
    architectures: list[str] = []


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_tensors(directory: pathlib.Path) -> Tensors:
    """All tensors of a checkpoint by name, from safetensors or else PyTorch files.

    Args:
        directory: the checkpoint's directory.

    Returns:
        Arrays in the checkpoint's dtypes.

    Raises:
        DataError: no weights, a missing shard, or a truncated or damaged file.
        ConfigError: there are only PyTorch files, and PyTorch is not installed.
    """
    for name, read in ((SAFETENSORS, _read_safetensors), (PYTORCH, _read_pytorch)):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return read(directory / name)
        if index.is_file():
            tensors: Tensors = {}
            for shard in sorted(set(read_typed(index, _Index).weight_map.values())):
                # An index must not name files of other directories.
                tensors |= read(directory / pathlib.Path(shard).name)
            return tensors
    raise DataError(
        f"no weights: neither {SAFETENSORS} nor {PYTORCH}, nor the index of shards of either",
        where=str(directory),
        fix=_FIX_DIRECTORY,
    )


def read_config(directory: str | pathlib.Path) -> tuple[str, dict[str, object], Kind]:
    """The `config.json` of a Hugging Face directory: its path, its content, and what it is of.

    Args:
        directory: the checkpoint's directory.

    Raises:
        DataError: there is none, it is not a JSON object, or a field is invalid.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    values = read_json(path, fix=_FIX_DIRECTORY)
    return str(path), values, typed(values, Kind, where=str(path))


def check_room(directory: pathlib.Path, config: TransformerConfig) -> None:
    """Refuses sizes that a checkpoint's files cannot have, before a model of them fills the memory.

    A number takes a byte at least; a model has a table and a feed-forward part in each block.

    Raises:
        DataError: the sizes are of more numbers than the files have bytes.
    """
    files = [path for kind in ("safetensors", "bin") for path in directory.glob(f"*.{kind}")]
    size = sum(path.stat().st_size for path in files)
    blocks = 2 * config.num_layers * config.mlp_dim
    numbers = config.embed_dim * (config.vocab_size + blocks)
    if files and numbers > size:
        problem = f"sizes of {numbers:,} numbers or more, and weights of {size:,} bytes"
        fix = "take config.json and the weights from the same model"
        raise DataError(problem, where=str(directory / CONFIG_FILE), fix=fix)


def _read_safetensors(path: pathlib.Path) -> Tensors:
    try:
        return safetensors.numpy.load_file(path)
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        # AttributeError: NumPy has no floats of eight bits.
        raise _damaged(path, error) from error


def _read_pytorch(path: pathlib.Path) -> Tensors:
    try:
        import torch
    except ImportError as error:
        problem = "PyTorch is not installed, and these weights are in PyTorch's own format"
        raise ConfigError(problem, where=str(path), fix=how_to_install("torch")) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
            raise ValueError("not a flat dictionary of tensors")
        # NumPy has no bfloat16; float32 represents all of its values.
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in state.items()
        }
    except Exception as error:
        # Errors of files, zip and pickle, and torch's refusals to unpickle, share no base class.
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, error: Exception) -> DataError:
    reason = re.sub(r"\s+", " ", str(error)).strip()[:200] or type(error).__name__
    fix = "download or copy the file again; of quantised weights take the original checkpoint"
    return DataError(f"cannot be read: {reason}", where=str(path), fix=fix)


def listed(names: Sequence[str]) -> str:
    """The first few names, and the number of others."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its path in our tree, Hugging Face's name, and its shape.

    Attributes:
        path: keys from the encoder down.
        name: name of the tensor.
        shape: ours. A kernel is [inputs..., outputs...].
        inputs: number of leading axes of a kernel that are inputs; 0 if it is not transposed.
        part: which of how many equal parts of the tensor it is, along the tensor's first axis.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    inputs: int = 0
    part: tuple[int, int] = (0, 1)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape under Hugging Face's name: a Linear's weight is [outputs, inputs]."""
        rows, *rest = self.part_shape
        return rows * self.part[1], *rest

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of this parameter's part of the tensor."""
        if self.inputs:
            return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return (math.prod(self.shape),) if self.path[-1] != "embedding" else self.shape


def leaves_of(shapes: Params, name_of: Callable[[Path], str]) -> list[Leaf]:
    """The leaves of an encoder.

    Args:
        shapes: its parameters; abstract ones will do.
        name_of: path -> Hugging Face's name.
    """
    leaves = []
    for path, array in flatten_dict(shapes).items():
        is_kernel = path[-1] in ("kernel", "rel_embedding")
        inputs = 1 + (path[-2] == "out") if is_kernel else 0
        leaves.append(Leaf(path, name_of(path), tuple(array.shape), inputs))
    return sorted(leaves, key=_place)


def _place(leaf: Leaf) -> tuple[list[int], int, str]:
    """Messages name the first blocks first, and in each its largest parameter."""
    numbers = [int(number) for number in re.findall(r"\d+", leaf.name)]
    return numbers, -math.prod(leaf.shape), leaf.name


def params_from_tensors(
    leaves: Sequence[Leaf],
    tensors: Mapping[str, np.ndarray],
    *,
    blocks: tuple[str, ...],
    ignored: re.Pattern[str],
    where: str,
    sizes: str,
) -> Params:
    """Our parameters, float32, unless a checkpoint lacks some, or computes something else.

    Args:
        leaves: the requested parameters.
        tensors: the checkpoint's tensors, by name.
        blocks: what the names of tensors of the model's blocks start with.
        ignored: names of tensors in blocks that change nothing.
        where: the checkpoint, for messages.
        sizes: the model's sizes in words, for messages.

    Raises:
        ConfigError: a tensor of another shape.
        DataError: tensors are missing or unexpected, have NaN, or no floating-point numbers.
    """
    missing = [leaf.name for leaf in leaves if leaf.name not in tensors]
    if missing:
        problem = f"{len(missing)} of {len(leaves)} tensors are missing: {listed(missing)}"
        fix = "download the checkpoint again, or set num_layers (of a T5 also num_decoder_layers)"
        raise DataError(problem, where=where, fix=fix)
    # Adapters, biases and the like change what a block computes.
    more = sorted(
        {name for name in tensors if name.startswith(blocks) and not ignored.fullmatch(name)}
        - {leaf.name for leaf in leaves}
    )
    if more:
        problem = f"{len(more)} tensors that such a model does not have: {listed(more)}"
        fix = "merge adapters into the weights first, or of a T5 correct what mlp_activations says"
        raise DataError(problem, where=where, fix=fix)
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        tensor = tensors[leaf.name]
        if tensor.shape != leaf.tensor_shape:
            problem = f"{leaf.name} has shape {tensor.shape}, not {leaf.tensor_shape}"
            fix = "take the sizes from the checkpoint: pretrained_bert or pretrained_t5(source)"
            raise ConfigError(f"{problem}, for {sizes}", where=where, fix=fix)
        place, count = leaf.part
        part = np.split(weights(tensor, leaf.name, where), count)[place]
        ours = (part.T if leaf.inputs else part).reshape(leaf.shape)
        params[leaf.path] = np.ascontiguousarray(ours)
    return unflatten_dict(params)


def params_to_tensors(params: Params, leaves: Sequence[Leaf]) -> Tensors:
    """Our parameters under Hugging Face's names and shapes; float32."""
    flat = flatten_dict(params)
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for leaf in sorted(leaves, key=lambda leaf: leaf.part):
        value = np.asarray(flat[leaf.path], np.float32)
        if leaf.inputs:
            value = value.reshape(leaf.part_shape[::-1]).T
        parts[leaf.name].append(value.reshape(leaf.part_shape))
    # Arrays of their own, not views of the parameters.
    return {name: np.ascontiguousarray(np.concatenate(rows)) for name, rows in parts.items()}


def weights(array: ArrayLike, name: str, where: str) -> Float[np.ndarray, "*shape"]:
    """Floating-point weights as float32.

    Raises:
        DataError: other numbers, NaN or infinity.
    """
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        fix = "quantised checkpoints are not supported: use the original checkpoint"
        raise DataError(f"{name} is {array.dtype}, not floating-point", where=where, fix=fix)
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{name} has NaN or infinity", where=where)
    return array


def check_sizes(
    checkpoint: object, model: object, *, names: Sequence[str], where: str, setting: str
) -> None:
    """Refuses weights whose sizes differ from the model's.

    Example:
        "the checkpoint has mlp_dim 24, num_layers 4, and the model mlp_dim 48, num_layers 2"

    Args:
        checkpoint: configuration of the checkpoint.
        model: configuration of the model, of the same type.
        names: fields that must be equal.
        where: the checkpoint.
        setting: what takes the sizes from the checkpoint, for the message.

    Raises:
        ConfigError: naming every field that differs.
    """
    differing = [name for name in names if getattr(checkpoint, name) != getattr(model, name)]
    if differing:
        theirs, ours = (size_words(config, differing) for config in (checkpoint, model))
        problem = f"the checkpoint has {theirs}, and the model {ours}"
        fix = f"take the sizes from the checkpoint, {setting}, and tokenize with its own vocabulary"
        raise ConfigError(problem, where=where, fix=fix)


def size_words(config: object, names: Sequence[str]) -> str:
    """Fields of a configuration in words, such as "mlp_dim 24, num_layers 4"."""
    values = {name: getattr(config, name) for name in names}
    return ", ".join(f"{name} {getattr(v, 'value', v)}" for name, v in values.items())
