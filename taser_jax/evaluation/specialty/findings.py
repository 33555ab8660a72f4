"""Settings of `taser analyze`, and what it finds: counts by model and step, rates between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.specialty.commitment import CommitmentRow
from taser_jax.evaluation.specialty.specialty import LeafCounts, SpecialtyConfig, add_up
from taser_jax.optim.median import MedianOver
from taser_jax.storage.errors import check_fields


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """What is measured.

    Attributes:
        num_batches: batches of each task at each checkpoint.
        specialty: what makes a parameter task-specific.
        median_over: entries over which medians are taken.
        betas: β of the moving averages for commitment; empty measures none.
    """

    num_batches: int = 16
    specialty: SpecialtyConfig = SpecialtyConfig()
    median_over: MedianOver = MedianOver.ALL
    betas: tuple[float, ...] = (0.0, 0.6, 0.9, 0.99, 0.999)

    def __post_init__(self) -> None:
        check_fields(self, "num_batches", is_valid=lambda n: n >= 1, expected="1 or more")
        check_fields(
            self,
            "betas",
            is_valid=lambda values: all(0 <= beta < 1 for beta in values),
            expected="0 <= beta < 1",
        )


@dataclasses.dataclass(frozen=True)
class Specialties:
    """Counts of one checkpoint's parameters.

    Attributes:
        model: the model's name.
        step: the checkpoint's step.
        leaves: path of a parameter -> its counts.
    """

    model: str
    step: int
    leaves: Mapping[str, LeafCounts]

    @property
    def total(self) -> LeafCounts:
        """Counts of all parameters."""
        return add_up(self.leaves.values())


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that the tables and figures show.

    Attributes:
        tasks: names, in the order of the counts' task axis.
        config: what makes a parameter task-specific.
        specialties: by model, and within it by step.
        commitments: by model and step; empty if no two checkpoints were compared.
    """

    tasks: Sequence[str]
    config: SpecialtyConfig
    specialties: Sequence[Specialties] = ()
    commitments: Sequence[CommitmentRow] = ()

    @property
    def last(self) -> list[Specialties]:
        """Each model's last step."""
        return list({each.model: each for each in self.specialties}.values())
