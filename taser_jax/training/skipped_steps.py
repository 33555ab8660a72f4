"""Reports skipped steps, and stops training after too many in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import parameter_path
from taser_jax.optim.tsage import MEDIAN
from taser_jax.storage.errors import DataError, NonFiniteLossError, TaserError
from taser_jax.storage.progress import logger


class SkipWatch:
    """Reports skipped steps, and stops training where there are too many in a row.

    Only steps in a row count: an occasional batch that overflows does no harm in a run of any
    length, whereas one skipped step after another means that parameters or settings are at fault.
    Skipped steps do not change the parameters, so continuing would only repeat the error.

    Args:
        allowed: the number of skipped steps in a row that is an error.
        describe: step -> its task and queries, for messages; raises if its tokens are at fault.
        params: the current parameters.

    Attributes:
        pending: number and metrics of the step to be checked next.
    """

    def __init__(
        self, *, allowed: int, describe: Callable[[int], str], params: Callable[[], PyTree]
    ) -> None:
        self._allowed, self._describe, self._params = allowed, describe, params
        self.pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def check(self) -> None:
        """Warns if the pending step was skipped.

        Raises:
            NonFiniteLossError: it was one too many, and its loss or gradient is not finite; or the
                parameters are not finite, which no later step can repair.
            DataError: it was one too many, and a median is 0; or its tokens are at fault.
        """
        if self.pending is None:
            return
        (step, metrics), self.pending = self.pending, None
        in_a_row = int(metrics["skipped_in_a_row"])
        if not in_a_row:
            return
        where = f"step {step}, {self._describe(step)}"
        _check_params(self._params(), where=where)
        error = _skip_error(metrics, where=where)
        if in_a_row >= self._allowed:
            raise error
        logger.warning(
            "step skipped, %d in a row and %d in all: %s: %s",
            in_a_row,
            int(metrics["skipped_total"]),
            error.where,
            error.found,
        )


def _check_params(params: PyTree, *, where: str) -> None:
    """Checks that parameters are finite: skipped steps change none, so they started that way.

    Raises:
        NonFiniteLossError: naming such parameters.
    """
    bad = [
        parameter_path(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not jnp.isfinite(leaf).all()
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NonFiniteLossError(
            f"parameters {', '.join(bad[:3])}{more} are NaN or infinite, and were before this step",
            where=where,
            expected="finite parameters",
            fix="`taser verify MODEL_DIR` shows whether its checkpoint was damaged; train from "
            "another one, or from other pretrained weights",
        )


def _skip_error(metrics: Mapping[str, jax.Array], *, where: str) -> TaserError:
    """Why a step was skipped."""
    loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
    also = ""
    if (in_a_row := int(metrics["skipped_in_a_row"])) > 1:
        also = f"; {in_a_row} steps in a row were skipped"
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return NonFiniteLossError(
            f"loss {loss}, gradient norm {norm}, of finite parameters and tokens in the "
            f"vocabulary{also}",
            where=where,
            expected="finite numbers",
            fix=(
                "no parameter has seen them, and the newest checkpoint is good; lower the learning "
                "rate, clip harder, use float32 or bfloat16 activations, or look at the queries "
                "named above"
            ),
        )
    medians = {
        name.removeprefix(MEDIAN): float(value)
        for name, value in metrics.items()
        if name.startswith(MEDIAN)
    }
    tasks = [t for t, median in medians.items() if not median and metrics[f"grad_norm/{t}"] > 0]
    return DataError(
        f"the median sensitivity to {', '.join(tasks)} is 0{also}",
        where=where,
        expected="gradients that are not 0 for more than half of the trained parameters: T-SAGE "
        "divides by the median",
        fix="set median_over = 'nonzero' (of a small model most parameters are vocabulary rows "
        "that no batch touches), or raise TaskBatchingConfig.total",
    )
