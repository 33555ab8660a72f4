"""The batches of a step that is compiled, beside those that a token store gives."""

import contextlib
import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.data import DeviceBatches
from taser_jax.assembly.plans import MultitaskTraining, TrainingTexts, lengths_in, make_plan
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives
from taser_jax.devices.mesh import make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.storage.errors import ConfigError

TRAINING = dataclasses.replace(
    tiny_training.training_config(train_steps=3, batch_size=16), length_buckets=(5, 9)
)
EVERY_TASK = MultitaskTraining(batching=TaskBatchingConfig(total=32, num_negatives=1))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ragged") / "tokens"
    return tiny_training.write_token_store(directory, least_words=1)


@pytest.fixture(scope="module")
def texts(store):
    queries = {task: store.queries(task, "train") for task in store.tasks}
    lengths = (store.metadata.query_length, store.metadata.passage_length)
    return TrainingTexts(*lengths, store, queries)


@pytest.mark.parametrize(
    "training", [TRAINING, dataclasses.replace(TRAINING, multitask=EVERY_TASK)], ids=["one", "all"]
)
def test_shapes_are_those_of_the_stores_batches(training, store, texts):
    partitioner = Partitioner(make_mesh(training.mesh))
    plan = make_plan(training, texts, partitioner=partitioner)
    assert " x 9, " in str(plan.facts["length_groups"])
    # What a loss that is not finite is told with.
    told = DeviceBatches(plan.stream, texts.queries, partitioner).describe(0)
    assert re.search(r"task '(first|second)', queries '\1-train-\d+', ", told)
    batches = [plan.stream.batches(step) for step in range(8)]
    shapes = [[jax.tree.map(np.shape, batch) for batch in step.values()] for step in batches]
    planned = [jax.tree.map(np.shape, batch) for batch in plan.batches.values()]
    assert planned in shapes
    # No batch has more tokens than what is planned; typical texts have as many as real ones.
    positions = [sum(batch.tokens for batch in step.values()) for step in batches]
    assert max(positions) == sum(batch.tokens for batch in plan.batches.values())
    typical = plan.with_real_lengths(lengths_in(store, texts.queries)).values()
    real = [sum(each.mask.sum() for b in step.values() for each in b.texts) for step in batches]
    assert sum(batch.tokens for batch in typical) == pytest.approx(np.mean(real), rel=0.1)


@pytest.mark.parametrize(("negatives", "refused"), [(0, True), (1, False)])
def test_a_batch_without_negatives_is_refused(negatives, refused):
    partitioner = Partitioner(make_mesh(devices=jax.devices()[:1]))
    alone = BatchingConfig(batch_size=1, num_negatives=negatives)
    every = MultitaskTraining(batching=TaskBatchingConfig(total=3, num_negatives=negatives))
    texts = TrainingTexts(8, 12, None, {}, task_sizes={"large": 900, "small": 1})
    for changes, name in (({"batching": alone}, "any"), ({"multitask": every}, "small")):
        training = dataclasses.replace(TRAINING, length_buckets=(), **changes)
        told = pytest.raises(ConfigError, match=f"a batch of {name} is one query")
        with told if refused else contextlib.nullcontext():
            make_plan(training, texts, partitioner=partitioner)


def test_what_a_batch_of_every_task_does_not_read_is_named(texts, caplog):
    for changes in ({}, {"num_negatives": 3, "false_negatives": FalseNegatives.KEEP}):
        assert not caplog.records
        batching = BatchingConfig(16, **changes)
        training = dataclasses.replace(TRAINING, batching=batching, multitask=EVERY_TASK)
        with caplog.at_level("WARNING", logger="taser"):
            make_plan(training, texts, partitioner=Partitioner(make_mesh(training.mesh)))
    assert "BatchingConfig's num_negatives, false_negatives change nothing" in caplog.text


@pytest.mark.parametrize("num_chunks", [0, -2])
def test_fewer_than_one_chunk_is_refused(num_chunks):
    with pytest.raises(ConfigError, match=rf"num_chunks is {num_chunks}(?s:.*)1 or more"):
        dataclasses.replace(TRAINING, multitask=EVERY_TASK, num_chunks=num_chunks)
