"""Runs the real `taser train` on the tiny store in a process of its own."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tiny_training

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of a command in a process of its own, whose compiled programs `folder` keeps."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@dataclasses.dataclass(frozen=True)
class TinyCommand:
    """`python -m taser_jax.cli.main train` with everything but MODEL_DIR settled.

    Attributes:
        folder: holds the Gin file and the compilation cache.
        token_store: from `tiny_training.write_token_store`.
        train_steps: TRAIN_STEPS.
    """

    folder: pathlib.Path
    token_store: pathlib.Path
    train_steps: int

    def prepare(self) -> None:
        (self.folder / "tiny.gin").write_text(tiny_training.GIN_FILE)

    def start(
        self, model_dir: pathlib.Path, *bindings: str, **streams: Any
    ) -> subprocess.Popen[str]:
        """Starts it; `streams` are further arguments of `subprocess.Popen`."""
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "taser_jax.cli.main", "train"),
                f"--gin_file={self.folder / 'tiny.gin'}",
                f"--gin.MODEL_DIR={model_dir}",
                f"--gin.TOKEN_STORE={self.token_store}",
                f"--gin.TRAIN_STEPS={self.train_steps}",
                *bindings,
            ],
            env=environment(self.folder),
            cwd=self.folder,
            text=True,
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams,
        )

    def run(self, model_dir: pathlib.Path, *bindings: str) -> subprocess.CompletedProcess[str]:
        process = self.start(model_dir, *bindings)
        _, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


def final_state(model_dir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint: parameters, moments, counters; by path."""
    path = model_dir.resolve() / f"checkpoint_{step}" / "state"
    with ocp.PyTreeCheckpointer() as reader:
        as_arrays = jax.tree.map(
            lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray),
            reader.metadata(path).item_metadata.tree,
        )
        tree = reader.restore(path, restore_args=as_arrays)
    return {name: np.asarray(value) for name, value in ocp.tree.to_flat_dict(tree, sep="/").items()}


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
