"""Model directories: what lies beside the checkpoints, and models opened for encoding."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import jax
import numpy as np
from etils import epath
from jaxtyping import PyTree

from taser_jax.data.token_store.store import QueryNormalization, Titles, TokenStore
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner, placed
from taser_jax.models import parameters
from taser_jax.models.batch import EncoderInput, Role, static_task
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.fusion import FUSION_PARTS
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.typed_files import Natural, Positive, typed
from taser_jax.training.checkpoints import CheckpointConfig, Checkpoints, Selection, saved_steps
from taser_jax.training.state import TrainState, parameter_table

MODEL_FILE = "model.json"
RUN_FILE = "run.json"
CONFIG_FILE = "config.gin"
VOCABULARY = "vocabulary"


class RunFacts(TypedDict, total=False):
    """The fields of run.json that commands read; some have one value, or one for each task."""

    query_length: Positive
    passage_length: Positive
    query_lengths: dict[str, Positive]
    query_prompt: list[Natural] | dict[str, list[Natural]]
    query_normalization: QueryNormalization | dict[str, QueryNormalization]
    passage_prompt: list[Natural]
    titles: Titles
    selection: Selection
    train_from_block: Natural
    tsage_beta: float
    data_fingerprint: str
    collection_fingerprint: str
    settings: dict[str, object]


EncodeFn = Callable[[EncoderInput], jax.Array]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A dual encoder with its parameters, copied to each of this host's devices.

    Attributes:
        model: the module.
        params: its parameters.
        fingerprint: fingerprint of configuration and parameters; embeddings and indexes carry it.
        vocabulary_dir: the vocabulary it was trained with.
        step: the checkpoint it came from.
        partitioner: this host's devices.
    """

    model: DualEncoder
    params: PyTree
    fingerprint: str
    vocabulary_dir: pathlib.Path
    step: int
    partitioner: Partitioner

    @functools.cached_property
    def passage_fingerprint(self) -> str:
        """Fingerprint of what encodes passages."""
        return passage_fingerprint(self.model.config, self.params)

    def frozen(self, blocks: int) -> LoadedModel:
        """The same with its first blocks frozen: it then reads their states in place of tokens."""
        return dataclasses.replace(self, model=self.model.clone(frozen_blocks=blocks))

    def encode_fn(self, role: Role, *, task: str | None = None) -> EncodeFn:
        """Tokens -> float32 embeddings on the devices, [batch, dim]; any batch size."""
        static = static_task(self.model.query_tasks, task)

        def encode(tokens: EncoderInput) -> jax.Array:
            count = len(tokens.mask)
            embeddings = embed(
                self.params, self.put(tokens), model=self.model, role=role, task=static
            )
            return embeddings if len(embeddings) == count else embeddings[:count]

        return encode

    def put(self, tokens: EncoderInput) -> EncoderInput:
        """Any number of texts on the devices, the last repeated to give these equal shares."""
        missing = -len(tokens.mask) % self.partitioner.batch_devices
        if missing:
            tokens = jax.tree.map(
                lambda array: np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]),
                tokens,
            )
        return self.partitioner.put_batch(tokens)


def passage_fingerprint(config: ModelConfig, params: PyTree) -> str:
    """Fingerprint of what encodes passages: models that differ on the query side alone share it."""
    tower = params[config.tower_name(Role.PASSAGE, None)]
    own = {name: part for name, part in tower.items() if name not in FUSION_PARTS}
    return parameters.parameters_fingerprint(own, parameters.passage_json(config))


# At module level, so that one compiled program serves every task, split and round.
@functools.partial(jax.jit, static_argnames=("model", "role", "task"))
def embed(
    params: PyTree, tokens: EncoderInput, *, model: DualEncoder, role: Role, task: str | None
) -> jax.Array:
    """Float32 embeddings [batch, dim] of one role's texts, in any form that the model takes."""
    encoded: Any = model.apply({"params": params}, tokens, role=role, task=task, method="encode")
    return encoded.embeddings


