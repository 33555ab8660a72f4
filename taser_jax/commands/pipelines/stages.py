"""Resumable stages: each is recorded with its inputs and outputs once it has finished.

What a stage depends on: the arguments of its function, and the fingerprints of its artefacts.

{"training.seed": 0, "token_store.fingerprint": "f1d0149f7140d346",
"negatives_dirs.0": "bm25/negatives", "negatives_dirs.0.fingerprint": "03c5c1f0a25b6a11"}
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from taser_jax.assembly.data import MIXTURE_FILE
from taser_jax.commands.tokenize import collection_of
from taser_jax.data.collections.store import SPLITS, collection_directory
from taser_jax.devices.hosts import first_host_only, keep_compiled_programs, written_by
from taser_jax.interop.hub import weights_digest
from taser_jax.storage import artifacts, checksums
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.progress import logger, phase
from taser_jax.storage.typed_files import parts_of, read_typed, to_plain

FORMAT_VERSION = 2
FINGERPRINT = ".fingerprint"
# Arguments and fields with these names hold places of artefacts, and so does all below them.
_PLACE = re.compile(r".*_dirs?|.*_checkpoint|token_store|vocabulary|.*_embeddings|memories")
# A training's token store also has its mixture's weights, which another tokenising may change.
_TRAINED_ON, _OF_MIXTURE = "data.token_store", f"{FINGERPRINT}.weights"
# Pretrained weights: a folder, which may have others by now, or a name.
_WEIGHTS = re.compile(r"\bpretrained\.(passage_)?source$")
# What is printed or traced changes no result; embeddings shared by text are those that
# encoding would give; queries that were not encoded are encoded when they are searched; what a row
# says beside its figures, such as seconds, follows from the stages before it.
NO_INPUTS = frozenset(
    {
        *("checkpoint_minutes", "config_text", "details", "dry_run", "log_period"),
        *("query_splits", "shared_embeddings"),
    }
)

_Given = dict[str, Any]
"""All arguments of a stage's function, by name."""


class _Place(str):
    """A path among a stage's arguments, whatever its name."""


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
    inputs: dict[str, object]
    outputs: Any = None
    seconds: float = 0.0


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

    def run(self, name: str, function: Callable[..., object], /, **arguments: Any) -> Any:
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
            outputs = function(**_with_strings(arguments))
        plain = to_plain(_with_strings(outputs, self._in_directory))
        record = StageRecord(name, inputs, plain, time.monotonic() - start)
        # All hosts return host 0's outputs: times, for example, differ.
        return first_host_only(self._write)(record).outputs

    def _in_directory(self, path: os.PathLike[str]) -> str:
        return relative(os.fspath(path), self.directory) or os.fspath(path)

    def _begin(
        self, name: str, function: Callable[..., object], arguments: Mapping[str, object]
    ) -> tuple[dict[str, object], StageRecord | None]:
        """A stage's inputs, and the record of it with these inputs; None if it is unfinished."""
        inputs = stage_inputs(function, arguments, self.directory)
        if not self._path(name).exists():
            return inputs, None
        record = self.record(name)
        # What was set explains a changed artefact, and not the other way round.
        keys = sorted(record.inputs | inputs, key=lambda key: (FINGERPRINT in key, key))
        for key in keys:
            place = key.removesuffix(".weights" if key.endswith(_OF_MIXTURE) else FINGERPRINT)
            is_here = place != key and place in record.inputs and place in inputs
            # An artefact in the directory that was not there yet, or has been deleted since.
            if is_here and not (key in record.inputs and key in inputs):
                continue
            before, now = record.inputs.get(key), inputs.get(key)
            if before != now:
                problem = f"{key} was {before!r} when this stage ran, now {now!r}"
                fix = f"choose another directory, or delete {self.directory}"
                raise ConfigError(problem, where=str(self._path(name)), fix=fix)
        return inputs, record

    def _path(self, name: str) -> pathlib.Path:
        return self._records / f"{name}.json"

    def record(self, name: str) -> StageRecord:
        """The record of a finished stage."""
        again = "use a new directory, or the taser_jax version that wrote it"
        return read_typed(self._path(name), StageRecord, fix=again, version=FORMAT_VERSION)

    def finished(self) -> set[str]:
        """Names of the finished stages."""
        return {path.stem for path in self._records.glob("*.json")}

    def _write(self, record: StageRecord) -> StageRecord:
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(record)}
        artifacts.write_json(self._path(record.name), content)
        return record


