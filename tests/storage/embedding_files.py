"""Finished directories of embeddings."""

import pathlib

import numpy as np

from taser_jax.storage import artifacts


def embedded(directory: pathlib.Path, rows: np.ndarray, **changed: object) -> pathlib.Path:
    """A finished directory of these embeddings, whose metadata may say something else."""
    metadata = {"kind": "embeddings", "format_version": 1, "fingerprints": {"model": "m"}}
    sizes = {"num_rows": len(rows), "dim": rows.shape[1], "shard_rows": 65536, "dtype": "float32"}
    path = directory / "embeddings-00000-of-00001.npy"
    with artifacts.replacing(path) as scratch, open(scratch, "wb") as file:
        np.save(file, rows)
    artifacts.write_json(directory / artifacts.METADATA, {**metadata, **sizes, **changed})
    return directory
