"""Shapes of a step's batches, before there are any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from taser_jax.batch import Batch, BatchShape, Tokens


def step_shape(
    queries: int, num_negatives: int, query_length: int, passage_length: int
) -> BatchShape:
    """Of a batch with a positive and `num_negatives` passages a query."""
    return BatchShape(
        queries=queries,
        query_length=query_length,
        passages=queries * (1 + num_negatives),
        passage_length=passage_length,
    )


def chunk_shapes(shapes: Sequence[BatchShape], num_chunks: int) -> list[BatchShape]:
    """What is encoded at once where each batch is cut into chunks."""
    return [
        dataclasses.replace(
            shape, queries=shape.queries // num_chunks, passages=shape.passages // num_chunks
        )
        for shape in shapes
    ]


def abstract_batch(shape: BatchShape) -> Batch:
    """Shapes and dtypes of a batch's arrays."""

    def make() -> Batch:
        def tokens(count: int, length: int) -> Tokens:
            return Tokens(
                ids=jnp.zeros((count, length), jnp.int32), mask=jnp.zeros((count, length), bool)
            )

        return Batch(
            queries=tokens(shape.queries, shape.query_length),
            passages=tokens(shape.passages, shape.passage_length),
            positive_index=jnp.zeros(shape.queries, jnp.int32),
            ignore=jnp.zeros((shape.queries, shape.passages), bool),
            query_rows=jnp.zeros(shape.queries, jnp.int32),
            passage_rows=jnp.zeros(shape.passages, jnp.int32),
        )

    return jax.eval_shape(make)
