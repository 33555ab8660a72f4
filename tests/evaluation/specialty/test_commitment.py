import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.specialty.commitment import (
    Averages,
    JudgedAt,
    Marks,
    compare,
    make_advance,
    marks_of,
    no_averages,
)
from taser_jax.evaluation.specialty.specialty import Bounds
from taser_jax.optim.tsage import tsage
from taser_jax.optim.tsage_options import BiasCorrection, TSageConfig
from taser_jax.storage.errors import DataError

BETAS = (0.0, 0.9)
PARAMS = quadratic.tree(np.random.default_rng(7))
LATER = quadratic.tree(np.random.default_rng(8))
ADVANCE = make_advance(quadratic.LOSSES, betas=BETAS)
BATCHES = quadratic.batches(6)


def averages_of(params, batches, averages=None, *, devices=1, advance=ADVANCE):
    placed = quadratic.put(params, devices)
    averages = averages or no_averages(placed, quadratic.TASKS, betas=len(BETAS))
    return advance(averages, placed, batches, where="here")


def marks(averages, **options):
    settings = {
        "betas": BETAS,
        "temperature": 2.0,
        "bounds": Bounds(),
        "bias_correction": BiasCorrection.ADAM,
    }
    return marks_of(averages, **(settings | options))


def flat(averages, beta):
    return np.stack(
        [quadratic.flat(jax.tree.map(lambda a: a[beta], t)) for t in averages.values.values()]
    )


def oracle_averages(beta, start=0.0):
    """Three batches at one point of the parameters, three at another, in float64."""
    points = [PARAMS] * 3 + [LATER] * 3
    found, average = [], start
    for params, batch in zip(points, BATCHES, strict=True):
        new = quadratic.sensitivities(params, batch)
        average = beta * average + (1 - beta) * new / quadratic.lower_medians(new)
        found.append(average)
    return found


def test_worked_example():
    """Six parameters, owners then and now; the first four specific then, the third to fifth now.

    Of the four, 1 and 3 keep their task: 50%. Of the three now, 3 and 5 do: 67%. Both times
    specific are 3 and 4, and 3 is committed: 50%.
    """
    then = Marks(jnp.array([[0, 1, 2, 1, 0, 2]], jnp.int16), jnp.array([[True] * 4 + [False] * 2]))
    now = Marks(
        jnp.array([[0, 2, 2, 0, 0, 2]], jnp.int16),
        jnp.array([[False, False, True, True, True, False]]),
    )
    (found,) = compare([then], [now])
    assert found.specific == {JudgedAt.EARLIER: 4, JudgedAt.LATER: 3, JudgedAt.BOTH: 2}
    assert found.committed == {JudgedAt.EARLIER: 2, JudgedAt.LATER: 2, JudgedAt.BOTH: 1}
    assert found.rate(JudgedAt.LATER) == pytest.approx(2 / 3)
    (twice,) = compare([then, then], [now, now])
    assert twice.specific[JudgedAt.EARLIER] == 8


def test_no_task_specific_parameter_has_no_rate():
    none = Marks(jnp.zeros((1, 3), jnp.int16), jnp.zeros((1, 3), bool))
    (found,) = compare([none], [none])
    assert np.isnan(found.rate(JudgedAt.BOTH))


@pytest.fixture(scope="module")
def two_points():
    """(averages at the first point, their marks, at the second, their marks)."""
    first = averages_of(PARAMS, BATCHES[:3])
    # The next call donates them; a copied tree of all tasks would have them in another order.
    copies = {task: jax.tree.map(jnp.copy, tree) for task, tree in first.values.items()}
    kept = Averages(first.steps, copies)
    second = averages_of(LATER, BATCHES[3:], first)
    return kept, marks(kept), second, marks(second)


@pytest.mark.parametrize("place", range(len(BETAS)))
def test_rates_equal_a_float64_oracle_that_holds_everything(two_points, place):
    beta = BETAS[place]
    first, then, second, now = two_points
    wanted = oracle_averages(beta)
    for averages, steps in ((first, 3), (second, 6)):
        assert averages.steps == steps
        np.testing.assert_allclose(flat(averages, place), wanted[steps - 1], rtol=1e-3, atol=1e-5)
    owners, specific = [], []
    for steps in (3, 6):
        corrected = wanted[steps - 1] / (1 - beta**steps)
        entropy, _ = quadratic.entropy(corrected, 2.0)
        specific.append((entropy < 0.3) & (corrected.max(0) >= 0.1))
        tied = (corrected == corrected.max(0)).sum(0) > 1
        owners.append(np.where(tied, len(quadratic.TASKS), corrected.argmax(0)))
    same = owners[0] == owners[1]
    found = compare(then, now)[place]
    judged = {
        JudgedAt.EARLIER: specific[0],
        JudgedAt.LATER: specific[1],
        JudgedAt.BOTH: specific[0] & specific[1],
    }
    assert specific[0].sum() > 20
    assert not same[specific[0]].all()
    for judged_at, of in judged.items():
        assert found.specific[judged_at] == of.sum()
        assert found.committed[judged_at] == (of & same).sum()


def test_eight_devices_find_what_one_finds(two_points):
    first = averages_of(PARAMS, BATCHES[:3], devices=8)
    then = marks(first)
    kernel = first.values["nq"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (len(BETAS), 12, 4)
    assert then[1].owner.addressable_shards[0].data.shape == (len(BETAS), 12, 4)
    now = marks(averages_of(LATER, BATCHES[3:], first, devices=8))
    assert compare(then, now) == compare(two_points[1], two_points[3])


def test_averages_are_those_of_t_sage():
    config = TSageConfig(beta=BETAS[1], burn_in_share=0.0)
    combiner = tsage(config, tasks=quadratic.TASKS, total_steps=3)
    params = quadratic.put(PARAMS)
    state = combiner.init(params)
    for batch in BATCHES[:3]:
        gradients = [jax.grad(quadratic.loss)(params, batch[task]) for task in quadratic.TASKS]
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *gradients)
        _, state = combiner.update(
            stacked, state, params, losses=jnp.ones(3), key=jax.random.key(0)
        )
    found = averages_of(PARAMS, BATCHES[:3])
    for task in quadratic.TASKS:
        jax.tree.map(
            lambda mine, theirs: np.testing.assert_allclose(mine[1], theirs, rtol=1e-5, atol=1e-6),
            found.values[task],
            state.average[task],
        )


def test_the_order_of_tasks_does_not_matter(two_points):
    _, then, _, now = two_points
    order = [2, 0, 1]

    def reordered(averages):
        names = [quadratic.TASKS[task] for task in order]
        return Averages(averages.steps, {name: averages.values[name] for name in names})

    found = compare(marks(reordered(two_points[0])), marks(reordered(two_points[2])))
    assert found == compare(then, now)


def test_without_bias_correction_a_young_average_is_small(two_points):
    specific = {
        correction: int(
            sum(m.specific[1].sum() for m in marks(two_points[0], bias_correction=correction))
        )
        for correction in BiasCorrection
    }
    assert specific[BiasCorrection.NONE] < specific[BiasCorrection.ADAM]


def test_a_batch_that_cannot_be_normalised_says_where():
    batch = BATCHES[0] | {"wow": jax.tree.map(np.zeros_like, BATCHES[0]["wow"])}
    with pytest.raises(DataError, match=r"here: the median sensitivity to wow is 0"):
        averages_of(PARAMS, [batch])
