"""Where training metrics go: a JSONL file that is exact across restarts, and TensorBoard."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence

from taser_jax.progress import logger
from taser_jax.training.loop import MetricWriter


class JsonlWriter:
    """One JSON object a line: `{"step": 20, "train/loss": 3.1, ...}`.

    A resumed run removes lines of steps that it will repeat, so each step stands there once.

    Args:
        path: the file; made with its folder.
        resume_step: steps after it are removed.
    """

    def __init__(self, path: str | pathlib.Path, *, resume_step: int = 0) -> None:
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = _lines_up_to(path, resume_step)
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            # A kill between two writes must not cost the history.
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line."""
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")

    def flush(self) -> None:
        """Hands the lines to the operating system."""
        self._file.flush()


def _lines_up_to(path: pathlib.Path, step: int) -> list[str]:
    """Whole lines of steps up to `step`; a killed process may have left half a line."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return kept


def make_writers(
    model_dir: str | pathlib.Path, *, resume_step: int, is_first_process: bool
) -> Sequence[MetricWriter]:
    """JSONL beside the checkpoints and, where clu and TensorFlow are installed, TensorBoard."""
    if not is_first_process:
        return ()
    writers: list[MetricWriter] = [
        JsonlWriter(pathlib.Path(model_dir) / "metrics.jsonl", resume_step=resume_step)
    ]
    try:
        from clu import metric_writers
    except ImportError:
        logger.info("clu is not installed: metrics go to metrics.jsonl only, not to TensorBoard")
        return writers
    writers.append(metric_writers.SummaryWriter(str(pathlib.Path(model_dir) / "train")))
    return writers
