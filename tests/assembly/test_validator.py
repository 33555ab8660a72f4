"""Validation of queries whose gold is not in the collection."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.validator import Validator
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.data.token_store.store import TokenStore
from taser_jax.errors import DataError
from taser_jax.models.dual_encoder import DualEncoder, init_params
from taser_jax.partitioning import MeshConfig, Partitioner, make_mesh
from taser_jax.training.step import ObjectiveConfig


@pytest.fixture(scope="module")
def model_and_params():
    model = DualEncoder(tiny_training.model_config())
    return model, init_params(model, jax.random.key(0))


def validate(model_and_params, store, queries):
    model, params = model_and_params
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.devices()[:2]))
    config = tiny_training.training_config(train_steps=1).validation
    validator = Validator(
        model,
        store,
        {"first": queries},
        config,
        objective=ObjectiveConfig(),
        partitioner=partitioner,
    )
    with jax.set_mesh(partitioner.mesh):
        return validator(params)


def test_queries_without_a_positive_have_no_part(model_and_params, tiny_store_dir):
    store = TokenStore.open(tiny_store_dir)
    queries = store.queries("first", "validation")
    without = [0, 5, len(queries) - 1]
    golds = [[] if row in without else list(queries.positives[row]) for row in range(len(queries))]
    holed = dataclasses.replace(queries, positives=Ragged.from_lists(golds))
    rows = [row for row in range(len(queries)) if row not in without]
    kept = queries_of(queries, np.array(rows))
    found = validate(model_and_params, store, holed)
    assert found == validate(model_and_params, store, kept)
    assert found != validate(model_and_params, store, queries)


def test_the_queries_of_some_rows(tiny_store_dir):
    queries = TokenStore.open(tiny_store_dir).queries("first", "train")
    rows = np.array([7, 2, 30])
    found = queries_of(queries, rows)
    assert found.fingerprint != queries.fingerprint
    for place, row in enumerate(rows):
        assert found.query_ids[place] == f"first-train-{row}"
        np.testing.assert_array_equal(found.tokens([place]).ids, queries.tokens([row]).ids)
        for name in ("positives", "hard_negatives"):
            assert getattr(found, name)[place].tolist() == getattr(queries, name)[row].tolist()


def test_a_task_without_any_positive(model_and_params, tiny_store_dir):
    store = TokenStore.open(tiny_store_dir)
    queries = store.queries("first", "validation")
    empty = dataclasses.replace(queries, positives=Ragged.from_lists([[]] * len(queries)))
    with pytest.raises(DataError, match=r"'first', split 'validation': none of 16 queries"):
        validate(model_and_params, store, empty)
