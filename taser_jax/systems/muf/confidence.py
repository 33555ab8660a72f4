"""A specialist's confidence in its list for a query, how far its ensemble agrees; calibration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from taser_jax.retrieval.runs import SearchResult
from taser_jax.storage.errors import DataError
from taser_jax.storage.progress import logger

# Memory for the candidates' vectors of one block of queries. Larger blocks are slower on CPUs: the
# system hands out such arrays as new, unmapped pages each time.
_BLOCK_BYTES = 32 << 20
# Of a reliability table.
BINS = 10
TEMPERATURES = tuple(round(0.001 * step, 3) for step in range(1, 11))

MemberFn = Callable[[np.ndarray], Array]
"""Query embeddings [queries, dim] -> those of each member, [members, queries, dim]."""


RowsFn = Callable[[Int[np.ndarray, " rows"]], np.ndarray]
"""Rows of a collection -> the specialist's embeddings of these passages, [rows, dim]."""


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
    probabilities: Float[Array, "*queries members k"],
) -> Float[Array, "*queries"]:
    """MI = H(mean_i p_i) − mean_i H(p_i), in nats, at most ln(members).

    It is computed as mean_i Σ_j p_ij (ln p_ij − ln p̄_j), the same sum: near agreement the
    difference of two large entropies would be rounding error.

    Example:
        p_1 = (.75, .25), p_2 = (.25, .75): ln 2 − .562335 = .130812.

    Args:
        probabilities: each member's distribution over the same candidates.

    Source: DPR-MUF (Li et al., Findings of EMNLP 2021), equation 4.
    """
    mean = probabilities.mean(axis=-2, keepdims=True)

    def log(p: Array) -> Array:
        return jnp.log(jnp.where(p > 0, p, 1.0))

    return jnp.mean(jnp.sum(probabilities * (log(probabilities) - log(mean)), axis=-1), axis=-1)


