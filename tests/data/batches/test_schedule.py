import collections

import pytest

from taser_jax.data.batches.draws import Schedule, rates_from_weights
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.storage.errors import ConfigError

SIZES = {"nq": 100, "trec": 15, "webq": 3}


def make(**changes):
    settings = {"batch_size": 10, "rates": {"trec": 4, "nq": 0.55}} | changes
    return Schedule(SIZES, BatchingConfig(**settings))


def test_batches_per_epoch_by_hand():
    # nq: int(10 * 0.55) = 5; trec: int(ceil(1.5) * 4) = 8; webq: ceil(0.3) = 1.
    schedule = make()
    assert schedule.batches_per_epoch == {"nq": 5, "trec": 8, "webq": 1}
    assert schedule.steps_per_epoch == 14
    assert make(rates={"nq": 0.01}).batches_per_epoch["nq"] == 1


def test_every_epoch_has_each_task_at_its_rate_and_counts_its_batches_on():
    schedule = make()
    epochs = [[schedule.turn(14 * epoch + at) for at in range(14)] for epoch in range(5)]
    for turns in epochs:
        assert collections.Counter(task for task, _ in turns) == schedule.batches_per_epoch
    for task, count in schedule.batches_per_epoch.items():
        batches = [batch for turns in epochs for name, batch in turns if name == task]
        assert batches == list(range(5 * count))


def test_is_a_function_of_seed_and_step():
    turns = [make().turn(step) for step in range(60)]
    sizes = dict(reversed(SIZES.items()))
    reordered = Schedule(sizes, BatchingConfig(10, rates={"nq": 0.55, "trec": 4}))
    assert [reordered.turn(step) for step in reversed(range(60))] == turns[::-1]
    assert [make(seed=1).turn(step) for step in range(60)] != turns
    tasks = [task for task, _ in turns]
    assert tasks[:14] != tasks[14:28], "each epoch has an order of its own"


def test_rates_from_weights_give_each_task_its_share():
    rates = rates_from_weights({"nq": 3.0, "trec": 1.0}, {"nq": 6000, "trec": 2000})
    assert rates == pytest.approx({"nq": 1.0, "trec": 1.0})
    sizes = {"nq": 9000, "trec": 1000}
    rates = rates_from_weights({"nq": 2, "trec": 2}, sizes)
    batches = Schedule(sizes, BatchingConfig(10, rates=rates)).batches_per_epoch
    assert batches == {"nq": 500, "trec": 500}


def test_weights_that_are_the_sizes_lose_no_batch():
    # 62,568 / 342,984 · 342,984 / 62,568 is 0.9999999999999999 in floating point.
    sizes = {"a": 63_791, "b": 53_175, "c": 39_855, "d": 62_568, "e": 47_030, "f": 76_565}
    rates = rates_from_weights({task: float(size) for task, size in sizes.items()}, sizes)
    assert rates == dict.fromkeys(sizes, 1.0)
    plain = Schedule(sizes, BatchingConfig(32)).batches_per_epoch
    assert Schedule(sizes, BatchingConfig(32, rates=rates)).batches_per_epoch == plain


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"terc": 4.0}, "did you mean trec"),
        ({"nq": 0.0}, "rate 0.0 for task 'nq'"),
        ({"nq": float("nan")}, "rate nan"),
    ],
)
def test_bad_rates(rates, message):
    with pytest.raises(ConfigError, match=message):
        make(rates=rates)


def test_bad_weights_and_no_tasks():
    with pytest.raises(ConfigError, match="no weight for task 'trec'"):
        rates_from_weights({"nq": 1.0}, {"nq": 5, "trec": 5})
    with pytest.raises(ConfigError, match=r"(?s)no task to train on.*taser tokenize"):
        Schedule({}, BatchingConfig(1))
    with pytest.raises(ConfigError, match="step -1"):
        make().turn(-1)
