"""What is recorded of a run: its settings, data and texts in run.json, and its metrics by step."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from etils import epath

from taser_jax.assembly.model_directory import read_settings
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.data.batches.every_task import Stream
from taser_jax.data.token_store.arrays import TokenizedQueries
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles, TokenStore
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.models.parameters import config_to_json
from taser_jax.storage.artifacts import FilePath, is_remote, write_text
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import flatten
from taser_jax.training.loop import MetricWriter

_UNSET = "unset"
# None changes what a step computes, but for draws of dropout and the schedule that follows steps.
_MAY_CHANGE = (
    "training.loop.",
    "training.checkpoints.",
    "training.validation",
    "training.mesh.",
    "training.num_chunks",
    "training.length_buckets",
    "training.states_dir",
    "training.pretrained.source",
)


def settings_of(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    store: TokenStore,
    queries: Mapping[str, TokenizedQueries],
) -> dict[str, object]:
    """Every setting and fingerprint that decides what is trained, by its path.

    Args:
        model: the model, with its vocabulary's size.
        training: how it is trained.
        store: tokens of the passages.
        queries: task -> queries trained on, with their negatives.
    """
    content = {task: of_task.fingerprint for task, of_task in queries.items()}
    return flatten(
        model=json.loads(config_to_json(model)),
        training=training,
        data={"passages": store.metadata.passages_fingerprint, "queries": content},
        # Combiners keep their weights in the order of the task axis.
        tasks=None if training.multitask is None else list(queries),
    )


def check_settings(model_dir: FilePath, settings: Mapping[str, object], *, step: int) -> None:
    """Compares a run's settings with those that its newest checkpoint was trained with.

    Example:
        Another learning rate in the directory of a model of 300 steps is refused::

            models/faq: settings differ from those that step 300 was trained with:
                training.optimizer.learning_rate: was 2e-05, now 5e-05
              expected: the former settings; steps, periods, validation and mesh may change
              fix: go back to the former settings, ...

    Args:
        model_dir: the directory.
        settings: of this run, from `settings_of`.
        step: of the newest checkpoint.

    Raises:
        FingerprintError: naming every setting that may not change, old and new.
    """
    former = read_settings(model_dir)
    # As JSON gives them back.
    changes = _changes(former, json.loads(json.dumps(dict(settings)))) if former else {}
    refused = {name: changes[name] for name in changes if not name.startswith(_MAY_CHANGE)}
    if refused:
        problem = f"settings differ from those that step {step} was trained with:{_listed(refused)}"
        expected = "the former settings; steps, periods, validation and mesh may change"
        if any(name.startswith("batch_sizes.") for name in refused):
            expected += ", but for a mesh or chunks that cannot share each task's former batch"
        fix = (
            "go back to the former settings, or train into a new MODEL_DIR, from these parameters "
            "with INITIAL_CHECKPOINT_PATH"
        )
        raise FingerprintError(problem, where=str(model_dir), expected=expected, fix=fix)
    if changes:
        logger.info("settings changed after step %d:%s", step, _listed(changes))


def _changes(
    old: Mapping[str, object], new: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """What differs; settings that only one version of the code has are none of the user's.

    Example:
        `training.multitask` gone is a change where `training.multitask.batching.total` came.
    """

    def exists(name: str) -> bool:
        parents = (name[:dot] for dot, letter in enumerate(name) if letter == ".")
        children = (other.startswith(f"{name}.") for other in new)
        return name in new or any(parent in new for parent in parents) or any(children)

    names = [name for name in old if name.startswith("data.") or exists(name)]
    names += [name for name in new if name.startswith("data.") and name not in old]
    return {
        name: (old.get(name, _UNSET), new.get(name, _UNSET))
        for name in names
        if old.get(name, _UNSET) != new.get(name, _UNSET)
    }


def _listed(changes: Mapping[str, tuple[object, object]]) -> str:
    return "".join(f"\n    {name}: was {old}, now {new}" for name, (old, new) in changes.items())


def data_facts(stream: Stream, store: TokenStore, *, train_steps: int) -> dict[str, object]:
    """Facts about a run's data, and how texts became tokens: one value, or one for each task."""
    trained_on = stream.batches_per_epoch
    entries = [e for e in store.metadata.queries if e.task in trained_on and e.split == "train"]
    facts: dict[str, object] = {
        "batches_per_epoch": stream.batches_per_epoch,
        "steps_per_epoch": stream.steps_per_epoch,
        "epochs": round(train_steps / stream.steps_per_epoch, 2),
        "data_fingerprint": stream.fingerprint,
        "collection": store.metadata.collection,
        "collection_fingerprint": store.metadata.collection_fingerprint,
        "query_normalization": joined({entry.task: entry.normalization for entry in entries}),
        "titles": store.metadata.titles,
    }
    if any(entry.prompt for entry in entries):
        facts["query_prompt"] = joined({e.task: list(e.prompt) for e in entries})
    if any(entry.length != store.metadata.query_length for entry in entries):
        facts["query_lengths"] = {entry.task: entry.length for entry in entries}
    if store.metadata.passage_prompt:
        facts["passage_prompt"] = list(store.metadata.passage_prompt)
    return facts


