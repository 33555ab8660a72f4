import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratic

from taser_jax.evaluation.specialty.commitment import (
    Averages,
    Marks,
    Smoothing,
    advance,
    commitment_rows,
    compare,
    marks_of,
    no_averages,
)
from taser_jax.evaluation.specialty.sensitivity import Sample, make_measure_batch
from taser_jax.optim.tsage import tsage
from taser_jax.optim.tsage_options import BiasCorrection, TSageConfig
from taser_jax.storage.errors import DataError

BETAS = (0.0, 0.9)
PARAMS = quadratic.tree(np.random.default_rng(7))
LATER = quadratic.tree(np.random.default_rng(8))
MEASURE = make_measure_batch(quadratic.LOSSES)
BATCHES = quadratic.batches(6)


def averages_of(params, batches, averages=None, *, devices=1):
    placed = quadratic.put(params, devices)
    averages = averages or no_averages(placed, quadratic.TASKS, betas=len(BETAS))
    return advance(averages, MEASURE, placed, batches, checkpoint="here", betas=BETAS)


def marks(averages, bias_correction=BiasCorrection.ADAM):
    return marks_of(averages, Smoothing(BETAS, bias_correction))


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
    """Six parameters, owners earlier and later; of the first four, specific, 1 and 3 stay: 50%."""
    specific = jnp.array([[True] * 4 + [False] * 2])
    earlier = Marks(jnp.array([[0, 1, 2, 1, 0, 2]], jnp.int16), specific)
    later = Marks(jnp.array([[0, 2, 2, 0, 0, 2]], jnp.int16), ~specific)
    (commitment,) = compare([earlier], [later])
    assert (commitment.specific, commitment.committed, commitment.rate) == (4, 2, 0.5)
    (twice,) = compare([earlier, earlier], [later, later])
    assert (twice.specific, twice.committed) == (8, 4)


def test_no_task_specific_parameter_has_no_rate():
    none = Marks(jnp.zeros((1, 3), jnp.int16), jnp.zeros((1, 3), bool))
    assert np.isnan(compare([none], [none])[0].rate)


@pytest.fixture(scope="module")
def two_points():
    """(averages at the first point, their marks, at the second, their marks)."""
    first = averages_of(PARAMS, BATCHES[:3])
    # The next call donates them; a copied tree of all tasks would have them in another order.
    copies = {task: jax.tree.map(jnp.copy, tree) for task, tree in first.values.items()}
    kept = Averages(first.batches, copies)
    second = averages_of(LATER, BATCHES[3:], first)
    return kept, marks(kept), second, marks(second)


@pytest.mark.parametrize("place", range(len(BETAS)))
def test_rates_equal_a_float64_oracle_that_holds_everything(two_points, place):
    beta = BETAS[place]
    first, then, second, now = two_points
    wanted = oracle_averages(beta)
    for averages, steps in ((first, 3), (second, 6)):
        assert averages.batches == steps
        np.testing.assert_allclose(flat(averages, place), wanted[steps - 1], rtol=1e-3, atol=1e-5)
    owners, specific = [], []
    for steps in (3, 6):
        corrected = wanted[steps - 1] / (1 - beta**steps)
        entropy, _ = quadratic.entropy(corrected, 2.0)
        specific.append((entropy < 0.3) & (corrected.max(0) >= 0.1))
        tied = (corrected == corrected.max(0)).sum(0) > 1
        owners.append(np.where(tied, len(quadratic.TASKS), corrected.argmax(0)))
    committed = specific[0] & (owners[0] == owners[1])
    commitment = compare(then, now)[place]
    assert specific[0].sum() > 20
    assert 0 < committed.sum() < specific[0].sum()
    assert commitment.specific == specific[0].sum()
    assert commitment.committed == committed.sum()


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
        return Averages(averages.batches, {name: averages.values[name] for name in names})

    found = compare(marks(reordered(two_points[0])), marks(reordered(two_points[2])))
    assert found == compare(then, now)


def test_without_bias_correction_a_young_average_is_small(two_points):
    specific = {
        correction: int(sum(m.specific[1].sum() for m in marks(two_points[0], correction)))
        for correction in BiasCorrection
    }
    assert specific[BiasCorrection.NONE] < specific[BiasCorrection.ADAM]


def test_a_batch_that_cannot_be_normalised_says_where():
    batch = BATCHES[0] | {"wow": jax.tree.map(np.zeros_like, BATCHES[0]["wow"])}
    with pytest.raises(DataError, match=r"here: the median sensitivity to wow is 0"):
        averages_of(PARAMS, [batch])


def test_each_checkpoint_is_compared_with_the_one_before(two_points):
    first, then, second, now = two_points
    values = np.random.default_rng(0).normal(10, 1, size=(4, 3, 100))
    sample = Sample(values, np.ones((4, 3)))
    silent = sample._replace(medians=np.zeros((4, 3)))
    steps = [(40, first), (80, second), (120, second)]
    samples = {40: sample, 80: sample, 120: silent}
    rows = commitment_rows("naive", steps, Smoothing(BETAS), samples, names=["0", "0.9"])
    assert [(row.earlier_step, row.step, row.beta) for row in rows] == [
        *((40, 80, "0"), (40, 80, "0.9"), (80, 120, "0"), (80, 120, "0.9")),
    ]
    assert [row.commitment for row in rows[:2]] == compare(then, now)
    assert [row.commitment.rate for row in rows[2:]] == [1, 1]
    # A batch without a median cannot be normalised: there is no noise to show.
    assert [row.noise is None for row in rows] == [False, False, True, True]
