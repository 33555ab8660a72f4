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
from typing import TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by it
import msgspec
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open

from taser_jax.models.dual_encoder import Params
from taser_jax.storage.errors import ConfigError, DataError, how_to_install
from taser_jax.storage.typed_files import read_typed

CONFIG_FILE = "config.json"
SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"

# safetensors' names of the dtypes that NumPy has; quantised weights have others.
_FLOATS, _OTHERS = ("F64", "F32", "F16", "BF16"), ("C64", "BOOL")
_DTYPES = {*_FLOATS, *_OTHERS, *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
_LISTED = 5
_FIX_DIRECTORY = "give the directory that the model's save_pretrained wrote"
_FIX_DOWNLOAD = "download the checkpoint again, all of its files"
_FIX_QUANTISED = "quantised checkpoints are not supported: use the original checkpoint"

Tensors = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
Path = tuple[str, ...]
_T = TypeVar("_T")


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
        if (tensors := _read_weights(directory / name, read)) is not None:
            return tensors
    raise DataError(
        f"no weights: neither {SAFETENSORS} nor {PYTORCH}, nor the index of shards of either",
        where=str(directory),
        fix=_FIX_DIRECTORY,
    )


def read_shapes(directory: pathlib.Path) -> Shapes | None:
    """Shapes of a checkpoint's tensors; None if finding them would require reading the values.

    Raises:
        DataError: a missing shard, or a truncated or damaged file.
    """
    return _read_weights(directory / SAFETENSORS, _read_safetensors_shapes)


def _read_weights(
    path: pathlib.Path, read: Callable[[pathlib.Path], dict[str, _T]]
) -> dict[str, _T] | None:
    """The content of a file, or of the shards of its index; None where there is neither."""
    if path.is_file():
        return read(path)
    index = path.with_name(f"{path.name}.index.json")
    return _read_shards(index, read) if index.is_file() else None


def read_config(directory: str | pathlib.Path, kind: type[_T]) -> tuple[pathlib.Path, _T]:
    """The `config.json` of a Hugging Face directory: its path and its content.

    Args:
        directory: the checkpoint's directory.
        kind: its type.

    Raises:
        DataError: there is none, it is not a JSON object, or a field is invalid.
    """
    path = pathlib.Path(directory) / CONFIG_FILE
    if not path.is_file():
        problem = f"no {CONFIG_FILE}" if path.parent.is_dir() else "no such directory"
        raise DataError(problem, where=str(path.parent), fix=_FIX_DIRECTORY)
    return path, read_typed(path, kind)


def _read_shards(
    index: pathlib.Path, read: Callable[[pathlib.Path], dict[str, _T]]
) -> dict[str, _T]:
    shard_of = read_typed(index, _Index).weight_map
    shards = sorted(set(shard_of.values()))
    outside = [shard for shard in shards if pathlib.PurePath(shard).name != shard or shard == ".."]
    if outside:
        where = f"{index}, field 'weight_map'"
        problem = f"shards outside of this directory: {listed(outside)}"
        raise DataError(problem, where=where, fix="take the checkpoint from a place that you trust")
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        problem = f"{len(absent)} of {len(shards)} shards are absent: {listed(absent)}"
        raise DataError(problem, where=str(index.parent), fix=_FIX_DOWNLOAD)
    tensors: dict[str, _T] = {}
    for shard in shards:
        tensors |= read(index.parent / shard)
    missing = [name for name in shard_of if name not in tensors]
    if missing:
        problem = f"tensors of the index are in no shard: {listed(missing)}"
        raise DataError(problem, where=str(index), fix=_FIX_DOWNLOAD)
    return tensors


def _read_safetensors(path: pathlib.Path) -> Tensors:
    # An array of a mapped file would keep the whole file mapped.
    return _of_safetensors(path, lambda file, name: np.array(file.get_tensor(name)))


def _read_safetensors_shapes(path: pathlib.Path) -> Shapes:
    return _of_safetensors(path, lambda file, name: tuple(file.get_slice(name).get_shape()))


def _of_safetensors(path: pathlib.Path, read: Callable[[safe_open, str], _T]) -> dict[str, _T]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _DTYPES:
                    problem = f"{name} is of type {dtype}, not F32, F16 or BF16"
                    raise DataError(problem, where=str(path), fix=_FIX_QUANTISED)
            return {name: read(file, name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_pytorch(path: pathlib.Path) -> Tensors:
    try:
        import torch
    except ImportError as error:
        problem = "PyTorch is not installed, and these weights are in PyTorch's own format"
        raise ConfigError(problem, where=str(path), fix=how_to_install("torch")) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Errors of files, zip and pickle, and torch's refusals to unpickle, share no base class.
        raise _damaged(path, error) from error
    if not isinstance(state, dict) or not all(torch.is_tensor(v) for v in state.values()):
        raise _damaged(path, ValueError("not a flat dictionary of tensors"))
    try:
        # NumPy has no bfloat16; float32 represents all of its values.
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in state.items()
        }
    except (TypeError, RuntimeError) as error:
        # NumPy has no 8-bit floats, and no sparse or quantised tensors.
        raise _damaged(path, error) from error


def _damaged(path: pathlib.Path, error: Exception) -> DataError:
    reason = re.sub(r"\s+", " ", str(error)).strip()[:200] or type(error).__name__
    fix = "the file is truncated or damaged: download or copy it again"
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
        shapes: its parameters, abstract ones, boxed by Flax or not.
        name_of: path -> Hugging Face's name.
    """
    leaves = []
    for keys, array in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(str(key.key) for key in keys if hasattr(key, "key"))
        is_kernel = path[-1] in ("kernel", "rel_embedding")
        inputs = 1 + (path[-2] == "out") if is_kernel else 0
        leaves.append(Leaf(path, name_of(path), tuple(array.shape), inputs))
    return sorted(leaves, key=_place)


def _place(leaf: Leaf) -> tuple[list[int], int, str]:
    """Messages name the first blocks first, and in each its largest parameter."""
    numbers = [int(number) for number in re.findall(r"\d+", leaf.name)]
    return numbers, -math.prod(leaf.shape), leaf.name


def check_leaves(
    leaves: Sequence[Leaf],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    blocks: tuple[str, ...],
    ignored: re.Pattern[str],
    where: str,
    sizes: str,
) -> None:
    """Refuses a checkpoint that lacks tensors of a model, or computes something else.

    Args:
        leaves: the requested parameters.
        shapes: shapes of the checkpoint's tensors, by name.
        blocks: what the names of tensors of the model's blocks start with.
        ignored: names of tensors in blocks that change nothing.
        where: the checkpoint, for messages.
        sizes: the model's sizes in words, for messages.

    Raises:
        ConfigError: a tensor of another shape.
        DataError: tensors are missing or unexpected.
    """
    missing = [leaf.name for leaf in leaves if leaf.name not in shapes]
    if missing:
        problem = f"{len(missing)} of {len(leaves)} tensors are missing: {listed(missing)}"
        fix = "download the checkpoint again, or set num_layers (of a T5 also num_decoder_layers)"
        raise DataError(problem, where=where, fix=fix)
    # Adapters, biases and the like change what a block computes.
    more = sorted(
        {name for name in shapes if name.startswith(blocks) and not ignored.fullmatch(name)}
        - {leaf.name for leaf in leaves}
    )
    if more:
        problem = f"{len(more)} tensors that such a model does not have: {listed(more)}"
        fix = "merge adapters into the weights first, or of a T5 correct what mlp_activations says"
        raise DataError(problem, where=where, fix=fix)
    for leaf in leaves:
        if shapes[leaf.name] != leaf.tensor_shape:
            problem = f"{leaf.name} has shape {shapes[leaf.name]}, not {leaf.tensor_shape}"
            fix = "take the sizes from the checkpoint: pretrained_bert or pretrained_t5(source)"
            raise ConfigError(f"{problem}, for {sizes}", where=where, fix=fix)


def params_from_tensors(
    leaves: Sequence[Leaf], tensors: Mapping[str, np.ndarray], *, where: str
) -> Params:
    """Our parameters, float32, from tensors that `check_leaves` has accepted.

    Raises:
        DataError: a tensor that holds NaN or no floating-point numbers; it is of `where`.
    """
    params: dict[Path, np.ndarray] = {}
    for leaf in leaves:
        place, count = leaf.part
        tensor = np.split(weights(tensors[leaf.name], leaf.name, where), count)[place]
        ours = (tensor.T if leaf.inputs else tensor).reshape(leaf.shape)
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
    checkpoint: object,
    model: object,
    *,
    names: Sequence[str],
    where: str,
    fix: str,
    fixes: Mapping[str, str],
) -> None:
    """Refuses weights whose sizes differ from the model's.

    Example:
        "the checkpoint has mlp_dim 24, num_layers 4, and the model mlp_dim 48, num_layers 2"

    Args:
        checkpoint: configuration of the checkpoint.
        model: configuration of the model, of the same type.
        names: fields that must be equal.
        where: the checkpoint.
        fix: advice for all cases.
        fixes: field -> additional advice if that field differs.

    Raises:
        ConfigError: naming every field that differs.
    """
    differing = [name for name in names if getattr(checkpoint, name) != getattr(model, name)]
    if differing:
        theirs, ours = (size_words(config, differing) for config in (checkpoint, model))
        problem = f"the checkpoint has {theirs}, and the model {ours}"
        advice = "; ".join([fix, *(fixes[name] for name in differing if name in fixes)])
        raise ConfigError(problem, where=where, fix=advice)


def size_words(config: object, names: Sequence[str]) -> str:
    """Fields of a configuration in words, such as "mlp_dim 24, num_layers 4"."""
    values = {name: getattr(config, name) for name in names}
    return ", ".join(f"{name} {getattr(v, 'value', v)}" for name, v in values.items())
