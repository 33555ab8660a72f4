"""The models that `taser analyze` compares: their checkpoints, restored onto the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from jaxtyping import PyTree

from taser_jax.assembly import model_directory
from taser_jax.assembly.data import fit_vocabulary
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.partitioning import Partitioner, placed
from taser_jax.models import config_io
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, logical_axes
from taser_jax.storage.errors import ConfigError
from taser_jax.training.checkpoint_directory import restore_params_from


@dataclasses.dataclass(frozen=True)
class AnalyzedModel:
    """One model directory and the steps to analyse.

    Attributes:
        name: its name in tables and figures.
        directory: the model directory, from `taser train`.
        model: the dual encoder.
        params: shapes, dtypes and shardings of its parameters.
        steps: steps of the checkpoints to analyse, ascending.
        configuration: its configuration as JSON; models with equal ones share compiled programs.
        facts: content of run.json.
    """

    name: str
    directory: epath.Path
    model: DualEncoder
    params: PyTree
    steps: tuple[int, ...]
    configuration: str
    facts: Mapping[str, Any]

    def checkpoint(self, step: int) -> epath.Path:
        """The directory of a step's checkpoint."""
        return model_directory.checkpoint_path(self.directory, step)

    def restore(self, step: int) -> PyTree:
        """The parameters at a step, on the devices."""
        return restore_params_from(self.checkpoint(step), abstract_params=self.params)


def open_models(
    model_dirs: Mapping[str, str] | Sequence[str] | str,
    *,
    steps: Sequence[int] | None,
    store: TokenStore,
    partitioner: Partitioner,
) -> list[AnalyzedModel]:
    """Opens and checks all models; reads no parameters yet.

    Args:
        model_dirs: name -> directory; or directories, each named after its last part.
        steps: steps to analyse in every model; None means all checkpoints.
        store: the token store; must have the models' vocabulary.
        partitioner: decides the shardings.

    Raises:
        ConfigError: no model, a name twice, no model in a directory, or no such step.
        FingerprintError: the store has another vocabulary.
    """
    return [
        _open(name, directory, steps, store=store, partitioner=partitioner)
        for name, directory in _named(model_dirs).items()
    ]


def _named(model_dirs: Mapping[str, str] | Sequence[str] | str) -> dict[str, str]:
    if isinstance(model_dirs, Mapping):
        named = dict(model_dirs)
    else:
        directories = [model_dirs] if isinstance(model_dirs, str) else list(model_dirs)
        named = {epath.Path(directory).name: directory for directory in directories}
        if len(named) < len(directories):
            raise ConfigError(
                "two model directories of the same name",
                where="MODEL_DIR",
                expected="distinct names",
                fix="give names: {'naive': 'first/model', 'T-SAGE': 'second/model'}",
            )
    if not named:
        raise ConfigError("no model directory", where="MODEL_DIR", fix="name at least one")
    return named


def _open(
    name: str,
    model_dir: str,
    steps: Sequence[int] | None,
    *,
    store: TokenStore,
    partitioner: Partitioner,
) -> AnalyzedModel:
    directory = epath.Path(model_dir)
    config = model_directory.read_model_config(directory)
    model_directory.check_vocabulary_directory(directory / model_directory.VOCABULARY, store)
    fit_vocabulary(config, store)
    model = DualEncoder(config)
    shapes = abstract_params(model)
    return AnalyzedModel(
        name=name,
        directory=directory,
        model=model,
        params=placed(shapes, partitioner.param_shardings(logical_axes(model), shapes)),
        steps=_steps(directory, steps),
        configuration=config_io.to_json(config),
        facts=model_directory.read_facts(directory),
    )


def _steps(directory: epath.Path, wanted: Sequence[int] | None) -> tuple[int, ...]:
    there = model_directory.checkpoint_steps(directory)
    missing = [step for step in wanted or () if step not in there]
    if missing:
        raise ConfigError(
            f"no checkpoint of step {', '.join(map(str, missing))}",
            where=str(directory),
            expected=f"some of {', '.join(map(str, there))}",
            fix="correct analyze.steps; `--gin.CheckpointConfig.keep_latest=1000` makes "
            "`taser train` keep all checkpoints, one every CHECKPOINT_PERIOD steps",
        )
    return tuple(sorted(set(wanted))) if wanted else tuple(there)
