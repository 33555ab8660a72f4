"""Items of concurrent calls share batches, and every caller gets its own results."""

import asyncio
import time

from taser_jax.serving.engine import Batcher, Limits


class Doubling:
    """Doubles numbers, and notes its batches."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.batches: list[tuple[object, list[int]]] = []
        self.seconds = seconds

    def __call__(self, key: object, items: list[int]) -> list[int]:
        time.sleep(self.seconds)
        self.batches.append((key, items))
        if 13 in items:
            raise RuntimeError("unlucky")
        return [2 * item for item in items]


async def answers(batcher: Batcher, *calls: tuple[str, list[int]]) -> list:
    batcher.start()
    results = await asyncio.gather(
        *(batcher.submit(key, items) for key, items in calls), return_exceptions=True
    )
    await batcher.stop()
    return results


def test_a_batch_has_at_most_its_size_and_one_key():
    compute = Doubling(seconds=0.01)
    batcher = Batcher(compute, Limits(max_batch=4, deadline=0.05))
    calls = [("b" if n % 3 == 0 else "a", [n, n + 300][: 1 + n % 2]) for n in range(14, 40)]
    assert asyncio.run(answers(batcher, *calls)) == [[2 * n for n in items] for _, items in calls]
    assert max(len(items) for _, items in compute.batches) <= 4
    for key, items in compute.batches:
        assert {("b" if n % 3 == 0 else "a") for n in items} == {key}


def test_a_full_batch_does_not_wait_for_the_deadline():
    batcher = Batcher(Doubling(), Limits(max_batch=2, deadline=30))
    start = time.monotonic()
    assert asyncio.run(answers(batcher, ("a", [1]), ("a", [2]))) == [[2], [4]]
    assert time.monotonic() - start < 5


def test_an_error_reaches_the_callers_of_its_batch_alone():
    batcher = Batcher(Doubling(), Limits(max_batch=8, deadline=0.01))
    unlucky, lucky = asyncio.run(answers(batcher, ("a", [13]), ("b", [5])))
    assert isinstance(unlucky, RuntimeError)
    assert lucky == [10]


def test_a_caller_that_leaves_takes_nothing_along():
    async def run() -> tuple[list, Doubling]:
        compute = Doubling(seconds=0.02)
        batcher = Batcher(compute, Limits(max_batch=1, deadline=0.001))
        batcher.start()
        calls = [asyncio.create_task(batcher.submit("a", [n])) for n in range(4)]
        await asyncio.sleep(0.005)
        calls[2].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        await batcher.stop()
        return results, compute

    results, compute = asyncio.run(run())
    assert isinstance(results[2], asyncio.CancelledError)
    assert [*results[:2], results[3]] == [[0], [2], [6]]
    assert ("a", [2]) not in compute.batches
