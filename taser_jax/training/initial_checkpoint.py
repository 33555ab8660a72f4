"""Starts a model from another's checkpoint; the model may have more towers than the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from taser_jax.training.checkpoint_directory import restore_params_from, saved_params

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
    wanted = {source: abstract_params[tower] for tower, source in reversed(sources.items())}
    restored = restore_params_from(checkpoint, abstract_params=wanted)
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
