"""Checks before training whether T-SAGE's median over all parameters can be above 0."""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from taser_jax.devices.parameter_rules import parameter_path
from taser_jax.optim.task_gradients import keep_trainable
from taser_jax.storage.errors import ConfigError

_TOKEN_TABLE = re.compile(r"(?:.*/)?(?:embeddings/token|token_embedder)/embedding")


def check_median(
    params: PyTree, *, tokens: Mapping[str, int], trainable: PyTree[bool] | None = None
) -> None:
    """Rejects batches so small that the median over all parameters would always be 0.

    A batch of n tokens touches at most n rows of the token table, so at least (V − n)·d of the P
    trained parameters have no gradient; where that is more than half of them the lower median is 0.

    Example:
        Two blocks of MiniLM: V = 30,522, d = 384, P = 15.5 million. 1,280 tokens leave 11.2
        million parameters without a gradient.

    Args:
        params: parameters, arrays or abstract.
        tokens: task -> tokens in a batch of it, padding included.
        trainable: tree of bool shaped as the parameters; None trains all.

    Raises:
        ConfigError: naming the first such task.
    """
    kept = keep_trainable(params, trainable)
    leaves = jax.tree_util.tree_leaves_with_path(kept)
    total = sum(leaf.size for _, leaf in leaves)
    tables = [leaf for path, leaf in leaves if _TOKEN_TABLE.fullmatch(parameter_path(path))]
    for task, number in tokens.items():
        # One more row is that of a T5 decoder's start token.
        untouched = sum(max(leaf.shape[0] - number - 1, 0) * leaf.shape[1] for leaf in tables)
        if untouched > (total - 1) // 2:
            raise ConfigError(
                f"{untouched:,} of {total:,} parameters have no gradient in any batch of {task}: "
                f"it has {number:,} tokens at most",
                where="TSageConfig.median_over = 'all'",
                expected="a gradient for more than half of the parameters, or their median is 0 "
                "and T-SAGE cannot divide by it",
                fix="set it to 'nonzero', raise TaskBatchingConfig.total, or freeze the tokens",
            )
