"""A specialist's members for other programs: arrays, and its confidence in NumPy alone."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping

import numpy as np

from taser_jax.commands.export import ENSEMBLE, Part
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.confidence import check_temperatures
from taser_jax.systems.muf.ensemble_files import Ensemble

ARRAYS, SETTINGS, PROGRAM = "members.npz", "confidence.json", "confidence.py"

_PROGRAM = '''"""How sure a specialist is of a query (DPR-MUF, equations 4 and 5), in NumPy alone.

    from confidence import confidence
    w = confidence(query_vector, vectors_of_its_first_passages)

members.npz holds the members' kernels and biases, confidence.json the temperature.
"""

import json
import pathlib

import numpy as np

_HERE = pathlib.Path(__file__).parent
_MEMBERS = dict(np.load(_HERE / "members.npz"))
_SETTINGS = json.loads((_HERE / "confidence.json").read_text(encoding="utf-8"))


def members(query):
    """Every member's embedding of a query embedding. [dim] -> [members, dim]"""
    layers = len(_MEMBERS) // 2
    hidden = np.broadcast_to(query, (len(_MEMBERS["layers_0/bias"]), len(query)))
    for place in range(layers):
        kernel, bias = (_MEMBERS[f"layers_{place}/{name}"] for name in ("kernel", "bias"))
        hidden = np.einsum("mi,mio->mo", hidden, kernel) + bias
        if place < layers - 1:
            hidden = np.maximum(hidden, 0)
    return hidden


def confidence(query, passages, temperature=_SETTINGS["temperature"]):
    """w of a query embedding [dim], with its first passages' embeddings [k, dim]; 0 without any."""
    if not len(passages):
        return 0.0
    logits = members(query) @ np.asarray(passages).T / temperature
    logs = logits - logits.max(axis=1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    p = np.exp(logs)
    mean = p.mean(axis=0)
    ratios = np.where(p > 0, logs - np.log(np.where(mean > 0, mean, 1)), 0)
    return float(np.clip(1 - (p * ratios).sum(axis=1).mean() / np.log(len(p)), 0, 1))
'''


def open_members(directory: str, *, temperature: float | None, k: int, fingerprint: str) -> Part:
    """A model's members as a part of its export.

    Args:
        directory: what `taser ensemble` wrote.
        temperature: T, such as the fusion's temperature.json has it.
        k: number of passages that the softmaxes are over.
        fingerprint: the model's.

    Returns:
        What writes them into a directory.

    Raises:
        ConfigError: no temperature, or one that is not positive.
        FingerprintError: the ensemble belongs to another model.
    """
    if temperature is None:
        fix = "set T, such as FUSION_DIR/specialists/NAME/temperature.json has it"
        title = "an ensemble is exported without its temperature"
        raise ConfigError(title, where="export_model.temperature", fix=fix)
    check_temperatures([float(temperature)])
    ensemble = Ensemble.open(directory, fingerprints={"model": fingerprint})
    return functools.partial(
        write_members, params=ensemble.params, temperature=temperature, k=k, tasks=ensemble.tasks
    )


def write_members(
    directory: pathlib.Path,
    params: Mapping[str, Mapping[str, np.ndarray]],
    *,
    temperature: float,
    k: int,
    tasks: tuple[str, ...],
) -> None:
    """Writes members.npz, confidence.json and confidence.py, which needs NumPy and these two.

    Args:
        directory: directory of the export.
        params: layer -> kernel [members, in, out] and bias [members, out].
        temperature: T of the members' softmaxes.
        k: number of passages of the specialist's list that the softmaxes are over.
        tasks: tasks whose queries the members were trained on.
    """
    arrays = {
        f"{layer}/{name}": np.asarray(array)
        for layer, leaves in params.items()
        for name, array in leaves.items()
    }
    np.savez(directory / ARRAYS, allow_pickle=False, **arrays)
    settings = {"temperature": temperature, "k": k, "tasks": list(tasks)}
    (directory / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / PROGRAM).write_text(_PROGRAM, encoding="utf-8")


ENSEMBLE.register(open_members)
