"""Orbax checkpoints, atomic, asynchronous and checked: keeps the latest and the best."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
from etils import epath, epy
from jaxtyping import PyTree

from taser_jax.models.parameters import check_same_parameters
from taser_jax.storage import checksums
from taser_jax.storage.artifacts import check_version, is_remote
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError, storage_errors
from taser_jax.storage.progress import logger
from taser_jax.storage.typed_files import Checked, Positive
from taser_jax.training.state import TrainState

# Importing Orbax is an eighth of the time to start, and dry runs do not need it.
with epy.lazy_imports():
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers

FORMAT_VERSION = 2
PREFIX = "checkpoint"
_STATE = "state"
# What Orbax always writes.
_STATE_FILES = ("_METADATA", "manifest.ocdbt")


def absolute_path(path: str | os.PathLike[str]) -> epath.Path:
    """The absolute path that Orbax requires; a bucket's address already is one."""
    place = epath.Path(path)
    return place if is_remote(place) else place.resolve()


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Checks that no file of a `checkpoint_N` directory is missing or damaged.

    Raises:
        DataError: naming the file, and the checkpoint before this one.
    """
    path = absolute_path(checkpoint)
    if not path.is_dir():
        return
    before = max((step for step in saved_steps(path.parent) if step < _step(path)), default=None)
    fix = (
        f"take the checkpoint before it, {PREFIX}_{before}: `taser train` resumes from it by "
        f"itself, other commands with step={before}"
        if before is not None
        else "there is no checkpoint before it: delete it and train again"
    )
    checksums.check_directory(path, fix=fix)
    for name in (_STATE, *(f"{_STATE}/{file}" for file in _STATE_FILES)):
        if not (path / name).exists():
            raise DataError("missing", where=str(path / name), fix=fix)
    # Orbax does not wait for the disk: its files are synced before their record is written.
    for file in checksums.unrecorded(path):
        if not file.stat().length:
            raise DataError("empty, as after a power cut", where=str(file), fix=fix)


def set_aside_damaged(model_dir: str | os.PathLike[str]) -> list[str]:
    """Renames damaged checkpoints that are newer than the newest whole one, and warns of each.

    A run that resumes from the whole one repeats the steps in between, to the same bits. If none is
    whole, and none had been recorded yet, it begins again.

    Args:
        model_dir: the directory with the checkpoints.

    Returns:
        The new paths.

    Raises:
        DataError: all checkpoints are damaged, some after they had been recorded; none was renamed.
    """
    directory = absolute_path(model_dir)
    damaged: list[tuple[epath.Path, DataError]] = []
    for step in sorted(saved_steps(directory), reverse=True):
        try:
            check_whole(directory / f"{PREFIX}_{step}")
        except DataError as error:
            damaged.append((directory / f"{PREFIX}_{step}", error))
            continue
        goes_on = f"resumes from {PREFIX}_{step}"
        break
    else:
        if any(checksums.read(path) for path, _ in damaged):
            raise damaged[0][1]
        goes_on = "begins again"
    renamed = []
    for path, damage in damaged:
        aside = path.with_name(f"damaged_{path.name}")
        if aside.exists():
            aside.rmtree()
        path.rename(aside)
        renamed.append(str(aside))
        logger.warning(
            "DAMAGED CHECKPOINT: %s: %s; it is now %s, and training %s",
            *(damage.where, damage.problem, aside.name, goes_on),
        )
    return renamed


def saved_steps(directory: epath.Path) -> list[int]:
    """Steps of the checkpoints in a directory, in any order."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return [int(match[1]) for name in names if (match := re.fullmatch(rf"{PREFIX}_(\d+)", name))]


def _step(checkpoint: epath.Path) -> int:
    match = re.search(rf"{PREFIX}_(\d+)$", checkpoint.name)
    return int(match[1]) if match else 0


