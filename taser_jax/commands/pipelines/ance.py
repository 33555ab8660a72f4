"""`taser pipeline ance`: warm up on BM25's negatives, then episodes on the model's own."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
from etils import epath

from taser_jax.assembly.model_directory import selected_checkpoint
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.pipelines.retrieval_stages import RetrievalStages, Setting
from taser_jax.commands.pipelines.stages import Stages, pipeline_records
from taser_jax.commands.pipelines.taser import check_depth, print_table
from taser_jax.commands.train import TrainSummary
from taser_jax.devices import hosts
from taser_jax.evaluation.reports import ResultsTable
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.mining import MiningConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.publishing import scratch_for
from taser_jax.storage.typed_files import Checked, Positive, flatten

WARM_UP = "warm-up"


@dataclasses.dataclass(frozen=True)
class Episodes(Checked):
    """Consecutive episodes with one training configuration.

    Attributes:
        training: training of each episode; its number sets the seeds and T-SAGE's temperature.
        count: number of episodes.
    """

    training: TrainingConfig
    count: Positive = 1


@hosts.writes("{setting.output_dir}", kinds=[])
def pipeline_ance(
    *,
    setting: Setting,
    model: ModelConfig,
    episodes: Sequence[Episodes] = (),
    name: str = "ANCE",
    warm_up_dir: str | None = None,
    branch_after: int = 0,
    keep_embeddings: bool = True,
    config_text: str = "",
) -> ResultsTable:
    """Trains on BM25's negatives, then in episodes on what the model itself ranks too high.

    An episode starts from the checkpoint selected in the one before, whose run over the training
    queries gave its hard negatives. Every model is evaluated. If interrupted, rerun the command to
    resume at the interrupted stage.

    Args:
        setting: what all stages share; its training is the warm-up's, its first mining BM25's, its
            second mining every episode's.
        model: the dual encoder.
        episodes: the trainings after the warm-up; none stops after mining with its model.
        name: the model's name in the table's rows.
        warm_up_dir: OUTPUT_DIR of a finished run to take model and negatives from; None warms up
            here. Runs that compare optimisers share one warm-up, and so may other prompts and
            task-specific query encoders.
        branch_after: number of that run's episode to continue from; 0 is its warm-up. The next
            episode then has the same checkpoint, negatives and batches in both runs.
        keep_embeddings: whether all models' embeddings and indexes stay on disk, or the last one's.
        config_text: written to config.gin.

    Returns:
        The table, also in table.md, table.csv and table.png.

    Raises:
        ConfigError: the directory was begun with other settings, the run to branch from is not
            finished, or mining considers more results than are searched.
        StorageError: the directory cannot be written.

    Source: ANCE (Xiong et al., 2021), with episodes one after another; TACO-DR (Zhang et al.,
        2023), section 4.2.
    """
    check_depth(setting)
    if branch_after < 0 or (branch_after and warm_up_dir is None):
        problem = f"branch_after {branch_after}, warm_up_dir {warm_up_dir}"
        expected = "0, or the number of an episode of the run in warm_up_dir"
        raise ConfigError(problem, where="pipeline_ance", expected=expected)
    with pipeline_records(setting.output_dir, config_text):
        setting.open_tokens()
        run = _AnceRun(setting, model, name, keeps_embeddings=keep_embeddings)
        trainings = number_episodes(episodes, after=branch_after)
        if warm_up_dir is None:
            before = run.warm_up()
        else:
            before = _finished(pathlib.Path(warm_up_dir), branch_after, setting.second_mining)
        for number, training in trainings.items():
            before = run.episode(number, training, before, is_last=number == max(trainings))
        return print_table(setting, run.rows, by_task=setting.evaluation.measures[0])


class _AnceRun(RetrievalStages):
    """The stages of one run, whose methods evaluate rows.

    A model's folder has model/ and, where an episode follows, negatives/.
    """

    def __init__(
        self, setting: Setting, model: ModelConfig, name: str, *, keeps_embeddings: bool
    ) -> None:
        super().__init__(setting)
        self._model, self._name, self._keeps_embeddings = model, name, keeps_embeddings

    def warm_up(self) -> pathlib.Path:
        """BM25's negatives, a training on them, and its negatives for the first episode."""
        self.bm25(("train", "test"))
        trained = self.train(
            WARM_UP,
            self._model,
            self.setting.training,
            negatives_dirs=[self.root / "bm25" / "negatives"],
        )
        return self._add_row(WARM_UP, trained, next_episode=1)

    def episode(
        self, number: int, training: TrainingConfig, before: pathlib.Path, *, is_last: bool
    ) -> pathlib.Path:
        """Trains on the negatives of the model before; mines for the next episode."""
        label = f"episode-{number}"
        trained = self.train(
            label,
            self._model,
            # A checkpoint has all parameters: pretrained weights are for the first training.
            dataclasses.replace(training, pretrained=None),
            negatives_dirs=[before / "negatives"],
            initial_checkpoint=selected_checkpoint(before / "model"),
        )
        folder = self._add_row(label, trained, next_episode=None if is_last else number + 1)
        if not self._keeps_embeddings and before.parent == self.root:
            _forget_embeddings(before)
        return folder

    def _add_row(
        self, label: str, trained: TrainSummary, *, next_episode: int | None
    ) -> pathlib.Path:
        """Encodes, searches and evaluates; mines where an episode follows."""
        self.retrieve(label, splits=("test",) if next_episode is None else ("train", "test"))
        if next_episode is not None:
            self.mine(label, _mining_for(self.setting.second_mining, next_episode))
        self.evaluate(
            f"{self._name} ({label})",
            label,
            parameters=trained.parameters,
            details={"training": f"{trained.seconds:.0f} s"},
        )
        return self.root / label


