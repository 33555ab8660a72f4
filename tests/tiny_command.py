"""What `taser train` leaves, to be compared bit for bit."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import orbax.checkpoint as ocp


def final_state(model_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint: parameters, moments, counters; by path."""
    path = model_dir.resolve() / f"checkpoint_{step}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        as_arrays = jax.tree.map(
            lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray),
            reader.metadata(path).item_metadata.tree,
        )
        tree = reader.restore(path, restore_args=as_arrays)
    flat = ocp.tree.to_flat_dict(tree, sep="/")
    return {name: np.asarray(value) for name, value in flat.items()}


def metrics_by_step(model_dir: pathlib.Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl without what covers all steps since the last line; no step may be twice."""
    measured = ("per_second", "utilisation", "padding")
    metrics: dict[int, dict[str, float]] = {}
    for line in (model_dir / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        assert step not in metrics, f"step {step} is written twice"
        metrics[step] = {k: v for k, v in values.items() if not k.endswith(measured)}
    return metrics
