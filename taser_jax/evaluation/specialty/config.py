"""Settings of `taser analyze`."""

from __future__ import annotations

import dataclasses

from taser_jax.evaluation.specialty.commitment import JudgedAt
from taser_jax.evaluation.specialty.specialty import Bounds
from taser_jax.optim.median import MedianOver
from taser_jax.optim.tsage_options import BiasCorrection
from taser_jax.storage.errors import check_fields


@dataclasses.dataclass(frozen=True)
class AnalysisConfig:
    """What is measured, and its thresholds.

    Attributes:
        num_batches: batches of each task at each checkpoint.
        first_batch: index of the first one in the stream of training batches.
        temperature: τ of the softmax whose entropy is measured.
        temperatures: further values of τ, to show its effect.
        bounds: thresholds for task-specific and activated parameters.
        median_over: entries over which medians are taken.
        betas: β of the moving averages for commitment; empty measures none.
        bias_correction: ADAM divides an average of k batches by 1 − β^k; NONE is Algorithm 1, whose
            averages are small for the first 1/(1 − β) batches.
        period: steps between the two checkpoints that are compared; None compares each with the
            previous one.
        judged_at: the checkpoint at which a parameter must be task-specific to count in the
            rates shown.
        sampled_parameters: size of the sample from which noise lines and the agreement of batches
            are computed; 0 omits both.
        largest_shown: end of the linear axis of sensitivities, in medians.
    """

    num_batches: int = 16
    first_batch: int = 0
    temperature: float = 2.0
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    bounds: Bounds = Bounds()
    median_over: MedianOver = MedianOver.ALL
    betas: tuple[float, ...] = (0.0, 0.6, 0.9, 0.99, 0.999)
    bias_correction: BiasCorrection = BiasCorrection.ADAM
    period: int | None = None
    judged_at: JudgedAt = JudgedAt.EARLIER
    sampled_parameters: int = 131_072
    largest_shown: float = 6.0

    def __post_init__(self) -> None:
        positive = ("temperature", "largest_shown")
        check_fields(self, "num_batches", is_valid=lambda n: n >= 1, expected="1 or more")
        check_fields(self, "period", is_valid=lambda n: n is None or n >= 1, expected="1 or more")
        counts = ("first_batch", "sampled_parameters")
        check_fields(self, *counts, is_valid=lambda n: n >= 0, expected="0 or more")
        check_fields(self, *positive, is_valid=lambda x: x > 0, expected="a number above 0")
        check_fields(
            self,
            "temperatures",
            is_valid=lambda values: all(tau > 0 for tau in values),
            expected="numbers above 0",
        )
        check_fields(
            self,
            "betas",
            is_valid=lambda values: all(0 <= beta < 1 for beta in values),
            expected="0 <= beta < 1",
        )

    @property
    def all_temperatures(self) -> tuple[float, ...]:
        """τ and the further ones, each once."""
        return tuple(dict.fromkeys((self.temperature, *self.temperatures)))
