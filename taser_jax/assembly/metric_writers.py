"""Where training metrics go: a JSONL file that is exact across restarts, and TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from etils import epath

from taser_jax.artifacts import is_remote, write_text
from taser_jax.progress import logger
from taser_jax.training.loop import MetricWriter


class JsonlWriter:
    """One JSON object per line: `{"step": 20, "train/loss": 3.1, ...}`.

    A resumed run removes the lines of steps that it will repeat, so each step occurs once. Objects
    in a bucket cannot be appended to, so each flush rewrites the whole file there.

    Args:
        path: the file, local or gs://; made with its folder.
        resume_step: steps after it are removed.
    """

    def __init__(self, path: epath.PathLike, *, resume_step: int = 0) -> None:
        self._path = epath.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_up_to(self._path, resume_step) if self._path.exists() else []
        self._lines: list[str] | None = kept if is_remote(self._path) else None
        if self._lines is not None:
            return
        if kept or self._path.exists():
            write_text(self._path, "".join(kept))
        self._file = self._path.open("a", encoding="utf-8")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line."""
        line = json.dumps({"step": step, **scalars}) + "\n"
        if self._lines is None:
            self._file.write(line)
        else:
            self._lines.append(line)

    def flush(self) -> None:
        """Writes the lines to the file, or to the bucket."""
        if self._lines is None:
            self._file.flush()
        else:
            self._path.write_text("".join(self._lines), encoding="utf-8")


def _lines_up_to(path: epath.Path, step: int) -> list[str]:
    """Whole lines of steps up to `step`; a killed process may have left half a line."""
    kept = []
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return kept


def make_writers(
    model_dir: epath.PathLike, *, resume_step: int, is_first_process: bool
) -> Sequence[MetricWriter]:
    """JSONL beside the checkpoints and, where clu and TensorFlow are installed, TensorBoard."""
    if not is_first_process:
        return ()
    writers: list[MetricWriter] = [
        JsonlWriter(epath.Path(model_dir) / "metrics.jsonl", resume_step=resume_step)
    ]
    try:
        from clu import metric_writers
    except ImportError:
        logger.info("clu is not installed: metrics go to metrics.jsonl only, not to TensorBoard")
        return writers
    writers.append(metric_writers.SummaryWriter(str(epath.Path(model_dir) / "train")))
    return writers
