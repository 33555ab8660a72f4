"""The episodes of `taser pipeline ance`: their trainings and their batches."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

import numpy as np

from taser_jax.assembly.config import TrainingConfig
from taser_jax.storage.errors import check_fields


class OptimizerState(enum.Enum):
    """The initial optimiser state of a later episode.

    FRESH: nothing but the selected parameters; every episode has a schedule and draws batches of
        its own (TACO-DR).
    CONTINUED: the newest state of the episode before; the episodes share one long schedule and one
        stream of batches, and differ from one long training by their negatives alone.
    """

    FRESH = "fresh"
    CONTINUED = "continued"


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Consecutive episodes with one training configuration.

    Attributes:
        training: training of each episode; its number sets the seeds and T-SAGE's temperature.
        count: number of episodes.
        optimizer_state: initial optimiser state of all episodes but the first, which begins fresh.
    """

    training: TrainingConfig
    count: int = 1
    optimizer_state: OptimizerState = OptimizerState.FRESH

    def __post_init__(self) -> None:
        check_fields(self, "count", is_valid=lambda n: n >= 1, expected="1 or more")


@dataclasses.dataclass(frozen=True)
class Episode:
    """One episode.

    Attributes:
        number: from 1.
        training: its training; the last step includes the steps of the episodes that it continues.
        is_continued: whether it continues with the optimiser state of the previous episode.
    """

    number: int
    training: TrainingConfig
    is_continued: bool

    @property
    def label(self) -> str:
        """Its name in folders and stages."""
        return f"episode-{self.number}"


def number_episodes(groups: Sequence[Episodes], *, after: int = 0) -> Iterator[Episode]:
    """The episodes one by one.

    Steps start from 0 in every fresh episode, and batches are a function of (seed, step). So each
    episode has seeds of its own, or it would train on the batches of the one before again.

    Example:
        `[Episodes(uniform, count=6), Episodes(specialised)]` are episodes 1 to 6 with `uniform` and
        episode 7 with `specialised`: TACO-DR.

    Args:
        groups: groups of episodes, in order.
        after: number of episodes before these.
    """
    number = after
    for group in groups:
        first = number + 1
        for index in range(group.count):
            number += 1
            training = _in_episode(group.training, number)
            is_continued = False
            if group.optimizer_state is OptimizerState.CONTINUED:
                steps = group.training.loop.train_steps
                training = dataclasses.replace(
                    training,
                    loop=dataclasses.replace(training.loop, train_steps=steps * (index + 1)),
                    schedule_steps=steps * group.count,
                )
                is_continued = index > 0
            # Continued episodes share one stream of batches.
            drawn = first if group.optimizer_state is OptimizerState.CONTINUED else number
            yield Episode(number, _with_seeds(training, drawn), is_continued)


def _in_episode(training: TrainingConfig, number: int) -> TrainingConfig:
    """The training with its episode's number for T-SAGE's temperature schedule."""
    if training.multitask is None:
        return training
    combiner = training.multitask.combiner
    combiner = dataclasses.replace(
        combiner, tsage=dataclasses.replace(combiner.tsage, episode=number)
    )
    return dataclasses.replace(
        training, multitask=dataclasses.replace(training.multitask, combiner=combiner)
    )


def _with_seeds(training: TrainingConfig, number: int) -> TrainingConfig:
    """The training with seeds that depend on the run's and on the episode's number.

    Both are hashed together, so that no two (seed, episode) pairs share batches.
    """

    def of(seed: int) -> int:
        return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)

    multitask = training.multitask
    if multitask is not None:
        batching = dataclasses.replace(multitask.batching, seed=of(multitask.batching.seed))
        multitask = dataclasses.replace(multitask, batching=batching)
    return dataclasses.replace(
        training,
        seed=of(training.seed),
        batching=dataclasses.replace(training.batching, seed=of(training.batching.seed)),
        multitask=multitask,
    )
