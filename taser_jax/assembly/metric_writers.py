"""Where training metrics go: JSONL that is exact across restarts, and TensorBoard."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from taser_jax.storage.artifacts import is_remote, write_text
from taser_jax.storage.progress import logger
from taser_jax.training.loop import MetricWriter


class JsonlWriter:
    """One JSON object per line: `{"step": 20, "train/loss": 3.1, ...}`.

    A resumed run removes the lines of steps that it will repeat, so each step occurs once. Objects
    in a bucket cannot be appended to, so each line rewrites the whole file there.

    Args:
        path: the file, local or gs://; created with its folder.
        resume_step: lines of later steps are removed.
    """

    def __init__(self, path: epath.PathLike, *, resume_step: int = 0) -> None:
        self._path = epath.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines_up_to(self._path, resume_step) if self._path.exists() else []
        self._lines: list[str] | None = lines if is_remote(self._path) else None
        if self._lines is not None:
            return
        if lines or self._path.exists():
            write_text(self._path, "".join(lines), recorded=False)
        self._file = self._path.open("a", encoding="utf-8")

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Appends one line."""
        line = json.dumps({"step": step, **scalars}) + "\n"
        if self._lines is None:
            self._file.write(line)
            self._file.flush()
        else:
            self._lines.append(line)
            self._path.write_text("".join(self._lines), encoding="utf-8")


def _lines_up_to(path: epath.Path, step: int) -> list[str]:
    """Whole lines of steps up to `step`; a killed process may have left half a line."""
    lines = []
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return lines


class EventWriter:
    """Writes TensorBoard's event files with its own record writer, which needs no TensorFlow.

    Args:
        folder: the files' folder, local or gs://; created where absent.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import record_writer

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}"
        path = epath.Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _Object(path) if is_remote(path) else path.open("wb")
        self._records = record_writer.RecordWriter(file)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one event with all scalars."""
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
        ]
        summary = self._summary(value=values)
        self._add(self._event(wall_time=time.time(), step=step, summary=summary))
        self._records.flush()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class _Object(io.BytesIO):
    """An object in a bucket, which cannot be appended to: each flush writes all of it."""

    def __init__(self, path: epath.Path) -> None:
        super().__init__()
        self._path = path

    def flush(self) -> None:
        self._path.write_bytes(self.getvalue())


def make_writers(
    model_dir: epath.PathLike, *, resume_step: int, is_first_process: bool
) -> Sequence[MetricWriter]:
    """JSONL beside the checkpoints, and TensorBoard's events where that is installed."""
    if not is_first_process:
        return ()
    model_dir = epath.Path(model_dir)
    writers: list[MetricWriter] = [
        JsonlWriter(model_dir / "metrics.jsonl", resume_step=resume_step)
    ]
    try:
        writers.append(EventWriter(model_dir / "train"))
    except ImportError:
        logger.info("tensorboard is not installed: metrics go to metrics.jsonl only")
    return writers