@contextlib.contextmanager
def pipeline_records(
    output_dir: artifacts.FilePath, config_text: str
) -> Iterator[Callable[[str, str], None]]:
    """Keeps config.gin and other texts in a pipeline's folder; its steps share compiled programs.

    A run that is refused, as its settings differ from those of the stages that are there, leaves
    their record alone: what is there already is replaced at the end.

    Yields:
        Takes the name and the text of a further file.

    Raises:
        StorageError: the folder cannot be written.
    """
    texts: dict[pathlib.Path, str] = {}

    def record(name: str, text: str) -> None:
        path = pathlib.Path(output_dir) / name
        texts[path] = text
        if not path.exists():
            artifacts.write_text(path, text)

    record("config.gin", config_text)
    keep_compiled_programs(output_dir)
    yield record
    for path, text in texts.items():
        artifacts.write_text(path, text)


def _with_strings(value: object, of_path: Callable[[Any], str] = os.fspath) -> Any:
    """Arguments or outputs with paths as strings, which is what commands take."""
    if isinstance(value, os.PathLike):
        return of_path(value)
    if isinstance(value, Mapping):
        return {name: _with_strings(part, of_path) for name, part in value.items()}
    return [_with_strings(part, of_path) for part in value] if isinstance(value, list) else value


def stage_inputs(
    function: Callable[..., object], arguments: Mapping[str, object], root: str | os.PathLike[str]
) -> dict[str, object]:
    """The arguments of a stage's function as JSON values, one path per setting.

    A place below `root` is written relative to it, so that `root` can be moved; any other artefact
    is known by its fingerprint alone, so that it can be moved, too. What the function itself
    writes (`writes`) has no fingerprint, and neither has what is not there yet.

    Example:
        `stage_inputs(encode, {"model_dir": "out/model", "token_store": "tokens", ...}, "out")`
        -> {"model_dir": "model", "model_dir.fingerprint": "...", "token_store.fingerprint": ...}

    Args:
        function: the stage's function.
        arguments: its arguments; those left out have their defaults.
        root: the pipeline's folder.

    Returns:
        Path of the setting -> JSON value.
    """
    given = _arguments(function, arguments)
    written = {os.path.abspath(path) for path in written_by(function, given)}
    inputs: dict[str, object] = {}
    for fields, value in _settings(given):
        name = ".".join(fields)
        places = {name: value} if value and isinstance(value, str) else {}
        if isinstance(value, list):
            places = {f"{name}.{number}": place for number, place in enumerate(value)}
        is_named = any(map(_PLACE.fullmatch, fields))
        if not any(is_named or isinstance(place, _Place) for place in places.values()):
            inputs[name] = value
            is_weights = isinstance(value, str) and _WEIGHTS.search(name)
            if is_weights and (digest := weights_digest(str(value))):
                inputs[f"{name}{FINGERPRINT}"] = digest
            continue
        for key, place in places.items():
            fingerprint = _fingerprint(place, fields[-1], given, written)
            below = relative(place, root)
            if fingerprint is not None:
                inputs[f"{key}{FINGERPRINT}"] = fingerprint
            if below is not None or fingerprint is None:
                inputs[key] = place if below is None else below
            if name == _TRAINED_ON:
                mixture = artifacts.read_json(pathlib.Path(place) / MIXTURE_FILE, absent={})
                inputs[f"{name}{_OF_MIXTURE}"] = mixture.get("weights")
    return inputs


def _settings(value: object, *names: str) -> Iterator[tuple[Sequence[str], object]]:
    """(names of a parameter, its fields and keys, JSON value) of each input in a value."""
    parts = parts_of(value)
    if parts is None:
        yield names, to_plain(value)
        return
    # Keys of other mappings are names of tasks and files, which may be any.
    are_fields = dataclasses.is_dataclass(value) or names in ((), ("encoding",))
    for name, part in parts.items():
        if not (are_fields and name in NO_INPUTS):
            yield from _settings(part, *names, name)


