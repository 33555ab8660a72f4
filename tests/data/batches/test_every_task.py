import dataclasses

import numpy as np
import pytest

from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.every_task import (
    BatchTotal,
    TaskBatchingConfig,
    TaskBatchStream,
    task_batch_sizes,
)
from taser_jax.data.batches.stream import FalseNegatives, PositiveChoice
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import HostShare
from taser_jax.storage.errors import ConfigError

# TACO-DR, table 5: task -> (training queries, batch size).
KILT = {
    "nq": (76_445, 16),
    "triviaqa": (52_886, 14),
    "hotpotqa": (68_659, 15),
    "wow": (79_535, 16),
    "trex": (94_514, 16),
    "fever": (70_757, 15),
    "zsre": (99_500, 17),
    "aidayago2": (17_895, 11),
}


@pytest.fixture(scope="module")
def store(tiny_store_dir):
    return TokenStore.open(tiny_store_dir)


def stream(store, *, first=32, second=32, **options):
    """Two tasks, of the given numbers of queries."""
    counts = {"first": first, "second": second}
    tasks = {t: queries_of(store.queries(t, "train"), np.arange(n)) for t, n in counts.items()}
    config = options.pop("config", TaskBatchingConfig(total=12, num_negatives=1))
    return TaskBatchStream(store, tasks, config, **options)


def sizes_of(counts, num_devices=1, **config):
    return task_batch_sizes(TaskBatchingConfig(**config), counts, num_devices=num_devices)


def test_sizes_of_two_sets_by_hand():
    # 81^(1/4) = 3 and 1: shares 3/4 and 1/4 of 8 seats.
    assert sizes_of({"a": 81, "b": 1}, total=8) == {"a": 6, "b": 2}
    # Shares 2/3 and 1/3: one each, then ⌊4.33⌋ and ⌊1.67⌋, and the seat left goes to 0.67.
    assert sizes_of({"a": 16, "b": 1}, total=8) == {"a": 5, "b": 3}
    # A small set keeps one seat beside a very large one.
    sizes = sizes_of({"a": 10**9, "b": 1, "c": 1}, total=4, temperature=1.0)
    assert sizes == {"a": 2, "b": 1, "c": 1}
    # Towards a temperature of 0 the largest set takes what the others do not need.
    assert sizes_of({"a": 182, "b": 62}, total=8, temperature=1e-3) == {"a": 7, "b": 1}


@pytest.mark.parametrize("temperature", [1.0, 4.0, 1e9])
@pytest.mark.parametrize("multiple", [1, 3])
def test_sizes_sum_to_the_total_and_follow_the_sets(temperature, multiple):
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = {str(i): n for i, n in enumerate(rng.integers(1, 10_000, 6).tolist())}
        sizes = sizes_of(counts, num_devices=multiple, total=60, temperature=temperature)
        per_task = np.asarray([sizes[task] for task in sorted(counts, key=counts.__getitem__)])
        assert per_task.sum() == 60
        assert (per_task >= multiple).all()
        assert (per_task % multiple == 0).all()
        assert (np.diff(per_task) >= 0).all()
    if temperature == 1e9:
        assert set(sizes.values()) <= {9, 10, 11, 12}


def test_sizes_of_the_paper():
    sizes = sizes_of({task: count for task, (count, _) in KILT.items()}, total=120)
    assert sizes == {task: size for task, (_, size) in KILT.items()}


def test_each_step_has_a_batch_of_every_task_from_that_task_alone(store):
    batches = stream(store, first=32, second=4)
    assert batches.batch_sizes == {"first": 8, "second": 4}
    for step in range(5):
        for task, size in batches.batch_sizes.items():
            queries, batch = store.queries(task, "train"), batches.batches(step)[task]
            rows, width = batches.query_rows(step)[task], batches.query_lengths[task]
            np.testing.assert_array_equal(batch.query_rows, rows)
            assert len(batch.passage_rows) == 2 * size
            np.testing.assert_array_equal(batch.queries.ids, queries.tokens(rows).ids[:, :width])
            golds = [queries.positives[row][0] for row in rows]
            np.testing.assert_array_equal(batch.passage_rows[batch.positive_index], golds)


def test_by_default_no_label_is_a_negative():
    """What the batches of one task do with these values is compared with brute force."""
    config = TaskBatchingConfig()
    assert config.false_negatives is FalseNegatives.MASK
    assert config.positives is PositiveChoice.SAMPLE


def test_small_sets_go_round_while_large_ones_are_seen_once(store):
    batches = stream(store, first=32, second=4)
    assert batches.steps_per_epoch == 4
    assert batches.batches_per_epoch == {"first": 4, "second": 1}
    steps = [batches.query_rows(step) for step in range(4)]
    assert sorted(np.concatenate([rows["first"] for rows in steps])) == list(range(32))
    assert all(sorted(rows["second"]) == list(range(4)) for rows in steps)


def test_batches_are_a_function_of_seed_and_step_and_not_of_other_tasks(store):
    config = TaskBatchingConfig(total=12, num_negatives=1)
    batches, again = stream(store, config=config), stream(store, config=config)
    # The largest seed that may be given.
    other = stream(store, config=dataclasses.replace(config, seed=(1 << 63) - 1))
    for step in (7, 2):
        for task, rows in batches.query_rows(step).items():
            np.testing.assert_array_equal(rows, again.query_rows(step)[task])
    assert batches.fingerprint == again.fingerprint != other.fingerprint
    first, second = (batches.query_rows(0)[task] for task in ("first", "second"))
    assert list(first) != list(second), "tasks draw apart"


def test_two_hosts_share_every_tasks_batch(store):
    options = {"config": TaskBatchingConfig(total=16, num_negatives=1), "num_devices": 2}
    halves = [stream(store, **options, share=HostShare((i,), 2)).batches(3) for i in range(2)]
    for task, batch in stream(store, **options).batches(3).items():
        joined = np.concatenate([half[task].query_rows for half in halves])
        np.testing.assert_array_equal(joined, batch.query_rows)


def test_total_per_device_and_devices_share_evenly(store):
    config = TaskBatchingConfig(total=4, counted=BatchTotal.PER_DEVICE, num_negatives=1)
    batches = stream(store, config=config, num_devices=8)
    assert sum(batches.batch_sizes.values()) == 32
    assert all(size % 8 == 0 for size in batches.batch_sizes.values())


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"nq": 9, "fever": 0}, {"total": 8}, "task fever has no training queries"),
        ({}, {"total": 8}, "no task"),
        ({"nq": 9, "fever": 9}, {"total": 12, "num_devices": 8}, "the next total that fits is 16"),
        ({"nq": 9, "fever": 9}, {"total": 1}, "at least 2 for 2 tasks"),
        ({"nq": 9}, {"total": 8, "temperature": 0.0}, "temperature is 0.0\n.*a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(sizes, options, message):
    with pytest.raises(ConfigError, match=message):
        sizes_of(sizes, **options)
