"""A step that cannot be taken changes nothing and is counted, with one task or many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from task_problem import COMBINERS, OPTIMIZER, TASKS, steps, tree

from taser_jax.optim.median import MedianOver
from taser_jax.optim.multitask import Combiner, MultitaskConfig, build_multitask_optimizer
from taser_jax.optim.optimizers import build_optimizer
from taser_jax.optim.tsage import TSageConfig
from taser_jax.training.state import TrainState
from taser_jax.training.step import apply_gradients

PARAMS = tree(np.random.default_rng(9))
PARAMS["encoder"]["scalar"] = np.float32(-0.0)
GOOD = steps(4)
ONE_TASK = [(jax.tree.map(lambda leaf: leaf[0], grads), losses[:1]) for grads, losses in GOOD]


def optimizer_of(combiner, **tsage):
    if combiner is None:
        return build_optimizer(OPTIMIZER, PARAMS, total_steps=10)
    config = MultitaskConfig(combiner, tsage=TSageConfig(**tsage))
    return build_multitask_optimizer(config, OPTIMIZER, PARAMS, tasks=TASKS, total_steps=10)


class Steps:
    """A fresh state, and steps on given gradients that are compiled once."""

    def __init__(self, optimizer, params=PARAMS):
        self.state = TrainState(jnp.int32(0), params, optimizer.init(params))
        self.report = None
        apply = functools.partial(apply_gradients, optimizer=optimizer, key=jax.random.key(0))
        self._apply = jax.jit(apply)

    def take(self, gradients, losses):
        tasks, leaves = len(losses), jax.tree.leaves(gradients)
        squares = [jnp.square(leaf).reshape(tasks, -1).sum(1) for leaf in leaves]
        sums = {"losses": jnp.asarray(losses), "squared_norms": jnp.asarray(sum(squares))}
        self.state, _, self.report = self._apply(self.state, gradients, **sums)
        return self

    @property
    def counts(self):
        return tuple(int(count) for count in self.state.skipped)


def bits(state):
    """Of all but its counters; distinguishes -0 from 0."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def with_bias(gradients, value):
    changed = jax.tree.map(np.copy, gradients)
    changed["encoder"]["bias"][..., 3] = value
    return changed


@pytest.mark.parametrize("combiner", [None, *COMBINERS])
def test_steps_around_bad_ones_are_as_if_those_had_not_been(combiner):
    """An infinite gradient, a NaN loss, a norm that overflows: bit for bit nothing changes."""
    problem = ONE_TASK if combiner is None else GOOD
    undisturbed, disturbed = Steps(optimizer_of(combiner)), Steps(optimizer_of(combiner))
    (gradients, losses), second, third, _ = problem
    disturbed.take(gradients, losses)
    before = disturbed.state
    disturbed.take(with_bias(gradients, np.inf), losses)
    disturbed.take(gradients, losses * np.nan)
    assert disturbed.counts == (2, 2)
    assert bits(disturbed.state) == bits(before)
    disturbed.take(*second)
    assert disturbed.counts == (0, 2)
    disturbed.take(with_bias(gradients, 3e19), losses)
    assert disturbed.counts == (1, 3)
    disturbed.take(*third)
    for step in ((gradients, losses), second, third):
        undisturbed.take(*step)
    assert (int(disturbed.state.step), int(undisturbed.state.step)) == (6, 3)
    assert undisturbed.counts == (0, 0)
    assert bits(disturbed.state) == bits(undisturbed.state)
    params, initial = disturbed.state.params["encoder"], PARAMS["encoder"]
    assert not np.array_equal(params["kernel"], initial["kernel"])
    np.testing.assert_array_equal(params["frozen"], initial["frozen"])


def one_entry_of(gradients, task, value=3.0):
    """Gradients that are 0 for a task, but for one entry."""
    changed = jax.tree.map(np.copy, gradients)
    for leaf in jax.tree.leaves(changed):
        leaf[task] = 0
    changed["encoder"]["kernel"][task, 0, 0] = value
    return changed


def test_a_median_of_zero_skips_the_step_and_the_report_says_whose():
    run = Steps(optimizer_of(Combiner.TSAGE)).take(*GOOD[0])
    before, (gradients, losses) = run.state, GOOD[1]
    run.take(one_entry_of(gradients, 1), losses)
    assert run.counts == (1, 1)
    assert bits(run.state) == bits(before)
    medians = [float(run.report.scalars[f"median/{task}"]) for task in TASKS]
    assert [median == 0 for median in medians] == [False, True, False]
    run.take(gradients, losses)
    assert run.counts == (0, 1)


@pytest.mark.parametrize("over", MedianOver)
def test_a_task_without_any_gradient_leaves_the_step_to_the_others(over):
    """Its softmax is saturated: that is no reason to stop."""
    run = Steps(optimizer_of(Combiner.TSAGE, median_over=over, burn_in_share=0.0, beta=0.0))
    gradients, losses = GOOD[0]
    run.take(one_entry_of(gradients, 1, 0.0), losses)
    assert run.counts == (0, 0)
    assert float(run.report.scalars["median/fever"]) == 0
    # Its sensitivities are 0, so wherever another's is above, that one weighs more.
    assert float(run.report.weights[1]) < min(float(w) for w in run.report.weights[::2])
    assert not np.array_equal(run.state.params["encoder"]["kernel"], PARAMS["encoder"]["kernel"])


def test_over_nonzero_entries_one_entry_is_enough():
    run = Steps(optimizer_of(Combiner.TSAGE, median_over=MedianOver.NONZERO))
    gradients, losses = GOOD[0]
    assert run.take(one_entry_of(gradients, 1), losses).counts == (0, 0)


def test_one_devices_nan_skips_the_step_on_all():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = {"kernel": jnp.ones((8, 4))}
    run = Steps(optax.adam(0.1), jax.device_put(params, rows))
    gradients = {"kernel": np.ones((8, 4), np.float32)}
    gradients["kernel"][5, 2] = np.nan
    run.take(jax.device_put(gradients, rows), np.ones(1, np.float32))
    assert run.counts == (1, 1)
    assert len(run.state.params["kernel"].sharding.device_set) == 8
    np.testing.assert_array_equal(run.state.params["kernel"], params["kernel"])
