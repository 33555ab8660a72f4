"""Resumable stages: each is recorded with its inputs and outputs once it has finished."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from taser_jax.devices.hosts import first_host_only
from taser_jax.storage.artifacts import check_version, read_json, write_json
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """The inputs and outputs of a finished stage.

    Attributes:
        name: the stage.
        inputs: what it depended on: settings and fingerprints, JSON-able.
        outputs: what it reported, JSON-able.
        seconds: duration of the run that finished it, without interrupted runs before.
    """

    name: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    seconds: float


class Stages:
    """The stages of one pipeline directory, recorded as `stages/<name>.json`.

    A recorded stage is not run again. An interrupted one has no record and runs again; training
    and encoding inside it resume from their own files. Several hosts must share the directory: all
    of them run every stage, and host 0 keeps the records.

    Args:
        directory: the pipeline's folder.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        self._records = self.directory / "stages"

    def run(
        self,
        name: str,
        function: Callable[[], Mapping[str, Any] | None],
        *,
        inputs: Mapping[str, object],
    ) -> Mapping[str, Any]:
        """Runs a stage, or returns what it reported when it was run.

        Args:
            name: unique in the pipeline; also its file name.
            function: does the work and returns JSON-able outputs.
            inputs: everything the outputs depend on.

        Returns:
            The stage's outputs.

        Raises:
            ConfigError: it was run with other inputs; says which.
        """
        path = self._records / f"{name}.json"
        wanted = json.loads(json.dumps(inputs, sort_keys=True))
        record = first_host_only(self._finished)(name, wanted)
        if record is not None:
            logger.info("%s: reused (took %.1f s)", name, record.seconds)
            return record.outputs
        start = time.monotonic()
        with phase(name):
            outputs = json.loads(json.dumps(function() or {}))
        record = StageRecord(name, wanted, outputs, time.monotonic() - start)
        # All hosts return host 0's outputs: times, for example, differ.
        return first_host_only(self._write)(path, record).outputs

    def _finished(self, name: str, wanted: Mapping[str, object]) -> StageRecord | None:
        """The record of a finished stage, which must have these inputs; None if unfinished."""
        path = self._records / f"{name}.json"
        if not path.exists():
            return None
        record = self.record(name)
        self._check_inputs(path, record.inputs, wanted)
        return record

    def record(self, name: str) -> StageRecord:
        """The record of a finished stage."""
        path = self._records / f"{name}.json"
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
        self, path: pathlib.Path, found: Mapping[str, object], wanted: Mapping[str, object]
    ) -> None:
        for key in sorted(found.keys() | wanted.keys()):
            if found.get(key) != wanted.get(key):
                raise ConfigError(
                    f"{key} was {found.get(key)!r} when this stage ran, now {wanted.get(key)!r}",
                    where=str(path),
                    expected="the settings this directory was begun with",
                    fix=f"choose another directory, or delete {self.directory}",
                )

    def _write(self, path: pathlib.Path, record: StageRecord) -> StageRecord:
        write_json(path, {"format_version": FORMAT_VERSION, **dataclasses.asdict(record)})
        return record
