"""A trained model, opened for encoding: configuration, parameters, fingerprint."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from etils import epath

from taser_jax.artifacts import Fingerprint, is_remote, require_equal
from taser_jax.batch import Role, Tokens
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import ConfigError
from taser_jax.models import config_io
from taser_jax.models.build import ModelConfig, build_model
from taser_jax.models.dual_encoder import (
    abstract_params,
    parameter_count,
)
from taser_jax.partitioning import MeshConfig, Partitioner, make_mesh
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints, Selection

MODEL_FILE = "model.json"
RUN_FILE = "run.json"
VOCABULARY = "vocabulary"

EncodeFn = Callable[[Tokens], jax.Array]


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

    model: nn.Module
    params: Any
    fingerprint: str
    vocabulary_dir: pathlib.Path
    step: int
    partitioner: Partitioner

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return parameter_count(self.params)

    @property
    def batch_multiple(self) -> int:
        """What batches to encode should be multiples of: the devices, and at least 8."""
        devices = self.partitioner.batch_devices
        return devices * -(-8 // devices)

    def encode_fn(self, role: Role, *, task: str | None = None) -> EncodeFn:
        """Tokens -> float32 embeddings on the devices, [batch, dim]; any batch size."""
        devices = self.partitioner.batch_devices
        config: ModelConfig = self.model.config
        # Models that treat all tasks alike are told none: one program serves every task.
        told = task if config.query_tasks else None

        def encode(tokens: Tokens) -> jax.Array:
            count = len(tokens.ids)
            if count % devices:
                tokens = jax.tree.map(
                    lambda array: np.concatenate(
                        [array, np.repeat(array[-1:], -count % devices, axis=0)]
                    ),
                    tokens,
                )
            embeddings = embed(
                self.params,
                self.partitioner.put_batch(tokens),
                model=self.model,
                role=role,
                task=told,
            )
            return embeddings if len(embeddings) == count else embeddings[:count]

        return encode


# At module level, so that what is compiled serves every task, split and round of a comparison.
@functools.partial(jax.jit, static_argnames=("model", "role", "task"))
def embed(
    params: Any, tokens: Tokens, *, model: nn.Module, role: Role, task: str | None
) -> jax.Array:
    """Float32 embeddings [batch, dim] of tokens of one role."""
    encoded: Any = model.apply({"params": params}, tokens, role=role, task=task, method="encode")
    return encoded.embeddings


def load_model(model_dir: epath.PathLike, *, step: int | None = None) -> LoadedModel:
    """Opens a model directory that `taser train` wrote.

    On several hosts all must call it, since checkpoints are restored together.

    Args:
        model_dir: a directory or a gs:// address.
        step: which checkpoint; None means the best one by validation.
    """
    model_dir = epath.Path(model_dir)
    config = read_model_config(model_dir)
    model = build_model(config)
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()))
    shapes = abstract_params(model)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=partitioner.replicated),
        shapes,
    )
    checkpoints = _checkpoints(model_dir)
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
        vocabulary_dir=_on_this_machine(model_dir / VOCABULARY),
        step=int(step or 0),
        partitioner=partitioner,
    )


def _checkpoints(model_dir: epath.PathLike) -> Checkpoints:
    """A model directory's checkpoints, ranked by what its training was told to select by."""
    path = epath.Path(model_dir) / RUN_FILE
    facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    selection = Selection(facts.get("selection") or CheckpointConfig().selection.value)
    return Checkpoints(model_dir, CheckpointConfig(selection=selection))


def selected_checkpoint(model_dir: epath.PathLike) -> epath.Path:
    """The directory of the best checkpoint by validation, which commands take by default.

    Raises:
        ConfigError: there is none.
    """
    return _checkpoint(model_dir, lambda checkpoints: checkpoints.best_step)


def latest_checkpoint(model_dir: epath.PathLike) -> epath.Path:
    """The directory of the newest checkpoint.

    Raises:
        ConfigError: there is none.
    """
    return _checkpoint(model_dir, lambda checkpoints: checkpoints.latest_step)


def _checkpoint(
    model_dir: epath.PathLike, choose: Callable[[Checkpoints], int | None]
) -> epath.Path:
    checkpoints = _checkpoints(model_dir)
    step = choose(checkpoints)
    checkpoints.close()
    if step is None:
        raise ConfigError(
            "no finished checkpoint", where=str(model_dir), fix="train the model first"
        )
    return epath.Path(model_dir) / f"checkpoint_{step}"


def _on_this_machine(directory: epath.Path) -> pathlib.Path:
    """The directory; of one in a bucket, a copy. Vocabularies are read as local files."""
    if not is_remote(directory):
        return pathlib.Path(directory)
    copy = pathlib.Path(tempfile.mkdtemp(prefix="taser-vocabulary-"))
    for source in directory.iterdir():
        (copy / source.name).write_bytes(source.read_bytes())
    return copy


def read_model_config(model_dir: epath.PathLike) -> ModelConfig:
    """The configuration in a model directory's model.json."""
    path = epath.Path(model_dir) / MODEL_FILE
    if not path.is_file():
        raise ConfigError(
            "no model here",
            where=str(path),
            expected="a directory that `taser train` wrote",
            fix="train the model first, or correct MODEL_DIR",
        )
    return config_io.from_json(path.read_text(encoding="utf-8"), where=str(path))


def check_vocabulary(model: LoadedModel, tokens: TokenStore) -> None:
    """Refuses tokens of another vocabulary than the model was trained with.

    Raises:
        FingerprintError: naming both.
    """
    check_vocabulary_directory(model.vocabulary_dir, tokens)


def check_vocabulary_directory(directory: epath.PathLike, tokens: TokenStore) -> None:
    """The same for a model that is not opened: `directory` is its vocabulary's."""
    saved = epath.Path(directory) / "vocabulary.json"
    found = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else {}
    if "fingerprint" in found:
        require_equal(
            f"token store {tokens.directory}",
            {"vocabulary": tokens.metadata.vocabulary_fingerprint},
            {"vocabulary": found["fingerprint"]},
            f"tokenize with the model's vocabulary, {directory}",
        )
