"""Resumable stages: each is recorded with its inputs and outputs once it has finished."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from taser_jax.commands.pipelines.stage_inputs import FINGERPRINT, relative, stage_inputs
from taser_jax.devices.hosts import first_host_only
from taser_jax.storage.artifacts import check_version, read_json, write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.settings import parts_of, to_plain

FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """The inputs and outputs of a finished stage.

    Attributes:
        name: the stage.
        inputs: its function's arguments, and the fingerprints of artefacts among them, JSON-able.
        outputs: what its function returned, JSON-able.
        seconds: duration of the run that finished it, without interrupted runs before.
    """

    name: str
    inputs: Mapping[str, Any]
    outputs: Any
    seconds: float


class Stages:
    """The stages of one pipeline directory, recorded as `stages/<name>.json`.

    A recorded stage is not run again. An interrupted one has no record and runs again; training
    and encoding inside it resume from their own files. Several hosts must share the directory: all
    of them run every stage, and host 0 keeps the records. Records name places relative to the
    directory, which can therefore be moved once it is finished.

    Args:
        directory: the pipeline's folder.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        self._records = self.directory / "stages"

    def run(self, name: str, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """Runs a stage, or returns what its function returned when it was run.

        Example:
            `stages.run("train", train, model_dir=root / "model", training=training)` calls
            `train(model_dir="out/model", training=training)`, and calls it no second time.

        Args:
            name: unique in the pipeline; also its file name.
            function: does the work, from its arguments and the artefacts they name alone; returns
                JSON-able values, dataclasses or paths.
            arguments: of the function. Paths are handed on as strings.

        Returns:
            What the function returned, as JSON values.

        Raises:
            ConfigError: it was run with other arguments or on other artefacts; says which.
        """
        inputs, record = first_host_only(self._begin)(name, function, arguments)
        if record is not None:
            logger.info("%s: reused (took %.1f s)", name, record.seconds)
            return record.outputs
        start = time.monotonic()
        with phase(name):
            outputs = self._plain(function(**_with_strings(arguments)))
        record = StageRecord(name, inputs, outputs, time.monotonic() - start)
        # All hosts return host 0's outputs: times, for example, differ.
        return first_host_only(self._write)(record).outputs

    def _begin(
        self, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], StageRecord | None]:
        """A stage's inputs, and the record of it with these inputs; None if it is unfinished."""
        inputs = stage_inputs(function, arguments, self.directory)
        if not self._path(name).exists():
            return inputs, None
        record = self.record(name)
        self._check_inputs(self._path(name), record.inputs, inputs)
        return inputs, record

    def _path(self, name: str) -> pathlib.Path:
        return self._records / f"{name}.json"

    def record(self, name: str) -> StageRecord:
        """The record of a finished stage."""
        path = self._path(name)
        values = read_json(path)
        again = "use a new directory, or the taser_jax version that wrote it"
        check_version(values, FORMAT_VERSION, where=path, fix=again, error=ConfigError)
        del values["format_version"]
        return StageRecord(**values)

    def finished(self) -> list[str]:
        """Names of the finished stages, in the order in which they finished."""
        paths = sorted(self._records.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem for path in paths]

    def _check_inputs(
        self, path: pathlib.Path, recorded: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> None:
        # What was set explains a changed artefact, and not the other way round.
        keys = sorted(recorded.keys() | inputs.keys(), key=lambda key: (FINGERPRINT in key, key))
        for key in keys:
            place = key.removesuffix(FINGERPRINT)
            is_here = place != key and place in recorded and place in inputs
            # An artefact in the directory that was not there yet, or has been deleted since.
            if is_here and not (key in recorded and key in inputs):
                continue
            if recorded.get(key) != inputs.get(key):
                raise ConfigError(
                    f"{key} was {recorded.get(key)!r} when this stage ran, now {inputs.get(key)!r}",
                    where=str(path),
                    expected="the settings this directory was begun with",
                    fix=f"choose another directory, or delete {self.directory}",
                )

    def _write(self, record: StageRecord) -> StageRecord:
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(record)}
        write_json(self._path(record.name), content)
        return record

    def _plain(self, value: object) -> Any:
        """Outputs as JSON values, with places relative to the directory."""
        if isinstance(value, os.PathLike):
            place = os.fspath(value)
            return relative(place, self.directory) or place
        parts = parts_of(value)
        if parts is not None:
            return {name: self._plain(part) for name, part in parts.items()}
        if isinstance(value, list | tuple):
            return [self._plain(part) for part in value]
        return to_plain(value)


def _with_strings(value: Any) -> Any:
    """Arguments with paths as strings, which is what commands take."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _with_strings(part) for name, part in value.items()}
    return [_with_strings(part) for part in value] if isinstance(value, list) else value
