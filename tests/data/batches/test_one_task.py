import collections
import dataclasses
import functools
import logging

import jax
import numpy as np
import pytest
from tiny_training import store_writer

from taser_jax.data.batches.draws import rates_from_weights
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice
from taser_jax.data.token_store.arrays import Ragged
from taser_jax.devices.mesh import HostShare
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError

NUM_PASSAGES = 40


def write_store(directory, tasks):
    """`tasks`: task -> (positives, hard negatives). Passage r has tokens [r + 1] * (r % 3 + 1)."""
    sizes = {"vocabulary_size": 1000, "query_length": 4, "passage_length": 3}
    writer = store_writer(directory, collection_fingerprint=f"c-{directory.name}", **sizes)
    passages = ([row + 1] * (row % 3 + 1) for row in range(NUM_PASSAGES))
    writer.write_passages(passages, count=NUM_PASSAGES)
    for task, (positives, hard_negatives) in tasks.items():
        numbers = range(len(positives))
        ids, tokens = [f"{task}-{i}" for i in numbers], [[100 + i, 2] for i in numbers]
        rows = {"positives": positives, "hard_negatives": hard_negatives}
        writer.write_queries(task, "train", query_ids=ids, tokens=tokens, **rows)
    store = writer.finish()
    return store, {task: store.queries(task, "train") for task in tasks}


def random_task(count, seed):
    """Few distinct positives, so that batches are full of false negatives."""
    rng = np.random.default_rng(seed)
    positives = [rng.choice(12, rng.integers(1, 5), replace=False).tolist() for _ in range(count)]
    pools = [rng.integers(0, NUM_PASSAGES, rng.integers(0, 9)).tolist() for _ in range(count)]
    return positives, pools


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    tasks = {"nq": random_task(50, 0), "trec": random_task(13, 1), "webq": random_task(21, 2)}
    return write_store(tmp_path_factory.mktemp("store"), tasks)


CONFIG = BatchingConfig(batch_size=8, num_negatives=3, rates={"trec": 3.0})


def with_config(**changes):
    return dataclasses.replace(CONFIG, **changes)


assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        # TASER's P2 leaves out the gold passage (5) alone: another positive (7) may be a negative.
        ({"false_negatives": FalseNegatives.KEEP, "positives": PositiveChoice.FIRST}, {7, 20}),
        ({"false_negatives": FalseNegatives.KEEP, "positives": PositiveChoice.SAMPLE}, {20}),
        ({"false_negatives": FalseNegatives.MASK, "positives": PositiveChoice.FIRST}, {20}),
    ],
)
def test_which_of_a_querys_own_positives_may_be_its_hard_negatives(changes, allowed, tmp_path):
    data = write_store(tmp_path, {"t": ([[5, 7], [9]], [[5, 7, 20], [21]])})
    stream = BatchStream(*data, BatchingConfig(batch_size=2, num_negatives=1, **changes))
    drawn = [stream.rows(step) for step in range(40)]
    negatives = [rows.passage_rows[1::2][rows.query_rows == 0].item() for rows in drawn]
    assert set(negatives) == allowed


def test_rows_and_ignore_against_brute_force(toy, caplog):
    """By default, no label is a negative, and each of a query's positives is trained on."""
    store, tasks = toy
    with caplog.at_level(logging.INFO, logger="taser"):
        stream = BatchStream(store, tasks, CONFIG)
    seen, trained_on = 0, {task: set() for task in tasks}
    for step in range(stream.steps_per_epoch * 3):
        rows, batch = stream.rows(step), stream.batch(step)
        queries = tasks[rows.task]
        expected = np.zeros((8, 32), bool)
        for i, query in enumerate(rows.query_rows):
            positives = set(queries.positives[query].tolist())
            for column, passage in enumerate(rows.passage_rows):
                expected[i, column] = passage in positives and column != rows.positive_index[i]
            positive, *negatives = rows.passage_rows.reshape(8, 4)[i].tolist()
            assert rows.passage_rows[rows.positive_index[i]] == positive
            trained_on[rows.task].add((query, positive))
            pool = set(queries.hard_negatives[query].tolist()) - positives
            assert positive in positives
            assert len(set(negatives)) == 3
            assert not positives & set(negatives)
            # Random passages take the place of those that the pool lacks.
            from_pool = min(3, len(pool))
            assert set(negatives[:from_pool]) <= pool
            assert not pool & set(negatives[from_pool:])
        np.testing.assert_array_equal(batch.ignore, expected)
        seen += expected.sum()
    assert seen > 100
    assert len(trained_on["trec"]) > 13
    pairs = zip(tasks["nq"].hard_negatives, tasks["nq"].positives, strict=True)
    short = sum(len(np.setdiff1d(pool, positives)) < 3 for pool, positives in pairs)
    assert f"nq: {short} of 50 queries lack hard negatives (3 each are drawn)" in caplog.text
    kept = BatchStream(store, tasks, with_config(false_negatives=FalseNegatives.KEEP))
    assert not any(kept.batch(step).ignore.any() for step in range(kept.steps_per_epoch))


