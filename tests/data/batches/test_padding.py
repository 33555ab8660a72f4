"""Texts in groups of similar length: the same texts in the same order, with less padding."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny_training import store_writer

from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig, Layout, Padding, drawn_lengths, lengths_at
from taser_jax.data.token_store.arrays import TokenArray
from taser_jax.devices.mesh import HostShare
from taser_jax.models.batch import TokenGroups, Tokens, abstract_batch, in_groups, sizes_of
from taser_jax.storage.errors import ConfigError

QUERY_LENGTH, PASSAGE_LENGTH = 12, 64
CONFIG = BatchingConfig(batch_size=16, num_negatives=2)
PADDING = Padding((4, 8, 16, 32, 999), multiple=4, steps=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Most passages are short, some as long as can be."""
    rng = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("ragged") / "tokens"
    lengths = {"query_length": QUERY_LENGTH, "passage_length": PASSAGE_LENGTH}
    writer = store_writer(directory, vocabulary_size=100, **lengths)
    lengths = np.minimum(rng.geometric(0.08, 300), PASSAGE_LENGTH)
    writer.write_passages([rng.integers(1, 100, n).tolist() for n in lengths], count=300)
    for task, longest in (("one", QUERY_LENGTH), ("two", 6)):
        tokens = [rng.integers(1, 100, n).tolist() for n in rng.integers(1, longest + 1, 90)]
        texts = {"query_ids": [f"{task}-{i}" for i in range(90)], "tokens": tokens}
        positives, negatives = rng.permutation(300)[:90, None], rng.integers(0, 300, (90, 5))
        rows = {"positives": positives.tolist(), "hard_negatives": negatives.tolist()}
        writer.write_queries(task, "train", **texts, **rows)
    return writer.finish()


def tasks_of(store):
    return {task: store.queries(task, "train") for task in ("one", "two")}


def restored(texts: TokenGroups, length: int) -> Tokens:
    """The texts in their own order, padded to one length."""
    whole = [group.resized(length) for group in texts.groups]
    ids, mask = (np.concatenate([getattr(g, name) for g in whole]) for name in ("ids", "mask"))
    return Tokens(ids[texts.place], mask[texts.place])


assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def shape_of(array) -> tuple[tuple[int, ...], np.dtype]:
    return array.shape, array.dtype


def test_lengths_of_a_distribution_by_hand():
    quantiles = {1: 30, 0: 8, 0.5: 12}
    assert lengths_at(quantiles, np.array([0, 0.25, 0.5, 0.75, 1])).tolist() == [8, 10, 12, 21, 30]
    drawn = drawn_lengths(quantiles, steps=200, texts=50)
    assert drawn.shape == (200, 50)
    assert drawn.min() >= 8
    assert drawn.max() <= 30
    np.testing.assert_allclose(np.quantile(drawn, [0.25, 0.5, 0.75]), [10, 12, 21], atol=1)
    np.testing.assert_array_equal(drawn, drawn_lengths(quantiles, steps=200, texts=50))


def test_a_layout_by_hand():
    batches = np.array([[9, 3, 30, 5], [4, 21, 7, 20]])
    layout = Layout.of(batches, Padding((8, 32, 64)), longest=40)
    assert layout == Layout(sizes=(2, 2), lengths=(8, 32))
    assert str(layout) == "2 x 8, 2 x 32"
    # The third-shortest text would fit into 20 tokens, but groups have multiples of two texts.
    layout = Layout.of(batches, Padding((8, 20), multiple=2), longest=40)
    assert layout == Layout(sizes=(2, 2), lengths=(8, 40))
    assert layout.holds(np.array([40, 8, 8, 9]))
    assert not layout.holds(np.array([40, 8, 9, 9]))