def joined(by_task: Mapping[str, object]) -> object:
    """The value of all tasks where it is one, or else task -> value."""
    first, *others = by_task.values()
    return first if all(other == first for other in others) else dict(by_task)


@dataclasses.dataclass(frozen=True)
class TextSettings:
    """How a run's texts became tokens.

    Attributes:
        queries: prompt and markers of the task's queries.
        query_length: tokens per query; None if unknown.
        passage_length: tokens per passage; None if unknown.
        titles: whether passages have titles.
        passage_prompt: ids before passages.
    """

    queries: QuerySettings
    query_length: int | None
    passage_length: int | None
    titles: Titles
    passage_prompt: tuple[int, ...] = ()


def text_settings(facts: Mapping[str, Any], task: str | None) -> TextSettings:
    """How texts became tokens, from run.json; defaults for what it does not record.

    Args:
        facts: run.json.
        task: the queries' task; needed where tasks differ.

    Raises:
        ConfigError: tasks differ, and `task` is none of them.
    """
    normalization = _of_task(facts, "query_normalization", task)
    prompt = _of_task(facts, "query_prompt", task)
    lengths = facts.get("query_lengths")
    length = _of_task(facts, "query_lengths", task) if lengths else facts.get("query_length")
    return TextSettings(
        queries=QuerySettings(QueryNormalization(normalization or "none"), tuple(prompt or ())),
        query_length=length,
        passage_length=facts.get("passage_length"),
        titles=Titles(facts.get("titles") or "include"),
        passage_prompt=tuple(facts.get("passage_prompt") or ()),
    )


def task_names(facts: Mapping[str, object], config: ModelConfig) -> tuple[str, ...]:
    """Tasks whose prompt, length, normalisation or query encoder differ; none where all are alike.

    Args:
        facts: run.json.
        config: the model.
    """
    by_task = (facts.get(f"query_{name}") for name in ("prompt", "lengths", "normalization"))
    named = (name for value in by_task if isinstance(value, Mapping) for name in value)
    return tuple(dict.fromkeys(named)) or config.query_tasks


def _of_task(facts: Mapping[str, object], name: str, task: str | None) -> Any:
    value = facts.get(name)
    if isinstance(value, Mapping) and value:
        # Lengths are recorded by task wherever one is not the token store's.
        value = joined(value)
    if not isinstance(value, Mapping) or not value:
        return value or None
    if task not in value:
        problem = f"{name} differs among the tasks, and the task is {task!r}"
        fix = f"--gin.export_model.task={next(iter(value))!r}, or ask.task"
        raise ConfigError(problem, where="run.json", expected=f"one of {', '.join(value)}", fix=fix)
    return value[task]


def jsonl_writer(path: epath.PathLike, *, resume_step: int = 0) -> MetricWriter:
    """Writes one JSON object per line: `{"step": 20, "train/loss": 3.1, ...}`.

    A resumed run removes the lines of steps that it will repeat, so each step occurs once. Objects
    in a bucket cannot be appended to, so each line rewrites the whole file there.

    Args:
        path: the file, local or gs://; created with its folder.
        resume_step: lines of later steps are removed.
    """
    kept = _lines_up_to(epath.Path(path), resume_step) if epath.Path(path).exists() else None
    if kept is not None and not is_remote(path):
        write_text(path, kept, recorded=False)
    file = _appended(path)
    if is_remote(path):
        file.write((kept or "").encode())

    def write(step: int, scalars: Mapping[str, float]) -> None:
        file.write(json.dumps({"step": step, **scalars}).encode() + b"\n")
        file.flush()

    return write


def _lines_up_to(path: epath.Path, step: int) -> str:
    """Whole lines of steps up to `step`; a killed process may have left half a line."""
    lines = ""
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                lines += line + "\n"
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return lines


def event_writer(folder: epath.PathLike) -> MetricWriter:
    """Writes TensorBoard's event files with its own record writer, which needs no TensorFlow.

    Args:
        folder: the files' folder, local or gs://; created where absent.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import record_writer

    # TensorBoard reads the files of a folder in the order of their names.
    name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}"
    records = record_writer.RecordWriter(_appended(epath.Path(folder) / name))

    def add(**content: object) -> None:
        event = event_pb2.Event(wall_time=time.time(), **content)
        records.write(event.SerializeToString())

    def write(step: int, scalars: Mapping[str, float]) -> None:
        value_of = summary_pb2.Summary.Value
        values = [value_of(tag=name, simple_value=value) for name, value in scalars.items()]
        add(step=step, summary=summary_pb2.Summary(value=values))
        records.flush()

    add(file_version="brain.Event:2")
    return write


def _appended(path: epath.PathLike) -> IO[bytes]:
    """A file, local or gs://, to append to; created with its folder."""
    place = epath.Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    return _Object(place) if is_remote(place) else place.open("ab")


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
    lines = jsonl_writer(model_dir / "metrics.jsonl", resume_step=resume_step)
    try:
        return lines, event_writer(model_dir / "train")
    except ImportError:
        logger.info("tensorboard is not installed: metrics go to metrics.jsonl only")
        return (lines,)