def load_model(model_dir: artifacts.FilePath, *, step: int | None = None) -> LoadedModel:
    """Opens a model directory that `taser train` wrote.

    On several hosts all must call it, since checkpoints are restored together.

    Args:
        model_dir: a directory or a gs:// address.
        step: which checkpoint; None means the best one by validation.
    """
    config = read_model_config(model_dir)
    model = DualEncoder(config)
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()))
    checkpoints = _checkpoints(model_dir)
    step = checkpoints.best_step if step is None else step
    shapes = placed(parameters.abstract_params(model), partitioner.replicated)
    params = checkpoints.restore_params(shapes, step=step)
    checkpoints.close()
    vocabulary_dir = _on_this_machine(epath.Path(model_dir) / VOCABULARY)
    return hold_model(model, params, vocabulary_dir=vocabulary_dir, step=int(step or 0))


def hold_model(
    model: DualEncoder, params: PyTree, *, vocabulary_dir: artifacts.FilePath, step: int = 0
) -> LoadedModel:
    """Parameters from elsewhere, such as a pretrained checkpoint, copied to this host's devices.

    Args:
        model: the module.
        params: its parameters, NumPy or JAX arrays.
        vocabulary_dir: the vocabulary they belong to.
        step: the checkpoint they came from.
    """
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.local_devices()))
    placed = jax.device_put(params, partitioner.replicated)
    return LoadedModel(
        model=model,
        params=placed,
        fingerprint=parameters.parameters_fingerprint(
            placed, parameters.config_to_json(model.config)
        ),
        vocabulary_dir=pathlib.Path(vocabulary_dir),
        step=step,
        partitioner=partitioner,
    )


def _checkpoints(model_dir: artifacts.FilePath) -> Checkpoints:
    """A model directory's checkpoints, ranked by the measure its training selected by."""
    named = read_facts(model_dir).get("selection")
    selection = Selection(named or CheckpointConfig().selection.value)
    config = CheckpointConfig(selection=selection)
    return Checkpoints(model_dir, config, cleans_up=False)


def selected_checkpoint(model_dir: artifacts.FilePath) -> epath.Path:
    """The directory of the best checkpoint by validation, which commands take by default."""
    checkpoints = _checkpoints(model_dir)
    step = checkpoints.best_step
    checkpoints.close()
    return checkpoint_path(model_dir, step or 0)


def checkpoint_path(model_dir: artifacts.FilePath, step: int) -> epath.Path:
    """The directory of a step's checkpoint."""
    return epath.Path(model_dir) / f"checkpoint_{step}"


def checkpoint_steps(model_dir: artifacts.FilePath) -> list[int]:
    """Steps of all finished checkpoints, ascending.

    Raises:
        ConfigError: there is none.
    """
    steps = sorted(saved_steps(epath.Path(model_dir)))
    if not steps:
        fix = "train the model first"
        raise ConfigError("no finished checkpoint", where=str(model_dir), fix=fix)
    return steps


def _on_this_machine(directory: epath.Path) -> pathlib.Path:
    """The directory, or a local copy of one in a bucket: vocabularies are read as local files."""
    if not artifacts.is_remote(directory):
        return pathlib.Path(directory)
    copy = pathlib.Path(tempfile.mkdtemp(prefix="taser-vocabulary-"))
    for source in directory.iterdir():
        (copy / source.name).write_bytes(source.read_bytes())
    return copy


def read_model_config(model_dir: artifacts.FilePath) -> ModelConfig:
    """The configuration in a model directory's model.json."""
    path = epath.Path(model_dir) / MODEL_FILE
    if not path.is_file():
        expected = "a directory that `taser train` wrote"
        fix = "train the model first, or correct the path"
        raise ConfigError("no model here", where=str(path), expected=expected, fix=fix)
    checksums.check_directory(
        model_dir, fix=f"run `taser train` or `taser import` into {model_dir} again"
    )
    return parameters.read_config(path)