def saved_params(checkpoint: str | os.PathLike[str]) -> PyTree:
    """The shapes of the parameters in one `checkpoint_N` directory; no array is read.

    Raises:
        ConfigError: there is no finished checkpoint.
    """
    path = absolute_path(checkpoint) / _STATE
    # Any other directory without a state is a wrong path, not a damaged checkpoint.
    if path.exists() or re.fullmatch(rf"{PREFIX}_\d+", path.parent.name):
        check_whole(path.parent)
    if not path.exists():
        fix = "check the path; a directory that ends in .orbax-checkpoint-tmp is unfinished"
        if steps := saved_steps(path.parent):
            fix = f"name one of this model's checkpoints, such as {PREFIX}_{max(steps)}"
        raise ConfigError("no checkpoint here", where=str(checkpoint), fix=fix)
    with ocp.PyTreeCheckpointer() as reader:
        return reader.metadata(path).item_metadata.tree["params"]


def restore_params_from(checkpoint: str | os.PathLike[str], *, abstract_params: PyTree) -> PyTree:
    """Restores the parameters of one `checkpoint_N` directory without its optimiser state."""
    check_same_parameters(
        saved_params(checkpoint),
        abstract_params,
        where=str(checkpoint),
        fix="use the model configuration that the checkpoint was trained with (model.json)",
    )
    path = absolute_path(checkpoint) / _STATE
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item={"params": abstract_params},
                restore_args={
                    "params": ocp.checkpoint_utils.construct_restore_args(abstract_params)
                },
                partial_restore=True,
            ),
        )
    return restored["params"]


