"""Loads pretrained T5 weights into a T5 dual encoder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

import numpy as np

from taser_jax.interop.hub import fetch
from taser_jax.interop.sizes import check_sizes
from taser_jax.interop.t5 import check_t5_shapes, t5_from_t5x, t5_from_tensors
from taser_jax.interop.t5_configs import t5_config, t5x_t5_config
from taser_jax.interop.t5x import is_t5x_checkpoint, read_t5x
from taser_jax.interop.tensors import CONFIG_FILE, read_shapes, read_tensors
from taser_jax.models.dual_encoder import Params
from taser_jax.models.t5 import T5Config, rescale
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig, T5Embedding
from taser_jax.storage.errors import ConfigError

Source = str | os.PathLike[str]

# Fields that must be equal for the weights to have the same meaning.
_MUST_MATCH = (
    *("vocab_size", "embed_dim", "num_layers", "num_decoder_layers", "num_heads", "head_dim"),
    *("mlp_dim", "mlp_activations", "num_buckets", "position_bias"),
)
_PROJECTION = "projection_layer"


def pretrained_t5(source: Source, *, numerics: T5Config = T5Config()) -> T5Config:
    """The configuration of a checkpoint's T5: its sizes, with the given training numerics.

    Args:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint.
        numerics: source of dropout rate, dtype, rematerialisation and `initialization` (how weights
            are rescaled on loading).

    Raises:
        DataError: the source does not exist or is damaged.
        ConfigError: another architecture.
    """
    return dataclasses.replace(
        _open(source).config,
        dropout_rate=numerics.dropout_rate,
        dtype=numerics.dtype,
        remat=numerics.remat,
        initialization=numerics.initialization,
    )


def load_pretrained_t5(source: Source, *, config: T5DualEncoderConfig, params: Params) -> Params:
    """A T5 dual encoder that starts from a pretrained T5: every tower is a copy of it.

    Weights are rescaled as `config.t5.initialization` says. A projection comes from a T5X dual
    encoder if it has one, otherwise it keeps its initial values.

    Args:
        source: a Hugging Face directory, an id on its hub, or a T5X checkpoint.
        config: configuration of the dual encoder; its sizes must be the checkpoint's.
        params: initial parameters of the dual encoder.

    Returns:
        NumPy parameters of the same tree.

    Raises:
        DataError: the source does not exist or is damaged.
        ConfigError: the dual encoder's sizes are not the checkpoint's; the message has both.
    """
    checkpoint = _open(source)
    wanted = config.t5
    if config.embedding is T5Embedding.ENCODER_MEAN:
        wanted = dataclasses.replace(wanted, num_decoder_layers=0)
    found = dataclasses.replace(
        checkpoint.config,
        num_decoder_layers=wanted.num_decoder_layers and checkpoint.config.num_decoder_layers,
    )
    check_sizes(
        found,
        wanted,
        names=_MUST_MATCH,
        where=checkpoint.where,
        fix="take the sizes from the checkpoint: t5 = pretrained_t5(source)",
        fixes={"vocab_size": "tokenize with the checkpoint's own vocabulary"},
    )
    t5 = rescale(checkpoint.read(wanted), wanted.initialization)
    towers = {}
    for name in config.tower_names:
        towers[name] = dict(t5)
        if config.projection_dim is not None:
            kernel = checkpoint.projection
            if kernel is None:
                kernel = np.asarray(params[name][_PROJECTION]["kernel"], np.float32)
            expected = (wanted.embed_dim, config.projection_dim)
            if kernel.shape != expected:
                raise ConfigError(
                    f"{_PROJECTION}/kernel has shape {tuple(kernel.shape)}",
                    where=checkpoint.where,
                    expected=f"{expected}, as the model is configured",
                    fix=f"set projection_dim={kernel.shape[1]}",
                )
            towers[name][_PROJECTION] = {"kernel": kernel}
    return towers


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint before its weights are loaded.

    Attributes:
        config: its sizes.
        read: reads the parameters of the encoder, or of encoder and decoder.
        where: its directory.
        projection: kernel of the projection, for a T5X dual encoder with one.
    """

    config: T5Config
    read: Callable[[T5Config], Params]
    where: str
    projection: np.ndarray | None = None


def _open(source: Source) -> _Checkpoint:
    directory = pathlib.Path(fetch(source))
    where = str(directory)
    if (directory / CONFIG_FILE).is_file() or not is_t5x_checkpoint(directory):
        config = t5_config(directory)
        # Checked before a model of these sizes is created: wrong ones could fill the memory.
        shapes = read_shapes(directory)
        if shapes is not None:
            check_t5_shapes(shapes, config, where=where)
        return _Checkpoint(
            config,
            lambda config: t5_from_tensors(read_tensors(directory), config, where=where),
            where,
        )
    tree = read_t5x(directory)
    kernel = tree.get(_PROJECTION, {}).get("kernel")
    return _Checkpoint(
        t5x_t5_config(tree, where=where),
        lambda config: t5_from_t5x(tree, config, where=where),
        where,
        None if kernel is None else np.asarray(kernel, np.float32),
    )
