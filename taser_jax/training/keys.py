"""Random keys as pure functions of (seed, purpose, step)."""

from __future__ import annotations

import hashlib

import jax


def named_key(seed: int, name: str) -> jax.Array:
    """The key of one purpose ("init", "dropout", "routing") under one seed.

    The name enters by SHA-256, not by Python's `hash`, which differs from process to process.

    Args:
        seed: the run's seed.
        name: what the draws are for.

    Returns:
        A typed scalar key; fold the step into it.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return jax.random.fold_in(jax.random.key(seed), int.from_bytes(digest[:4], "little"))
