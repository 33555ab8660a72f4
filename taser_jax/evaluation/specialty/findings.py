"""Results of an analysis: counts by model, step and parameter, and rates between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from taser_jax.evaluation.specialty.commitment import Commitment, JudgedAt
from taser_jax.evaluation.specialty.noise import Agreement
from taser_jax.evaluation.specialty.specialty import Bounds, LeafCounts, add_up

OWN = "own"


@dataclasses.dataclass(frozen=True)
class Specialties:
    """Counts of one checkpoint's parameters.

    Attributes:
        model: the model's name.
        step: the checkpoint's step.
        leaves: path of a parameter -> its counts.
        agreements: agreement of means over growing numbers of batches; empty without a sample.
    """

    model: str
    step: int
    leaves: Mapping[str, LeafCounts]
    agreements: Sequence[Agreement] = ()

    @property
    def total(self) -> LeafCounts:
        """Counts of all parameters."""
        return add_up(self.leaves.values())


@dataclasses.dataclass(frozen=True)
class CommitmentRow:
    """Commitment between two checkpoints at one β.

    Attributes:
        model: the model's name.
        earlier_step: step of the earlier checkpoint.
        step: step of the later checkpoint.
        beta: β of the moving average, or `OWN`: the average that T-SAGE used and training saved.
        commitment: the counts.
        noise: the counts if no parameter preferred a task; None if unknown.
    """

    model: str
    earlier_step: int
    step: int
    beta: str
    commitment: Commitment
    noise: Commitment | None = None

    @property
    def label(self) -> str:
        """The moving average, as tables and figures name it."""
        return "T-SAGE's own" if self.beta == OWN else f"β = {self.beta}"


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that the tables and figures show.

    Attributes:
        tasks: names, in the order of the counts' task axis.
        bounds: thresholds for task-specific and activated parameters.
        temperatures: τ of the counts; the first is used where only one is shown.
        specialties: by model, and within it by step.
        batch_sizes: task -> queries per batch.
        commitments: by model and step; empty if no two checkpoints were compared.
        judged_at: which rates are shown; the CSV has all.
        largest_shown: end of the linear axis of sensitivities, in medians.
    """

    tasks: Sequence[str]
    bounds: Bounds
    temperatures: Sequence[float]
    specialties: Sequence[Specialties]
    batch_sizes: Mapping[str, int]
    commitments: Sequence[CommitmentRow] = ()
    judged_at: JudgedAt = JudgedAt.EARLIER
    largest_shown: float = 6.0

    @property
    def last(self) -> list[Specialties]:
        """Each model's last step."""
        return list({found.model: found for found in self.specialties}.values())

    @property
    def temperature_order(self) -> list[int]:
        """Numbers of the temperatures, lowest temperature first."""
        return sorted(range(len(self.temperatures)), key=lambda place: self.temperatures[place])