def confidence(
    logits: Float[Array, "queries members k"],
    exists: Bool[Array, "queries k"],
    *,
    temperature: float | Float[Array, ""],
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

    Source: DPR-MUF, equation 5.
    """
    some = exists.any(axis=-1)
    usable = exists | ~some[:, None]
    probabilities = jax.nn.softmax(
        jnp.where(usable[:, None, :], logits, -jnp.inf) / temperature, axis=-1
    )
    information = mutual_information(probabilities)
    return jnp.where(some, jnp.clip(1 - information / math.log(logits.shape[1]), 0.0, 1.0), 0.0)


def query_confidence(
    embed: MemberFn,
    queries: Float[np.ndarray, "queries dim"],
    take: RowsFn,
    result: SearchResult,
    *,
    temperatures: Sequence[float],
    k: int,
    block_bytes: int = _BLOCK_BYTES,
) -> Float[np.ndarray, "temperatures queries"]:
    """W of every query at every temperature, in bounded memory.

    Args:
        embed: the ensemble.
        queries: the specialist's query embeddings.
        take: its passage embeddings by row.
        result: its list for each query, at least k deep.
        temperatures: candidates for calibration, or the one in use.
        k: passages of its own list that the members' softmaxes are over.
        block_bytes: memory for the passages' vectors of one block of queries.

    Raises:
        DataError: a confidence that is not a number.
    """
    count, dim = queries.shape
    size = int(np.clip(block_bytes // (4 * k * dim), 1, max(count, 1)))
    confidences = np.zeros((len(temperatures), count), np.float32)
    grid = np.asarray(temperatures, np.float32)
    for start in range(0, count, size):
        lines = np.minimum(np.arange(start, start + size), count - 1)
        rows = result.rows[lines, :k]
        vectors = take(np.maximum(rows, 0).reshape(-1)).reshape(size, k, dim)
        block = _confidences(embed(queries[lines]), vectors, rows >= 0, grid)
        stop = min(start + size, count)
        confidences[:, start:stop] = np.asarray(block)[:, : stop - start]
    if not np.isfinite(confidences).all():
        line = int(np.argmin(np.isfinite(confidences).all(axis=0)))
        problem = f"the confidence of query {line} is not a number"
        fix = "train the ensemble again, with a lower learning rate"
        raise DataError(problem, where="confidence", fix=fix)
    return confidences


@jax.jit
def _confidences(
    members: Float[Array, "members queries dim"],
    candidates: Float[Array, "queries k dim"],
    exists: Bool[Array, "queries k"],
    temperatures: Float[Array, " temperatures"],
) -> Float[Array, "temperatures queries"]:
    logits = member_logits(members, candidates)
    return jax.lax.map(
        lambda temperature: confidence(logits, exists, temperature=temperature), temperatures
    )


@dataclasses.dataclass(frozen=True)
class Reliability:
    """Queries by confidence, in equal bins (i/bins, (i+1)/bins]; 0 is in the first.

    Attributes:
        count: queries in each bin.
        confidence: their mean confidence; 0 where a bin is empty.
        accuracy: share of them that are right; 0 where a bin is empty.
    """

    count: Int[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]

    @property
    def error(self) -> float:
        """ECE = Σ_i |B_i|/N · |conf(B_i) − acc(B_i)| (Guo et al. 2017; DPR-MUF, equation 7)."""
        share = self.count / self.count.sum()
        return float(np.sum(share * np.abs(self.confidence - self.accuracy)))


@dataclasses.dataclass(frozen=True)
class TemperatureChoice:
    """The chosen temperature and the curve it was chosen from.

    Attributes:
        temperature: the one with the lowest error; the smallest of equal ones.
        temperatures: the candidates, ascending.
        errors: ECE at each candidate.
        reliability: reliability at the chosen temperature.
    """

    temperature: float
    temperatures: tuple[float, ...]
    errors: tuple[float, ...]
    reliability: Reliability


def reliability(
    confidence: Float[np.ndarray, " queries"], correct: Bool[np.ndarray, " queries"]
) -> Reliability:
    """Mean confidence and accuracy in equal bins of confidence.

    Example:
        Confidences .15, .2, .95 with the first right: bin (.1, .2] has 2 queries, confidence .175,
        accuracy .5; bin (.9, 1] has one, .95 and 0; ECE = 2/3·.325 + 1/3·.95 = .533333.

    Args:
        confidence: between 0 and 1.
        correct: whether the specialist's first passage is right.

    Raises:
        DataError: no query.
    """
    confidence = np.asarray(confidence, np.float64)
    if not len(confidence):
        fix = "calibrate on a task that has a validation split, or set a temperature"
        raise DataError("there are no validation queries", where="calibration", fix=fix)
    # float32 confidences of .2 are .200000003: they belong to (.1, .2] all the same.
    edges = np.arange(1, BINS) / BINS
    place = np.searchsorted(edges, np.round(confidence, 6), side="left")
    count = np.bincount(place, minlength=BINS)
    filled = np.maximum(count, 1)
    return Reliability(
        count,
        np.bincount(place, confidence, BINS) / filled,
        np.bincount(place, np.asarray(correct, np.float64), BINS) / filled,
    )


def choose_temperature(
    confidences: Float[np.ndarray, "temperatures queries"],
    correct: Bool[np.ndarray, " queries"],
    temperatures: Sequence[float],
    *,
    name: str = "",
) -> TemperatureChoice:
    """The temperature with the lowest calibration error on validation queries.

    Args:
        confidences: confidence of each query at each temperature.
        correct: whether the specialist's first passage is right.
        temperatures: the candidates.
        name: the specialist's name, for the warning that the best is at an edge of the grid.

    Raises:
        DataError: no query.

    Source: DPR-MUF, section 4.3.
    """
    order = np.argsort(temperatures, kind="stable")
    tables = [reliability(confidences[place], correct) for place in order]
    errors = tuple(table.error for table in tables)
    best = int(np.argmin(errors))
    choice = TemperatureChoice(
        temperature=float(temperatures[order[best]]),
        temperatures=tuple(float(temperatures[place]) for place in order),
        errors=errors,
        reliability=tables[best],
    )
    # A better one may lie beyond the grid.
    if len(order) > 1 and best in (0, len(order) - 1):
        logger.warning(
            f"{name or 'calibration'}: the best temperature, {choice.temperature:g} (ECE "
            f"{errors[best]:.4f}), is at an edge of the grid {choice.temperatures[0]:g} to "
            f"{choice.temperatures[-1]:g}; scores of another scale want another grid"
        )
    return choice