def number_episodes(groups: Sequence[Episodes], *, after: int = 0) -> dict[int, TrainingConfig]:
    """The trainings of the episodes by their numbers, from 1, with seeds of their own.

    Steps start from 0 in every episode, and batches are a function of (seed, step). So each
    episode has seeds of its own, or it would train on the batches of the one before again.

    Example:
        `[Episodes(uniform, count=6), Episodes(specialised)]` are episodes 1 to 6 with `uniform` and
        episode 7 with `specialised`: TACO-DR.

    Args:
        groups: groups of episodes, in order.
        after: number of episodes before these.
    """
    trainings = [group.training for group in groups for _ in range(group.count)]
    return {
        number: _of_episode(training, number)
        for number, training in enumerate(trainings, start=after + 1)
    }


def _of_episode(training: TrainingConfig, number: int) -> TrainingConfig:
    """The training with an episode's seeds, and its number for T-SAGE's temperature schedule.

    The run's seed and the number are hashed together, so that no two pairs share batches.
    """

    def of(seed: int) -> int:
        return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)

    multitask = training.multitask
    if multitask is not None:
        tsage = dataclasses.replace(multitask.combiner.tsage, episode=number)
        multitask = dataclasses.replace(
            multitask,
            batching=dataclasses.replace(multitask.batching, seed=of(multitask.batching.seed)),
            combiner=dataclasses.replace(multitask.combiner, tsage=tsage),
        )
    return dataclasses.replace(
        training,
        seed=of(training.seed),
        batching=dataclasses.replace(training.batching, seed=of(training.batching.seed)),
        multitask=multitask,
    )


def _mining_for(mining: MiningConfig, episode: int) -> MiningConfig:
    """An episode's mining, with its own sample."""
    return dataclasses.replace(mining, seed=mining.seed + episode - 1)


def _finished(directory: pathlib.Path, episodes: int, mining: MiningConfig) -> pathlib.Path:
    """The folder of another run's model after so many episodes, mined from as this run would."""
    stages = Stages(directory)
    label = f"episode-{episodes}" if episodes else WARM_UP
    missing = sorted({f"{label}-encode", f"{label}-mine"} - stages.finished())
    if missing:
        problem = f"no finished stage {', '.join(missing)}"
        expected = "the OUTPUT_DIR of a `taser pipeline ance` that has mined there"
        fix = "run it there first: a warm-up needs no episodes, an episode one that follows it"
        raise ConfigError(problem, where=str(directory), expected=expected, fix=fix)
    mined = stages.record(f"{label}-mine").inputs
    for setting, value in flatten(config=_mining_for(mining, episodes + 1)).items():
        if mined.get(setting, value) != value:
            name = setting.removeprefix("config.")
            problem = (
                f"mining.{name} {mined[setting]!r} made its negatives, and here it is {value!r}"
            )
            fix = "mine as that run did, or warm up here"
            raise ConfigError(problem, where=str(directory), fix=fix)
    return directory / label


@hosts.first_host_only
def _forget_embeddings(root: pathlib.Path) -> None:
    for place in (epath.Path(root / name) for name in ("embeddings", "exact", "index")):
        if place.exists():
            # In one step: what a kill left of an artefact would be another one to its stages.
            shutil.rmtree(place.rename(scratch_for(place)), ignore_errors=True)