def test_a_group_by_hand():
    ids = np.array([[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]])
    texts = TokenArray(ids, np.array([3, 1, 2, 1]))
    layout = Layout(sizes=(2, 2), lengths=(1, 4))
    grouped = layout.group(texts, np.array([2, 3, 0, 1]), HostShare())
    groups = [group.ids.tolist() for group in grouped.groups]
    assert groups == [[[7], [4]], [[5, 6, 0, 0], [1, 2, 3, 0]]]
    assert grouped.place.tolist() == [2, 0, 3, 1]


def test_batches_are_those_of_full_padding(store):
    tasks = tasks_of(store)
    plain = BatchStream(store, tasks, CONFIG)
    grouped = BatchStream(store, tasks, CONFIG, padding=PADDING)
    shapes, fits = set(), []
    for step in range(64):
        expected, batch = plain.batch(step), grouped.batch(step)
        fits.append(isinstance(batch.passages, TokenGroups))
        shapes.add(batch.sides)
        if not fits[-1]:
            assert_same(batch.passages, expected.passages)
            continue
        assert_same(restored(batch.queries, expected.queries.ids.shape[1]), expected.queries)
        assert_same(restored(batch.passages, PASSAGE_LENGTH), expected.passages)
        assert batch.tokens < 0.75 * expected.tokens
        # What is compiled without data has the arrays of what is trained on.
        abstract = abstract_batch(*expected.sides)
        planned = in_groups(abstract, sizes_of(batch.queries), sizes_of(batch.passages))
        assert jax.tree.map(shape_of, planned) == jax.tree.map(shape_of, batch)
        without = [dataclasses.replace(b, queries=0, passages=0) for b in (batch, expected)]
        assert_same(*without)
    # The first steps decide the groups; later ones that do not fit are padded in full.
    assert all(fits[: PADDING.steps])
    assert not all(fits)
    # Groups of each task's own, and full padding.
    assert len(shapes) == 3
    assert max(grouped.layouts["one"][0].lengths) == QUERY_LENGTH
    assert max(grouped.layouts["two"][0].lengths) <= 8
    for queries, passages in grouped.layouts.values():
        assert max(passages.lengths) == PASSAGE_LENGTH
        assert all(size % PADDING.multiple == 0 for size in (*queries.sizes, *passages.sizes))
    assert plain.fingerprint == grouped.fingerprint


def test_hosts_make_their_parts_of_every_group(store):
    stream = functools.partial(BatchStream, store, tasks_of(store), CONFIG, padding=PADDING)
    parts = [stream(share=HostShare((host,), 2)).batch(5) for host in range(2)]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    assert_same(joined, stream().batch(5))


def test_every_tasks_batch_is_grouped_or_none_is(store):
    config = TaskBatchingConfig(total=32, num_negatives=2)
    plain = TaskBatchStream(store, tasks_of(store), config)
    grouped = TaskBatchStream(store, tasks_of(store), config, padding=PADDING)
    # As long as their own task's longest, in multiples of eight.
    assert plain.query_lengths == grouped.query_lengths == {"one": QUERY_LENGTH, "two": 8}
    shapes = set()
    for step in range(64):
        expected, batches = plain.batches(step), grouped.batches(step)
        assert expected["two"].queries.ids.shape[1] == 8
        shapes.add(tuple(batch.sides for batch in batches.values()))
        kinds = {type(side) for b in batches.values() for side in (b.queries, b.passages)}
        assert len(kinds) == 1
        for task, batch in batches.items():
            if kinds == {TokenGroups}:
                width = grouped.query_lengths[task]
                assert_same(restored(batch.queries, width), expected[task].queries)
                assert_same(restored(batch.passages, PASSAGE_LENGTH), expected[task].passages)
            else:
                assert_same(batch.queries, expected[task].queries)
    assert len(shapes) == 2
    assert max(grouped.layouts["two"][0].lengths) <= 8


@pytest.mark.parametrize("buckets", [(8, 4), (4, 4), (0, 4)])
def test_buckets_ascend(buckets):
    with pytest.raises(ConfigError, match="length_buckets"):
        Padding(buckets)
