"""Orbax checkpoints, atomic and asynchronous; keeps the latest and the best."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import jax
from etils import epy
from jaxtyping import PyTree

from taser_jax.storage import checksums
from taser_jax.storage.artifacts import check_version
from taser_jax.storage.errors import ConfigError, FingerprintError, storage_errors
from taser_jax.storage.typed_files import Checked, Positive
from taser_jax.training.checkpoint_directory import (
    PREFIX,
    absolute_path,
    check_whole,
    restore_params_from,
    state_dict,
)
from taser_jax.training.state import TrainState

# Importing Orbax is an eighth of the time to start, and dry runs do not need it.
with epy.lazy_imports():
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers

FORMAT_VERSION = 2


class Selection(enum.Enum):
    """The validation metric that decides which checkpoint is best."""

    NLL = "nll"
    AVERAGE_RANK = "average_rank"
    MRR = "mrr"

    @property
    def larger_is_better(self) -> bool:
        """MRR is better when larger; negative log-likelihood and rank when smaller."""
        return self is Selection.MRR


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
        unchecked: facts that may differ from those a checkpoint was saved with.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        unchecked: Sequence[str] = (),
    ) -> None:
        config = config or CheckpointConfig()
        self._config = config
        self._unchecked = unchecked
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
                    cleanup_tmp_directories=True,
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
        return value if self._config.selection.larger_is_better else -value

    @property
    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint, None where there is none."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint that has metrics; the newest where none has any."""
        metrics = {step: self.metrics(step) for step in self._manager.all_steps()}
        ranked = [(self.ranking(judged), step) for step, judged in metrics.items() if judged]
        return max(ranked)[1] if ranked else self.latest_step

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
                    state=ocp.args.StandardSave(state_dict(state)),
                    about=ocp.args.JsonSave({"format_version": FORMAT_VERSION, **about}),
                ),
                metrics=dict(metrics) if metrics else None,
            )

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
            ConfigError: it has another format.
        """
        saved = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))[
            "about"
        ]
        where = self._place(step)
        again = "use the taser_jax version that wrote it"
        check_version(saved, FORMAT_VERSION, where=where, fix=again, error=ConfigError)
        for name, value in about.items():
            if name not in self._unchecked and saved.get(name) != value:
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
            ConfigError: it has another format, or another model's or optimiser's structure.
        """
        check_whole(self._directory / f"{PREFIX}_{step}")
        self.check(step=step, about=about)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(state_dict(abstract_state))),
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
