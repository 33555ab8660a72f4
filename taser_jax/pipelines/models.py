"""A trained model, opened for encoding: configuration, parameters, fingerprint."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from taser_jax.batch import Role, Tokens
from taser_jax.fingerprint import Fingerprint
from taser_jax.models import config_io
from taser_jax.models.dual_encoder import (
    DualEncoder,
    abstract_params,
    logical_axes,
    parameter_count,
)
from taser_jax.partitioning import MeshConfig, Partitioner, make_mesh
from taser_jax.training.checkpoints import Checkpoints

MODEL_FILE = "model.json"
VOCABULARY = "vocabulary"

EncodeFn = Callable[[Tokens], np.ndarray]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A dual encoder with its parameters, copied to each of this host's devices.

    Attributes:
        model: the module.
        params: its parameters.
        fingerprint: of configuration and parameters; embeddings and indexes carry it.
        vocabulary_dir: the vocabulary it was trained with.
        step: the checkpoint it came from.
        partitioner: this host's devices.
    """

    model: DualEncoder
    params: Any
    fingerprint: str
    vocabulary_dir: pathlib.Path
    step: int
    partitioner: Partitioner

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return parameter_count(self.params)

    def encode_fn(self, role: Role, *, task: str | None = None) -> EncodeFn:
        """Tokens -> float32 embeddings, [batch, dim], jitted; any batch size."""
        devices = self.partitioner.batch_devices

        @jax.jit
        def apply(params: Any, tokens: Tokens) -> jax.Array:
            return self.model.apply(
                {"params": params}, tokens, role=role, task=task, method="encode"
            ).embeddings

        def encode(tokens: Tokens) -> np.ndarray:
            count = len(tokens.ids)
            if count % devices:
                tokens = jax.tree.map(
                    lambda array: np.concatenate(
                        [array, np.repeat(array[-1:], -count % devices, axis=0)]
                    ),
                    tokens,
                )
            return np.asarray(apply(self.params, self.partitioner.put_batch(tokens)))[:count]

        return encode


def load_model(model_dir: str | pathlib.Path, *, step: int | None = None) -> LoadedModel:
    """Opens a model directory that `taser train` wrote.

    Args:
        model_dir: the model directory.
        step: which checkpoint; None means the best one by validation.
    """
    model_dir = pathlib.Path(model_dir)
    config = config_io.load(model_dir / MODEL_FILE)
    model = DualEncoder(config)
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()))
    shapes = abstract_params(model)
    placed = jax.tree.map(
        lambda leaf, _: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=partitioner.replicated
        ),
        shapes,
        jax.tree.map(lambda leaf: None, shapes),
    )
    checkpoints = Checkpoints(model_dir)
    step = checkpoints.best_step if step is None else step
    params = checkpoints.restore_params(placed, step=step)
    checkpoints.close()
    total = Fingerprint().add(config_io.to_json(config))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        total.add(jax.tree_util.keystr(path)).add(np.asarray(leaf))
    return LoadedModel(
        model=model,
        params=params,
        fingerprint=total.hex(),
        vocabulary_dir=model_dir / VOCABULARY,
        step=int(step or 0),
        partitioner=partitioner,
    )


def shardings_of(model: DualEncoder, partitioner: Partitioner) -> Any:
    """Sharding of each parameter of a model on a mesh."""
    return partitioner.param_shardings(logical_axes(model), abstract_params(model))
