import jax
import jax.numpy as jnp
import numpy as np
import quadratic

from taser_jax.evaluation.commitment import Marks, commitment_rows, compare, marks_of
from taser_jax.evaluation.sensitivity import Sample

TEMPERATURE = 2.0
RNG = np.random.default_rng(7)
# Averages of heavy tails, of which the later ones keep a half.
EARLIER = {task: quadratic.stiffness(RNG) for task in quadratic.TASKS}
LATER = {
    task: jax.tree.map(lambda new, old: (new + old) / 2, quadratic.stiffness(RNG), EARLIER[task])
    for task in quadratic.TASKS
}


def placed(averages, devices=1):
    scaled = jax.tree.map(lambda leaf: 3 * leaf, averages)
    return {task: quadratic.put(scaled[task], devices) for task in quadratic.TASKS}


def marks(averages, devices=1):
    return marks_of(placed(averages, devices), TEMPERATURE)


def test_worked_example():
    """Six parameters, owners earlier and later; of the first four, specific, 1 and 3 stay: 50%."""
    specific = jnp.array([True] * 4 + [False] * 2)
    earlier = Marks(jnp.array([0, 1, 2, 1, 0, 2], jnp.int16), specific)
    later = Marks(jnp.array([0, 2, 2, 0, 0, 2], jnp.int16), ~specific)
    commitment = compare([earlier], [later])
    assert (commitment.specific, commitment.committed, commitment.rate) == (4, 2, 0.5)
    twice = compare([earlier, earlier], [later, later])
    assert (twice.specific, twice.committed) == (8, 4)


def test_no_task_specific_parameter_has_no_rate():
    none = Marks(jnp.zeros(3, jnp.int16), jnp.zeros(3, bool))
    assert np.isnan(compare([none], [none]).rate)


def test_counts_equal_a_float64_oracle_that_holds_everything():
    owners, specific = [], []
    for averages in (EARLIER, LATER):
        values = 3 * np.stack([quadratic.flat(averages[task]) for task in quadratic.TASKS])
        entropy, _ = quadratic.entropy(values, TEMPERATURE)
        specific.append((entropy < 0.3) & (values.max(0) >= 0.1))
        tied = (values == values.max(0)).sum(0) > 1
        owners.append(np.where(tied, len(quadratic.TASKS), values.argmax(0)))
    committed = specific[0] & (owners[0] == owners[1])
    commitment = compare(marks(EARLIER), marks(LATER))
    assert specific[0].sum() > 20
    assert 0 < committed.sum() < specific[0].sum()
    assert commitment.specific == specific[0].sum()
    assert commitment.committed == committed.sum()


def test_eight_devices_find_what_one_finds():
    then, now = marks(EARLIER, devices=8), marks(LATER, devices=8)
    # Each device marks its own part of the kernel.
    assert then[1].owner.addressable_shards[0].data.shape == (12, 4)
    assert compare(then, now) == compare(marks(EARLIER), marks(LATER))


def test_each_checkpoint_is_compared_with_the_one_before():
    values = np.random.default_rng(0).normal(10, 1, size=(4, 3, 100))
    sample = Sample(values, np.ones((4, 3)))
    silent = sample._replace(medians=np.zeros((4, 3)))
    first, second = placed(EARLIER), placed(LATER)
    rows = commitment_rows(
        "T-SAGE",
        [(40, first), (80, second), (120, second)],
        {40: sample, 80: sample, 120: silent},
        beta=0.9,
        temperature=TEMPERATURE,
    )
    assert [(row.model, row.earlier_step, row.step) for row in rows] == [
        ("T-SAGE", 40, 80),
        ("T-SAGE", 80, 120),
    ]
    assert rows[0].commitment == compare(marks(EARLIER), marks(LATER))
    assert rows[1].commitment.rate == 1
    # A batch without a median cannot be normalised: there is no noise to show.
    assert [row.noise is None for row in rows] == [False, True]
