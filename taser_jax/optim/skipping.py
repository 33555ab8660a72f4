"""Steps with a gradient that is not finite are skipped and counted."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int


class SkipState(NamedTuple):
    """Counters, int32, and the state of what is wrapped.

    Attributes:
        in_a_row: steps skipped since the last one that was not.
        total: all steps skipped.
        inner: state of the wrapped chain; a skipped step leaves it untouched.
    """

    in_a_row: Int[Array, ""]
    total: Int[Array, ""]
    inner: Any


def skip_non_finite(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser, but a gradient or loss that is not finite changes nothing, and is counted.

    Unlike `optax.apply_if_finite` it never lets such a step through: whoever trains looks at
    `in_a_row` and stops. The chain's own step counts, of schedules too, stand still.

    Args:
        optimizer: the chain, a multi-task combiner first. A caller that has looked already passes
            `is_finite` to `update`, and the gradients are not read again.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> SkipState:
        return SkipState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: Any,
        state: SkipState,
        params: Any | None = None,
        *,
        is_finite: Bool[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[Any, SkipState]:
        if is_finite is None:
            is_finite = all_finite((updates, extra.get("losses", ())))
        found, inner_state = inner.update(updates, state.inner, params, **extra)
        # −0 and not 0: the parameter −0 plus 0 would be 0.
        found = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, -jnp.zeros_like(leaf)), found)
        inner_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), inner_state, state.inner
        )
        skipped = (~is_finite).astype(jnp.int32)
        in_a_row = (state.in_a_row + skipped) * skipped
        return found, SkipState(in_a_row, state.total + skipped, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether the sum of squares of every leaf is finite in float32.

    A norm that overflows counts as not finite, as in the single-task step.
    """
    return jnp.isfinite(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
