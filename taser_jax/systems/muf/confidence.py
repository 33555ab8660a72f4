"""A specialist's confidence in its list for a query: how far its ensemble's members agree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import ConfigError, DataError

TEMPERATURES = tuple(round(0.001 * step, 3) for step in range(1, 11))

MemberFn = Callable[[np.ndarray], Array]
"""Query embeddings [queries, dim] -> those of each member, [members, queries, dim]."""


@runtime_checkable
class PassageRows(Protocol):
    """Passage embeddings by row: `Embeddings`."""

    def take(self, rows: Int[np.ndarray, " rows"]) -> np.ndarray:
        """Embeddings of the given rows, in their order. [rows, dim]."""


@dataclasses.dataclass(frozen=True)
class ConfidenceConfig:
    """How confidences are computed.

    Attributes:
        k: number of passages of the specialist's own list that the members' softmaxes are over.
        epsilon: added to every probability inside the logarithms; the released code has 1e-6.
        block_bytes: memory for the candidates' vectors of one block of queries. Larger blocks are
            slower on CPUs: the system hands out such arrays as new, unmapped pages each time.
    """

    k: int = 1000
    epsilon: float = 0.0
    block_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.k < 1 or self.epsilon < 0:
            raise ConfigError(
                f"k {self.k}, epsilon {self.epsilon}",
                where="ConfidenceConfig",
                expected="k of at least 1, an epsilon of at least 0",
            )


def member_logits(
    members: Float[Array, "members queries dim"], candidates: Float[Array, "queries k dim"]
) -> Float[Array, "queries members k"]:
    """u_i · v_j of every query's candidates, before the temperature.

    Products are float32 at `Precision.HIGHEST`: rounded to bfloat16 and divided by a temperature
    of 1e-3, equal members would seem to disagree.
    """
    return jnp.einsum(
        "mqd,qkd->qmk",
        members.astype(jnp.float32),
        candidates.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def mutual_information(
    probabilities: Float[Array, "*queries members k"], *, epsilon: float = 0.0
) -> Float[Array, "*queries"]:
    """MI = H(mean_i p_i) − mean_i H(p_i), in nats, at most ln(members).

    It is computed as mean_i Σ_j p_ij (ln p_ij − ln p̄_j), the same sum: near agreement the
    difference of two large entropies would be rounding error.

    Example:
        p_1 = (.75, .25), p_2 = (.25, .75): ln 2 − .562335 = .130812.

    Args:
        probabilities: each member's distribution over the same candidates.
        epsilon: added inside the logarithms.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), equation 4.
    """
    mean = probabilities.mean(axis=-2, keepdims=True)

    def log(p: Array) -> Array:
        return jnp.log(jnp.where(p > 0, p, 1.0) if epsilon == 0 else p + epsilon)

    return jnp.mean(jnp.sum(probabilities * (log(probabilities) - log(mean)), axis=-1), axis=-1)


def confidence(
    logits: Float[Array, "queries members k"],
    exists: Bool[Array, "queries k"],
    *,
    temperature: float | Float[Array, ""],
    epsilon: float = 0.0,
) -> Float[Array, " queries"]:
    """W = 1 − MI / ln(members), between 0 and 1; 0 where a query has no candidates.

    p_i = softmax_j(u_i·v_j / T). The temperature divides: DPR-MUF calls 1e-3 an inverse
    temperature, but its code divides by it, and section 6.5's distributions, whose mass is on the
    first passage, come from dividing. Multiplying makes every p_i uniform and every w 1.

    Example:
        p_1 = (.75, .25), p_2 = (.25, .75): 1 − .130812 / ln 2 = .811278.

    Args:
        logits: from `member_logits`.
        exists: False where a query has fewer than k candidates.
        temperature: T.
        epsilon: see `mutual_information`.

    Source: DPR-MUF, equation 5.
    """
    some = exists.any(axis=-1)
    usable = exists | ~some[:, None]
    probabilities = jax.nn.softmax(
        jnp.where(usable[:, None, :], logits, -jnp.inf) / temperature, axis=-1
    )
    information = mutual_information(probabilities, epsilon=epsilon)
    return jnp.where(some, jnp.clip(1 - information / math.log(logits.shape[1]), 0.0, 1.0), 0.0)


def query_confidence(
    embed: MemberFn,
    queries: Float[np.ndarray, "queries dim"],
    passages: PassageRows,
    result: SearchResult,
    *,
    members: int,
    temperatures: Sequence[float],
    config: ConfidenceConfig | None = None,
) -> Float[np.ndarray, "temperatures queries"]:
    """W of every query at every temperature, in bounded memory.

    Args:
        embed: the ensemble.
        queries: the specialist's query embeddings.
        passages: its passage embeddings.
        result: its list for each query, at least `config.k` deep.
        members: number of members of the ensemble.
        temperatures: candidates for calibration, or the one in use.
        config: k, ε, memory.

    Raises:
        ConfigError: fewer than two members, no temperature or one that is not positive, or lists
            less than k deep.
        DataError: a confidence that is not a number.
    """
    config = config or ConfidenceConfig()
    check_temperatures(temperatures)
    if members < 2:
        raise ConfigError(
            f"an ensemble of {members}",
            where="confidence",
            expected="two members or more: ln(members) divides, and one cannot disagree",
            fix="train an ensemble of several members",
        )
    if result.rows.shape[1] < config.k:
        raise ConfigError(
            f"lists of {result.rows.shape[1]} passages",
            where="ConfidenceConfig.k",
            expected=f"{config.k} at least",
            fix="search deeper, or lower k",
        )
    count, dim = queries.shape
    size = int(np.clip(config.block_bytes // (4 * config.k * dim), 1, max(count, 1)))
    found = np.zeros((len(temperatures), count), np.float32)
    grid = np.asarray(temperatures, np.float32)
    for start in range(0, count, size):
        lines = np.minimum(np.arange(start, start + size), count - 1)
        rows = result.rows[lines, : config.k]
        vectors = passages.take(np.maximum(rows, 0).reshape(-1)).reshape(size, config.k, dim)
        block = _confidences(
            embed(queries[lines]), vectors, rows >= 0, grid, epsilon=config.epsilon
        )
        stop = min(start + size, count)
        found[:, start:stop] = np.asarray(block)[:, : stop - start]
    if not np.isfinite(found).all():
        line = int(np.argmin(np.isfinite(found).all(axis=0)))
        raise DataError(
            f"the confidence of query {line} is not a number",
            where="confidence",
            expected="finite embeddings of queries, passages and members",
            fix="train the ensemble again, with a lower learning rate",
        )
    return found


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Refuses an empty grid, and temperatures that are not positive.

    Raises:
        ConfigError: naming the temperatures.
    """
    if not len(temperatures) or not all(0 < one < math.inf for one in temperatures):
        raise ConfigError(
            f"temperatures {tuple(temperatures)}",
            where="calibration",
            expected="at least one, each a positive number",
            fix="the paper's grid is .001, .002, ..., .010",
        )


@functools.partial(jax.jit, static_argnames="epsilon")
def _confidences(
    members: Float[Array, "members queries dim"],
    candidates: Float[Array, "queries k dim"],
    exists: Bool[Array, "queries k"],
    temperatures: Float[Array, " temperatures"],
    *,
    epsilon: float,
) -> Float[Array, "temperatures queries"]:
    logits = member_logits(members, candidates)
    return jax.lax.map(
        lambda one: confidence(logits, exists, temperature=one, epsilon=epsilon), temperatures
    )