def check_vocabulary(directory: artifacts.FilePath, tokens: TokenStore) -> None:
    """Refuses tokens of another vocabulary than the one in a model's `vocabulary` directory.

    Raises:
        FingerprintError: naming both.
    """
    recorded = artifacts.read_json(epath.Path(directory) / "vocabulary.json", absent={})
    if "fingerprint" in recorded:
        artifacts.require_equal(
            f"token store {tokens.directory}",
            {"vocabulary": tokens.metadata.vocabulary_fingerprint},
            {"vocabulary": recorded["fingerprint"]},
            f"tokenize with the model's vocabulary, {directory}",
        )


def write_run_record(
    model_dir: artifacts.FilePath,
    *,
    model_config: ModelConfig,
    facts: Mapping[str, object],
    parameter_table: str,
    config_text: str,
    vocabulary: pathlib.Path | None,
) -> None:
    """Writes model.json, config.gin, model-info.txt, run.json and the vocabulary.

    Args:
        model_dir: a directory or a gs:// address; created where absent.
        model_config: the model.
        facts: facts about the run; JSON-able.
        parameter_table: every parameter with shape, axes and sharding.
        config_text: the Gin configuration as it was resolved.
        vocabulary: directory of the vocabulary, copied; None if it is there already.
    """
    directory = epath.Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (MODEL_FILE, parameters.config_to_json(model_config)),
        (CONFIG_FILE, config_text),
        ("model-info.txt", parameter_table + "\n"),
        (RUN_FILE, json.dumps(facts, indent=1) + "\n"),
    ):
        artifacts.write_text(directory / name, text)
    if vocabulary is not None:
        for source in sorted(vocabulary.rglob("*")):
            # The copies get a record of their own.
            if source.is_file() and source.name != checksums.FILE:
                target = directory / VOCABULARY / source.relative_to(vocabulary).as_posix()
                target.parent.mkdir(parents=True, exist_ok=True)
                artifacts.write_bytes(target, source.read_bytes())


def write_model(
    model_dir: artifacts.FilePath,
    model: DualEncoder,
    params: PyTree,
    *,
    facts: Mapping[str, object],
    partitioner: Partitioner,
    config_text: str = "",
) -> None:
    """Writes what `taser train` would leave at step 0, beside a vocabulary that is there already.

    Args:
        model_dir: a directory without a model.
        model: the module.
        params: its parameters.
        facts: further facts than the number of parameters, for run.json.
        partitioner: where the parameters are.
        config_text: written to config.gin.
    """
    checkpoints = Checkpoints(model_dir)
    state = TrainState(step=jax.numpy.zeros((), jax.numpy.int32), params=params, opt_state=())
    checkpoints.save(state, step=0, about={"pretrained": facts.get("pretrained")})
    checkpoints.close()
    axes = parameters.logical_axes(model)
    write_run_record(
        model_dir,
        model_config=model.config,
        facts={"parameters": f"{parameters.parameter_count(params):,}", **facts, "train_steps": 0},
        parameter_table=parameter_table(
            params, logical_axes=axes, shardings=partitioner.param_shardings(axes, params)
        ),
        config_text=config_text,
        vocabulary=None,
    )


def read_facts(model_dir: artifacts.FilePath) -> dict[str, Any]:
    """run.json without its settings; empty where a model was trained before it was written.

    Raises:
        DataError: it is no JSON object, or a field that commands read is not what it must be.
    """
    facts = _read_run(model_dir)
    return {name: fact for name, fact in facts.items() if fact is not None and name != "settings"}


def read_settings(model_dir: artifacts.FilePath) -> dict[str, object]:
    """Every setting of a model's training by its path, from run.json; empty where none was kept."""
    return _read_run(model_dir).get("settings", {})


def _read_run(model_dir: artifacts.FilePath) -> dict[str, Any]:
    path, again = epath.Path(model_dir) / RUN_FILE, "copy it again from where the model was trained"
    record = artifacts.read_json(path, fix=again, absent={})
    typed(record, RunFacts, where=os.fspath(path), fix=again)
    return record


def read_config_text(model_dir: artifacts.FilePath) -> str:
    """The Gin configuration that the model was trained with; empty where none was kept."""
    path = epath.Path(model_dir) / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""
