import threading
import time

import pytest

from taser_jax.data.batches.stream import prefetch


def same(value):
    return value


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch_0"]


def settle(made):
    """Waits until the thread has made all it may."""
    before = None
    while before != len(made):
        before = len(made)
        time.sleep(0.05)


def test_yields_every_step_in_order_and_ends():
    names = set()

    def put(batch):
        names.add(threading.current_thread().name)
        return batch * 10

    assert list(prefetch(same, 3, 8, put)) == [(3, 30), (4, 40), (5, 50), (6, 60), (7, 70)]
    assert names == {"prefetch_0"}
    assert list(prefetch(same, 5, 5, same)) == []
    assert threads() == []


def test_works_ahead_by_two_and_no_more_and_closing_early_joins_the_thread():
    made = []
    batches = prefetch(made.append, 0, 100, same)
    next(batches)
    settle(made)
    assert made == [0, 1, 2]
    assert len(threads()) == 1
    batches.close()
    assert threads() == []


def test_errors_surface_at_their_step():
    def batch(step):
        if step == 2:
            raise ValueError("step 2 failed")
        return step

    batches = prefetch(batch, 0, 5, same)
    assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="step 2 failed"):
        next(batches)
    assert threads() == []

    def put(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(prefetch(same, 0, 5, put))
