"""One saved checkpoint: checks that it is complete, lists its parameters and restores it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from etils import epath, epy
from jaxtyping import PyTree

from taser_jax.models.parameters import check_same_parameters
from taser_jax.storage import checksums
from taser_jax.storage.artifacts import is_remote
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.progress import logger
from taser_jax.training.state import TrainState

with epy.lazy_imports():
    import orbax.checkpoint as ocp

PREFIX = "checkpoint"
_STATE = "state"
# What Orbax always writes.
_STATE_FILES = ("_METADATA", "manifest.ocdbt")


def absolute_path(path: str | os.PathLike[str]) -> epath.Path:
    """The absolute path that Orbax requires; a bucket's address already is one."""
    place = epath.Path(path)
    return place if is_remote(place) else place.resolve()


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Checks that no file of a `checkpoint_N` directory is missing or damaged.

    Raises:
        DataError: naming the file, and the checkpoint before this one.
    """
    path = absolute_path(checkpoint)
    if not path.is_dir():
        return
    before = max((step for step in _steps(path.parent) if step < _step(path)), default=None)
    fix = (
        f"take the checkpoint before it, {PREFIX}_{before}: `taser train` resumes from it by "
        f"itself, other commands with step={before}"
        if before is not None
        else "there is no checkpoint before it: delete it and train again"
    )
    checksums.check_directory(path, fix=fix)
    for name in (_STATE, *(f"{_STATE}/{file}" for file in _STATE_FILES)):
        if not (path / name).exists():
            raise DataError("missing", where=str(path / name), fix=fix)
    # Orbax does not wait for the disk: its files are synced before their record is written.
    for file in checksums.unrecorded(path):
        if not file.stat().length:
            raise DataError("empty, as after a power cut", where=str(file), fix=fix)


def set_aside_damaged(model_dir: str | os.PathLike[str]) -> list[str]:
    """Renames damaged checkpoints that are newer than the newest whole one, and warns of each.

    A run that resumes from the whole one repeats the steps in between, to the same bits. If none is
    whole, and none had been recorded yet, it begins again.

    Args:
        model_dir: the directory with the checkpoints.

    Returns:
        The new paths.

    Raises:
        DataError: all checkpoints are damaged, some after they had been recorded; none was renamed.
    """
    directory = absolute_path(model_dir)
    damaged: list[tuple[epath.Path, DataError]] = []
    for step in sorted(_steps(directory), reverse=True):
        try:
            check_whole(directory / f"{PREFIX}_{step}")
        except DataError as error:
            damaged.append((directory / f"{PREFIX}_{step}", error))
            continue
        goes_on = f"resumes from {PREFIX}_{step}"
        break
    else:
        if any(checksums.read(path) for path, _ in damaged):
            raise damaged[0][1]
        goes_on = "begins again"
    renamed = []
    for path, damage in damaged:
        aside = path.with_name(f"damaged_{path.name}")
        if aside.exists():
            aside.rmtree()
        path.rename(aside)
        renamed.append(str(aside))
        logger.warning(
            "DAMAGED CHECKPOINT: %s: %s; it is now %s, and training %s",
            *(damage.where, damage.problem, aside.name, goes_on),
        )
    return renamed


def _steps(directory: epath.Path) -> list[int]:
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return [int(match[1]) for name in names if (match := re.fullmatch(rf"{PREFIX}_(\d+)", name))]


def _step(checkpoint: epath.Path) -> int:
    return int(checkpoint.name.rpartition("_")[2]) if PREFIX in checkpoint.name else 0


def saved_params(checkpoint: str | os.PathLike[str]) -> PyTree:
    """The shapes of the parameters in one `checkpoint_N` directory; no array is read.

    Raises:
        ConfigError: there is no finished checkpoint.
    """
    path = absolute_path(checkpoint) / _STATE
    check_whole(path.parent)
    if not path.exists():
        fix = "check the path; a directory that ends in .orbax-checkpoint-tmp is unfinished"
        raise ConfigError("no checkpoint here", where=str(checkpoint), fix=fix)
    with ocp.PyTreeCheckpointer() as reader:
        return reader.metadata(path).item_metadata.tree["params"]


def restore_params_from(checkpoint: str | os.PathLike[str], *, abstract_params: PyTree) -> PyTree:
    """Restores the parameters of one `checkpoint_N` directory without its optimiser state."""
    check_same_parameters(
        saved_params(checkpoint),
        abstract_params,
        where=str(checkpoint),
        fix="use the model configuration that the checkpoint was trained with (model.json)",
    )
    path = absolute_path(checkpoint) / _STATE
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item={"params": abstract_params},
                restore_args={
                    "params": ocp.checkpoint_utils.construct_restore_args(abstract_params)
                },
                partial_restore=True,
            ),
        )
    return restored["params"]


def state_dict(state: TrainState) -> dict[str, PyTree]:
    """The fields of a state that are saved, which are those that are not None."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if value is not None}


_TIED = "encoder"
_QUERY = "query_encoder"


def restore_initial_params(
    checkpoint: str | os.PathLike[str], *, abstract_params: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """Parameters of one `checkpoint_N` directory; a model with more towers gets copies.

    A tower that the checkpoint lacks is copied: a task's query tower from `query_encoder`, and
    any tower from `encoder` if there is no other source.

    Example:
        checkpoint: encoder -> model: query_encoder_nq, query_encoder_fever, passage_encoder,
        all three copies of it.

    Args:
        checkpoint: a directory that a training of ours wrote.
        abstract_params: tower -> shapes, dtypes and shardings of its parameters
            (jax.ShapeDtypeStruct).

    Returns:
        tower -> parameters; no two towers share a buffer.

    Raises:
        ConfigError: no checkpoint, a tower of it that is not used, or parameters that do not fit.
    """
    saved = saved_params(checkpoint)
    sources = {tower: _source(tower, saved) for tower in abstract_params}
    # Towers of one source have the same shapes and shardings: the first one's serve all.
    params_of_source = {
        source: abstract_params[tower] for tower, source in reversed(sources.items())
    }
    restored = restore_params_from(checkpoint, abstract_params=params_of_source)
    params, taken = {}, set()
    for tower, source in sources.items():
        # An array of its own for every parameter: the optimiser donates them.
        is_copy = source in taken
        params[tower] = jax.tree.map(jnp.copy, restored[source]) if is_copy else restored[source]
        taken.add(source)
    return params


def _source(tower: str, saved: Mapping[str, PyTree]) -> str:
    """The saved tower that a tower starts from; its own name where there is none."""
    if tower in saved:
        return tower
    if tower.startswith(f"{_QUERY}_") and _QUERY in saved:
        return _QUERY
    return _TIED if _TIED in saved else tower
