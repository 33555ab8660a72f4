"""How a mixture's memories share a retriever's attention and documents: MoMA's Figure 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from taser_jax.systems.moma.memories import Mixture


def attention_shares(
    mixture: Mixture,
    rows: Int[np.ndarray, "queries depth"],
    attention: Float[np.ndarray, "queries segments"],
    *,
    gold: Sequence[Int[np.ndarray, " relevant"]],
    source: str | None = None,
) -> dict[str, object]:
    """Figure 2's numbers: by memory, its share of attention and of documents; gold found.

    Args:
        mixture: the memories.
        rows: documents of each query, of which the first K are attended to.
        attention: to the query's own tokens, then to the K documents.
        gold: relevant documents of each query.
        source: a memory that is split into "<source>, relevant" and "<source>, other"; None splits
            none.

    Returns:
        "attention" and "documents", each by memory and summing to 1 (the query's own segment is
        left out), and "queries_with_gold", the share of queries with a relevant document.
    """
    found, weights = rows[:, : attention.shape[1] - 1], attention[:, 1:]
    present = found >= 0
    memory, _ = mixture.places(found[present])
    relevant = np.array([np.isin(line, own) for line, own in zip(found, gold, strict=True)])
    names = mixture.names
    if source is not None:
        number = names.index(source)
        memory = np.where((memory == number) & relevant[present], len(names), memory)
        names = [f"{name}, other" if name == source else name for name in names]
        names.append(f"{source}, relevant")

    def shares(values: np.ndarray) -> dict[str, float]:
        totals = np.bincount(memory, weights=values, minlength=len(names))
        return dict(zip(names, (totals / max(totals.sum(), 1e-30)).tolist(), strict=True))

    return {
        "attention": shares(weights[present]),
        "documents": shares(np.ones(int(present.sum()))),
        "queries_with_gold": float(relevant.any(axis=1).mean()),
    }
