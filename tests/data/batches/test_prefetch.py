import threading
import time

import pytest

from taser_jax.data.batches.stream import prefetch


class Stream:
    def __init__(self, fails_at=None):
        self.made, self.fails_at = [], fails_at

    def batch(self, step):
        if step == self.fails_at:
            raise ValueError(f"step {step} failed")
        self.made.append(step)
        return step


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch_0"]


def settle(stream):
    """Waits until the thread has made all it may."""
    before = None
    while before != len(stream.made):
        before = len(stream.made)
        time.sleep(0.05)


def test_yields_every_step_in_order_and_ends():
    names = set()

    def put(batch):
        names.add(threading.current_thread().name)
        return batch * 10

    out = list(prefetch(Stream().batch, 3, 8, put))
    assert out == [(3, 30), (4, 40), (5, 50), (6, 60), (7, 70)]
    assert names == {"prefetch_0"}
    assert list(prefetch(Stream().batch, 5, 5, lambda batch: batch)) == []
    assert threads() == []


def test_works_ahead_by_two_and_no_more():
    stream = Stream()
    batches = prefetch(stream.batch, 0, 100, lambda batch: batch)
    next(batches)
    settle(stream)
    assert stream.made == [0, 1, 2]
    batches.close()


def test_errors_surface_at_their_step():
    batches = prefetch(Stream(fails_at=2).batch, 0, 5, lambda batch: batch)
    assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="step 2 failed"):
        next(batches)
    assert threads() == []

    def put(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(prefetch(Stream().batch, 0, 5, put))


def test_closing_early_joins_the_thread():
    batches = prefetch(Stream().batch, 0, 1000, lambda batch: batch)
    next(batches)
    assert len(threads()) == 1
    batches.close()
    assert threads() == []