def test_draws_are_uniform(tmp_path):
    data = write_store(tmp_path, {"t": ([[0, 1, 2, 3]], [list(range(10, 16))])})
    stream = BatchStream(*data, with_config(batch_size=30, num_negatives=2, rates={}))
    steps = [stream.rows(step).passage_rows.reshape(30, 3) for step in range(100)]
    draws = np.concatenate(steps).tolist()
    positives = collections.Counter(draw[0] for draw in draws)
    assert sorted(positives) == [0, 1, 2, 3]
    assert all(abs(count - 750) < 120 for count in positives.values())
    pairs = collections.Counter(tuple(draw[1:]) for draw in draws)
    assert len(pairs) == 30, "every ordered pair of the six"
    assert all(abs(count - 100) < 45 for count in pairs.values())


@pytest.mark.parametrize("size", [8, 13, 16, 23])
def test_each_pass_is_a_permutation_filled_from_its_beginning(tmp_path, size):
    stream = BatchStream(*write_store(tmp_path, {"t": random_task(size, 3)}), with_config(rates={}))
    steps = stream.steps_per_epoch
    assert steps == -(-size // 8)
    passes = []
    for whole_pass in range(4):
        batches = [stream.rows(whole_pass * steps + step).query_rows for step in range(steps)]
        assert all(len(set(batch.tolist())) == 8 for batch in batches)
        order = np.concatenate(batches)
        assert sorted(order[:size]) == list(range(size))
        np.testing.assert_array_equal(order[size:], order[: len(order) - size])
        passes.append(tuple(order))
    assert len(set(passes)) == 4, "each pass has an order of its own"


def test_resuming_gives_the_same_batches(toy):
    stream, resumed = BatchStream(*toy, CONFIG), BatchStream(*toy, CONFIG)
    batches = [stream.batch(step) for step in range(40)]
    assert_same([resumed.batch(step) for step in range(25, 40)], batches[25:])
    assert_same([stream.batch(step) for step in reversed(range(40))], batches[::-1])
    other = BatchStream(*toy, with_config(seed=1))
    for step, batch in enumerate(batches):
        assert not np.array_equal(other.batch(step).passage_rows, batch.passage_rows)


def test_tokens_are_the_rows_tokens(toy):
    stream = BatchStream(*toy, CONFIG)
    rows, batch = stream.rows(5), stream.batch(5)
    np.testing.assert_array_equal(batch.query_rows, rows.query_rows)
    np.testing.assert_array_equal(batch.passage_rows, rows.passage_rows)
    np.testing.assert_array_equal(batch.queries.ids[:, 0], 100 + rows.query_rows)
    np.testing.assert_array_equal(batch.passages.ids[:, 0], 1 + rows.passage_rows)
    np.testing.assert_array_equal(batch.passages.mask.sum(axis=1), rows.passage_rows % 3 + 1)


@pytest.mark.parametrize("parts", [[(0,), (1,)], [(0, 3), (1, 2)], [(0,), (1,), (2,), (3,)]])
def test_hosts_together_make_the_batch_of_one(toy, parts):
    """A host's parts need not be neighbours."""
    whole = BatchStream(*toy, CONFIG)
    count = sum(map(len, parts))
    hosts = [BatchStream(*toy, CONFIG, share=HostShare(part, count)) for part in parts]
    assert {host.fingerprint for host in hosts} == {whole.fingerprint}
    order = np.argsort(np.concatenate(parts))
    for step in (0, 3, 17):
        made = [host.batch(step) for host in hosts]
        assert made[0].ignore.shape == (8 // len(parts), 32)

        def joined(*leaves):
            of_parts = np.concatenate([np.split(a, len(parts[0])) for a in leaves])
            return np.concatenate(of_parts[order])

        assert_same(jax.tree.map(joined, *made), whole.batch(step))


def test_a_set_smaller_than_a_batch(tmp_path):
    data, config = write_store(tmp_path, {"t": random_task(5, 3)}), with_config(rates={})
    stream = BatchStream(*data, config)
    rows, ignore = stream.rows(0), stream.batch(0).ignore
    assert collections.Counter(rows.query_rows.tolist()).most_common(1)[0][1] == 2
    # A query's copy brings the query's positives: none of them counts as a negative.
    for i, query in enumerate(rows.query_rows):
        copies = np.flatnonzero(rows.query_rows == query)
        others = rows.positive_index[copies[copies != i]]
        assert ignore[i, others].all()
    with pytest.raises(ConfigError, match=r"5 queries do not fill a batch of 8"):
        BatchStream(*data, dataclasses.replace(config, false_negatives=FalseNegatives.KEEP))


def test_fingerprint_follows_data_and_configuration(toy):
    store, tasks = toy
    base = BatchStream(store, tasks, CONFIG).fingerprint
    mined = tasks["nq"].with_hard_negatives(Ragged.from_lists([[1]] * 50))
    others = [(tasks | {"nq": mined}, CONFIG), ({"nq": tasks["nq"]}, with_config(rates={}))]
    for change in (
        *({"batch_size": 4}, {"num_negatives": 1}, {"seed": 1}, {"rates": {}}),
        *({"false_negatives": FalseNegatives.KEEP}, {"positives": PositiveChoice.FIRST}),
    ):
        others.append((tasks, with_config(**change)))
    assert len({base, *(BatchStream(store, *other).fingerprint for other in others)}) == 9
    assert BatchStream(store, dict(reversed(tasks.items())), CONFIG).fingerprint == base


def test_bad_data_is_named(toy, tmp_path):
    store, tasks = toy
    nq = tasks["nq"]
    far = nq.with_hard_negatives(Ragged.from_lists([[]] * 7 + [[NUM_PASSAGES]] + [[]] * 42))
    with pytest.raises(DataError, match=r"hard_negatives of query 'nq-7': passage row 40"):
        BatchStream(store, {"nq": far}, with_config(rates={}))
    none = dataclasses.replace(nq, positives=Ragged.from_lists([[1]] * 3 + [[]] + [[1]] * 46))
    with pytest.raises(DataError, match=r"task 'nq', split 'train': query 'nq-3' has no positive"):
        BatchStream(store, {"nq": none}, with_config(rates={}))
    with pytest.raises(ConfigError, match="50 negatives per query from 40 passages"):
        BatchStream(store, tasks, with_config(num_negatives=50))
    other, _ = write_store(tmp_path, {"t": ([[0]], None)})
    with pytest.raises(FingerprintError, match=r"task 'nq'.*: made from collection"):
        BatchStream(other, {"nq": nq}, with_config(rates={}))
    with pytest.raises(ConfigError, match="8 queries in 3 parts"):
        BatchStream(store, tasks, CONFIG, share=HostShare((0,), 3))
    # A preprocessor, or mining, may have dropped all queries of a task.
    some, emptied = write_store(tmp_path / "some", {"t": ([], []), "u": ([[0]] * 8, [[1]] * 8)})
    rates = rates_from_weights({"t": 3.0, "u": 1.0}, {task: len(emptied[task]) for task in "tu"})
    with pytest.raises(DataError, match="task 't', split 'train': no queries"):
        BatchStream(some, emptied, with_config(rates=rates))