def _arguments(function: Callable[..., object], arguments: Mapping[str, object]) -> _Given:
    """All arguments of a call, with defaults, and with paths as places."""
    signature = inspect.signature(function)
    bound = signature.bind(**arguments)
    bound.apply_defaults()
    given = _with_strings(bound.arguments, lambda path: _Place(os.fspath(path)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name)
    return given


def _fingerprint(place: str, field: str, given: _Given, written: set[str]) -> str | None:
    """Of the artefact at a place that a function reads; None of one that it writes, or of none."""
    # Artefacts of several splits are known by the files of those that the function reads.
    splits: set[str] = set()
    for name, value in given.items():
        if name.endswith(("split", "splits")) and name not in NO_INPUTS:
            splits |= {value} if isinstance(value, str) else set(value or ())
    collection, tasks = _collection(given) if field == "data_dir" else (None, None)
    path = epath.Path(place) if collection is None else collection_directory(place, collection)
    if os.path.abspath(path) in written:
        return None
    if collection is None:
        return artifact_fingerprint(path, splits or set(SPLITS))
    return _collection_fingerprint(path, tasks, splits or set(SPLITS))


def _collection(given: _Given) -> tuple[str | None, Sequence[str] | None]:
    """The collection that a function reads, and which of its tasks; None is all of them."""
    if collection := given.get("collection"):
        return collection, given.get("tasks")
    # Tokenising names tasks in the place of their collection.
    mixture = given.get("mixture_or_task")
    read = collection_of(mixture, given.get("module")) if mixture else None
    return read or (None, None)


# Of what an artefact's directory has, no content.
_REPORTS = (".json", ".gin", ".md", ".txt", ".html", ".png")


def relative(place: str, root: str | os.PathLike[str]) -> str | None:
    """A place below `root`, relative to it; None if it is elsewhere."""
    path = os.path.relpath(place, root)
    return None if pathlib.PurePath(path).parts[:1] == (os.pardir,) else path


def artifact_fingerprint(path: epath.Path, splits: set[str]) -> str | None:
    """A fingerprint of what an artefact holds, from its records; None if it has none.

    Args:
        path: a directory with metadata.json or checksums.txt, a model with checkpoints, or a file.
        splits: files of other splits are left out (`nq.train.trec`, `nq.test.trec`).
    """
    if path.is_file():
        return checksums.crc(path)
    content: dict[str, object] = {}
    for file in (path / artifacts.METADATA, path / "vocabulary.json"):
        if file.exists():
            metadata = artifacts.read_json(file)
            if "fingerprint" in metadata:
                return metadata["fingerprint"]
            content = {"fingerprints": metadata.get("fingerprints")}
    checkpoints = sorted(path.glob("checkpoint_*"))
    for directory in checkpoints or [path]:
        for name, recorded in checksums.read(directory).items():
            # What is before the suffix: the task's own name may have dots, too.
            split = pathlib.PurePath(pathlib.PurePath(name).stem).suffix.removeprefix(".")
            is_of_another = split in SPLITS and split not in splits
            # Metadata and reports have times, and query embeddings are added below passages'.
            is_other = is_of_another or "/" in name or name.endswith(_REPORTS)
            if checkpoints or not is_other:
                content[f"{directory.name}/{name}" if checkpoints else name] = recorded[-1:]
    return artifacts.fingerprint_json(content) if content else None


def _collection_fingerprint(
    path: epath.Path, tasks: Sequence[str] | None, splits: set[str]
) -> str | None:
    """Of a collection's passages, and of the queries of these tasks and splits."""
    content = {}
    passages = path / "passages" / artifacts.METADATA
    if passages.exists():
        content["passages"] = artifacts.read_json(passages)["fingerprint"]
    for metadata in path.glob(f"queries/*/*/{artifacts.METADATA}"):
        task, split = metadata.parts[-3:-1]
        if split in splits and (tasks is None or task in tasks):
            content[f"{task}.{split}"] = artifacts.read_json(metadata)["fingerprint"]
    return artifacts.fingerprint_json(content) if content else None