class Selection(enum.Enum):
    """The validation metric that decides which checkpoint is best."""

    NLL = "nll"
    AVERAGE_RANK = "average_rank"
    MRR = "mrr"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Which checkpoints are kept.

    Attributes:
        keep_latest: number of newest checkpoints kept.
        selection: the validation metric that ranks checkpoints; the best is kept, too.
    """

    RANGE_FIX: ClassVar[str] = "keep at least one: a run resumes from its newest checkpoint"

    keep_latest: Positive = 1
    selection: Selection = Selection.NLL


def _sealing_manager() -> Callable[..., ocp.CheckpointManager]:
    """Its checkpoints are on the disk, with a record, before those that they replace are deleted.

    A function, since a class at the top would import Orbax.
    """

    class SealingManager(ocp.CheckpointManager):
        def _finalize_checkpoint(self, step: int) -> None:
            # Orbax calls this between the two, in the thread that saves.
            super()._finalize_checkpoint(step)
            path = self.directory / f"{PREFIX}_{step}"
            if jax.process_index() == 0 and path.exists():
                checksums.seal(path)

    return SealingManager


class Checkpoints:
    """The checkpoints of one model directory.

    A checkpoint is the training state and a small JSON object with the data and configuration it
    belongs to. Saving is asynchronous; an interrupted save leaves no checkpoint.

    Args:
        model_dir: local directory or gs:// address; checkpoints lie in it as `checkpoint_N/`.
        config: which checkpoints are kept.
        cleans_up: whether unfinished saves are removed; False to read, where one may be that of a
            training that is running.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        config: CheckpointConfig = CheckpointConfig(),
        *,
        cleans_up: bool = True,
    ) -> None:
        self._config = config
        self._directory = absolute_path(model_dir)
        best = checkpoint_managers.BestN(
            get_metric_fn=self.ranking, n=1, keep_checkpoints_without_metrics=False
        )
        policies = [checkpoint_managers.LatestN(config.keep_latest), best]
        with storage_errors(self._directory, doing="save a checkpoint"):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._manager = _sealing_manager()(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    step_prefix=PREFIX,
                    cleanup_tmp_directories=cleans_up,
                    # Orbax writes metrics to disk only where a best_fn is given.
                    best_fn=self.ranking,
                    preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                    save_decision_policy=checkpoint_managers.FixedIntervalPolicy(1),
                ),
                item_names=("state", "about"),
            )

    def ranking(self, metrics: Mapping[str, float]) -> float:
        """The selection metric, larger being better; -inf without it."""
        value = metrics.get(self._config.selection.value, math.nan)
        if math.isnan(value):
            return -math.inf
        # Negative log-likelihood and rank are better when smaller.
        return value if self._config.selection is Selection.MRR else -value

    @property
    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint, None where there is none."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint that has metrics; the newest where none has any."""
        best = self._manager.best_step()
        return self.latest_step if best is None else best

    def metrics(self, step: int) -> dict[str, float]:
        """Validation metrics that a checkpoint was saved with; empty where there were none."""
        return dict(self._manager.metrics(step) or {})

    def save(
        self,
        state: TrainState,
        *,
        step: int,
        about: Mapping[str, object],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving the state after `step` steps; does nothing if it is saved already.

        Args:
            state: the training state; may be donated once this returns.
            step: number of finished steps.
            about: JSON-able facts the state depends on (data fingerprint, seed).
            metrics: validation metrics at this step, if any were computed.
        """
        if step in self._manager.all_steps():
            return
        self.wait()
        with storage_errors(self._directory, doing="save a checkpoint"):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(vars(state)),
                    about=ocp.args.JsonSave({"format_version": FORMAT_VERSION, **about}),
                ),
                metrics=dict(metrics) if metrics else None,
            )

    def delete(self, step: int) -> None:
        """Deletes a finished checkpoint."""
        with storage_errors(self._directory, doing="delete a checkpoint"):
            self._manager.delete(step)

    def wait(self) -> None:
        """Waits until the current save is finished, and raises its error if it failed."""
        with storage_errors(self._directory, doing="save a checkpoint"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def check(self, *, step: int, about: Mapping[str, object]) -> None:
        """Checks that a checkpoint belongs to the same data and configuration.

        Args:
            step: which checkpoint.
            about: must equal what the checkpoint was saved with.

        Raises:
            FingerprintError: the checkpoint was trained with other data or settings.
            DataError: it has another format.
        """
        saved = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))[
            "about"
        ]
        where = self._place(step)
        again = "use the taser_jax version that wrote it"
        check_version(saved, FORMAT_VERSION, where=where, fix=again)
        for name, value in about.items():
            if saved.get(name) != value:
                problem = f"{name} was {saved.get(name)!r} when this was saved, now {value!r}"
                fix = "train into a new MODEL_DIR, or go back to the former settings"
                raise FingerprintError(problem, where=where, fix=fix)

    def _place(self, step: int) -> str:
        return str(self._directory / f"{PREFIX}_{step}")

    def restore(
        self, abstract_state: TrainState, *, step: int, about: Mapping[str, object]
    ) -> TrainState:
        """Restores a training state, if it belongs to the same data and configuration.

        Args:
            abstract_state: shapes, dtypes and shardings of the state (jax.ShapeDtypeStruct).
            step: which checkpoint.
            about: must equal what the checkpoint was saved with.

        Raises:
            FingerprintError: the checkpoint was trained with other data or settings.
            DataError: it has another format.
            ConfigError: it has another model's or optimiser's structure.
        """
        check_whole(self._directory / f"{PREFIX}_{step}")
        self.check(step=step, about=about)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(vars(abstract_state)))
            )["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "its optimiser or parameters have another structure than those configured now",
                where=self._place(step),
                fix="go back to the former settings, or train into a new MODEL_DIR with "
                "INITIAL_CHECKPOINT_PATH to keep the parameters alone",
            ) from error
        return TrainState(**restored)

    def restore_params(self, abstract_params: PyTree, *, step: int | None = None) -> PyTree:
        """Restores parameters alone, for encoding, export or a further training.

        Args:
            abstract_params: shapes, dtypes and shardings of the parameters.
            step: step of the checkpoint; None means the best one.
        """
        step = self.best_step if step is None else step
        if step is None:
            fix = "train the model first, or point MODEL_DIR to one that has been"
            raise ConfigError("no finished checkpoint", where=str(self._directory), fix=fix)
        return restore_params_from(
            self._directory / f"{PREFIX}_{step}", abstract_params=abstract_params
        )

    def close(self) -> None:
        """Waits for the current save and releases its threads."""
        with storage_errors(self._directory, doing="save a checkpoint"):
            # Orbax waits for its removal of unfinished saves only when it saves; a process that
            # ends meanwhile would print a traceback.
            removal = getattr(self._manager, "_cleanup_tmp_directory_future", None)
            if removal is not None:
                removal.result()
            self._manager.close()
