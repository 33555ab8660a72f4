"""Options of T-SAGE, and what each does to a step."""

from __future__ import annotations

import dataclasses
import enum
import math

from taser_jax.errors import check_fields
from taser_jax.optim.median import MedianOver


class TemperatureSchedule(enum.Enum):
    """The softmax temperature over ANCE episodes, counted from 0.

    CONSTANT is τ = `temperature` in each. ANNEALED is the paper's Table 6: τ = 64·0.5^(a − 4) in
    episode a from the fourth on, infinite before. INFINITE weighs all tasks alike.
    """

    CONSTANT = "constant"
    ANNEALED = "annealed"
    INFINITE = "infinite"


class BurnInScale(enum.Enum):
    """The weight of every task before the sensitivities are used.

    MEAN is 1/T, a softmax of infinite temperature: the step keeps its size as burn-in ends. SUM is
    1, as in the released code: gradients are T times larger during burn-in, so that Adam's second
    moment lags behind, and clipping bites more, around its end.
    """

    MEAN = "mean"
    SUM = "sum"


class CombinedScale(enum.Enum):
    """What multiplies the weighted sum, in burn-in too.

    ONE is Algorithm 1 and Equation 8: Σ_t u_t·g_t with Σ_t u_t = 1. PER_TASK is the released code's
    1/T more. Adam hides a constant factor but for its epsilon; clipping by global norm does not: at
    the same clip norm gradients T times smaller are clipped less.
    """

    ONE = "one"
    PER_TASK = "per_task"


class BiasCorrection(enum.Enum):
    """Whether the moving average is divided by 1 − β^k after k steps.

    NONE is Algorithm 1 and the released code: the average starts at 0, has reached 0.20 of its size
    after 221 steps at β = 0.999, and acts there like a five times higher temperature. ADAM divides:
    the temperature means the same in all steps.
    """

    NONE = "none"
    ADAM = "adam"


class AverageDtype(enum.Enum):
    """How the moving average is stored.

    BFLOAT16 halves its memory. It is rounded at random: to the nearest, a 0.1% change (1 − β)
    would always round away.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclasses.dataclass(frozen=True)
class TSageConfig:
    """T-SAGE as in the paper's Algorithm 1, with absolute values (its Equation 9).

    Attributes:
        beta: share of the old moving average that is kept. (Equation 11 has β and 1 − β the other
            way round; Table 4, where 0.999 is best and 0 means no momentum, fits this.)
        temperature: τ of the softmax over tasks.
        temperature_schedule: whether τ depends on the episode.
        episode: the ANCE episode of this training, from 0.
        burn_in_share: share of the run's steps with equal weights; the average is updated then too.
        burn_in_scale: value of these weights.
        combined_scale: factor of the combined gradient.
        bias_correction: of the moving average.
        average_dtype: how the moving average is stored.
        median_over: which entries the median is of. `NONZERO` is not in the paper; it is for small
            models, most of whose parameters are rows of the vocabulary that a batch does not touch.
        median_epsilon: added to the median, as in the released code.
    """

    beta: float = 0.999
    temperature: float = 2.0
    temperature_schedule: TemperatureSchedule = TemperatureSchedule.CONSTANT
    episode: int = 0
    burn_in_share: float = 0.1
    burn_in_scale: BurnInScale = BurnInScale.MEAN
    combined_scale: CombinedScale = CombinedScale.ONE
    bias_correction: BiasCorrection = BiasCorrection.NONE
    average_dtype: AverageDtype = AverageDtype.FLOAT32
    median_over: MedianOver = MedianOver.ALL
    median_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        fix = "the paper has beta 0.999, temperature 2, burn_in_share 0.1"
        check_fields(self, "beta", is_valid=lambda x: 0 <= x < 1, expected="0 <= beta < 1", fix=fix)
        share = "a share of the steps, 0 to 1"
        check_fields(self, "burn_in_share", is_valid=lambda x: 0 <= x <= 1, expected=share, fix=fix)
        check_fields(self, "episode", is_valid=lambda n: n >= 0, expected="0 or more")
        positive = ("temperature", "median_epsilon")
        check_fields(
            self, *positive, is_valid=lambda x: x > 0, expected="a number above 0", fix=fix
        )


def temperature_of(config: TSageConfig) -> float:
    """τ of the configured episode; `math.inf` where all tasks weigh the same.

    Example:
        ANNEALED: episodes 3, 4, 5, 6 -> inf, 64, 32, 16.
    """
    if config.temperature_schedule is TemperatureSchedule.INFINITE:
        return math.inf
    if config.temperature_schedule is TemperatureSchedule.ANNEALED:
        return 64 * 0.5 ** (config.episode - 4) if config.episode >= 4 else math.inf
    return config.temperature
