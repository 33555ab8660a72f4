"""The registry of names: here, and in SeqIO's registries once it is imported."""

from __future__ import annotations

import sys
import types

from taser_jax.data.seqio_tasks.retrieval_task import (
    CollectionPassages,
    RetrievalMixture,
    RetrievalTask,
)
from taser_jax.storage.errors import ConfigError, how_to_install

Registered = RetrievalTask | CollectionPassages | RetrievalMixture
_here: dict[str, Registered] = {}
# Those that are in SeqIO's registries, too.
_in_seqio: set[str] = set()


def register(item: Registered) -> None:
    """Registers a task, passages or a mixture.

    Raises:
        ConfigError: the name is taken.
    """
    check_free(item.name)
    _here[item.name] = item
    _seqio_if_loaded()


def registered_here(name: str) -> Registered | None:
    """What was registered without SeqIO; None if nothing was."""
    _seqio_if_loaded()
    return _here.get(name)


def all_names() -> set[str]:
    """All names, SeqIO's included."""
    in_seqio = _seqio_if_loaded()
    return {*_here, *(in_seqio.registered() if in_seqio else ())}


def check_free(name: str) -> None:
    """Refuses a name that is taken.

    Raises:
        ConfigError: the name is taken.
    """
    if name in all_names():
        raise ConfigError(
            f"{name!r} is registered already",
            where="registration of tasks",
            expected="each name once",
            fix="choose another name, or remove the former with taser_jax.tasks.remove_task",
        )


def remove(name: str) -> None:
    """Removes a name, here and in SeqIO's registries."""
    _here.pop(name, None)
    _in_seqio.discard(name)
    if in_seqio := _seqio_if_loaded():
        in_seqio.remove(name)


def seqio(needed_by: str) -> types.ModuleType:
    """The module `in_seqio`, after registering with SeqIO everything that is registered here.

    Names that were removed from SeqIO's registries are removed here.

    Args:
        needed_by: what needs SeqIO, for the message.

    Raises:
        ConfigError: SeqIO or TensorFlow is not installed.
    """
    try:
        from taser_jax.data.seqio_tasks import in_seqio
    except ImportError as error:
        raise ConfigError(
            f"SeqIO or TensorFlow is not installed ({error})",
            where=needed_by,
            expected="both, for preprocessors, sources and rates that SeqIO runs",
            fix=how_to_install("tensorflow"),
        ) from error
    for name in _in_seqio - in_seqio.registered():
        _in_seqio.remove(name)
        _here.pop(name, None)
    for name in [name for name in _here if name not in _in_seqio]:
        _in_seqio.add(name)
        in_seqio.add(_here[name])
    return in_seqio


def _seqio_if_loaded() -> types.ModuleType | None:
    """`in_seqio` if SeqIO has been imported; nothing can be registered there otherwise."""
    return seqio("SeqIO's registries") if "seqio" in sys.modules else None
