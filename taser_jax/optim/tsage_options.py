"""Options of T-SAGE, and how each changes a step."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import ClassVar

from taser_jax.optim.median import MedianOver
from taser_jax.storage.typed_files import Checked, Natural, PositiveNumber, Rate, Share


class TemperatureSchedule(enum.Enum):
    """The softmax temperature over ANCE episodes, counted from 0.

    CONSTANT: τ = `temperature` in every episode. ANNEALED, the paper's Table 6: τ = 64·0.5^(a − 4)
    in episodes a ≥ 4, and infinite before. INFINITE: all tasks have equal weights.
    """

    CONSTANT = "constant"
    ANNEALED = "annealed"
    INFINITE = "infinite"


class StepScale(enum.Enum):
    """The sum of a parameter's weights: during burn-in, and after it.

    PAPER (Algorithm 1, Equation 8): 1 in every step, so that steps keep their size when burn-in
    ends. RELEASED is the code: 1, then 1/T. Adam cancels a constant factor except for its epsilon
    and for a while after burn-in; clipping by global norm cuts smaller gradients less often.
    """

    PAPER = "paper"
    RELEASED = "released"


class BiasCorrection(enum.Enum):
    """Whether the moving average is divided by 1 − β^k after k steps.

    NONE is Algorithm 1 and the released code: the average starts at 0. At β = 0.999 it is 0.20 of
    its final size after 221 steps, which acts like a temperature five times as high. ADAM divides,
    so that the temperature has the same effect in all steps.
    """

    NONE = "none"
    ADAM = "adam"


class AverageDtype(enum.Enum):
    """How the moving average is stored.

    BFLOAT16 halves its memory. It is rounded stochastically: rounding to the nearest would undo
    every change of 0.1% (1 − β).
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclasses.dataclass(frozen=True)
class TSageConfig(Checked):
    """T-SAGE as in the paper's Algorithm 1, with absolute values (its Equation 9).

    Attributes:
        beta: share of the old moving average that is kept. (Equation 11 swaps β and 1 − β, but
            Table 4, where 0.999 is best and 0 means no momentum, fits this reading.)
        temperature: τ of the softmax over tasks.
        temperature_schedule: whether τ depends on the episode.
        episode: the ANCE episode of this training, counted from 0; set it to run one episode by
            hand (`taser pipeline ance` sets it).
        burn_in_share: share of the run's steps with equal weights; the average is updated in them
            too.
        step_scale: size of the combined gradient; set RELEASED to reproduce the released code.
        bias_correction: bias correction of the moving average.
        average_dtype: how the moving average is stored.
        median_over: the entries that the median is taken over. `NONZERO` is not in the paper; it is
            for small models, most of whose parameters are vocabulary rows that a batch does not
            touch.
    """

    RANGE_FIX: ClassVar[str] = "the paper has beta 0.999, temperature 2, burn_in_share 0.1"

    beta: Rate = 0.999
    temperature: PositiveNumber = 2.0
    temperature_schedule: TemperatureSchedule = TemperatureSchedule.CONSTANT
    episode: Natural = 0
    burn_in_share: Share = 0.1
    step_scale: StepScale = StepScale.PAPER
    bias_correction: BiasCorrection = BiasCorrection.NONE
    average_dtype: AverageDtype = AverageDtype.FLOAT32
    median_over: MedianOver = MedianOver.ALL


def temperature_of(config: TSageConfig) -> float:
    """τ of the configured episode; `math.inf` if all tasks have equal weights.

    Example:
        ANNEALED: episodes 3, 4, 5, 6 -> inf, 64, 32, 16.
    """
    if config.temperature_schedule is TemperatureSchedule.INFINITE:
        return math.inf
    if config.temperature_schedule is TemperatureSchedule.ANNEALED:
        return 64 * 0.5 ** (config.episode - 4) if config.episode >= 4 else math.inf
    return config.temperature
