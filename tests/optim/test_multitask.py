import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from task_problem import TASKS, flatten, on_eight_devices, permuted, run, steps, tree

from taser_jax.assembly.config import MultitaskTraining, TrainingConfig
from taser_jax.cli import configuration
from taser_jax.optim.multitask import (
    Combiner,
    MultitaskConfig,
    build_combiner,
    build_multitask_optimizer,
    reads_task_gradients,
)
from taser_jax.optim.optimizers import OptimizerConfig, Update, build_optimizer
from taser_jax.optim.task_gradients import Reduction, check_combined
from taser_jax.storage.errors import ConfigError

PARAMS = tree(np.random.default_rng(9))
COMBINERS = [c for c in Combiner if reads_task_gradients(MultitaskConfig(c))]
OPTIMIZER = OptimizerConfig(
    learning_rate=0.1,
    floor=0.5,
    updates=((".*/frozen", Update.FREEZE), (".*/(kernel|bias|scalar)", Update.TRAIN)),
)


@pytest.mark.parametrize("reduction", Reduction)
def test_the_naive_optimiser_takes_summed_gradients(reduction):
    config = MultitaskConfig(Combiner.NAIVE, reduction)
    naive = build_multitask_optimizer(config, OPTIMIZER, PARAMS, tasks=TASKS, total_steps=3)
    plain = build_optimizer(OPTIMIZER, PARAMS, total_steps=3)
    params = jax.tree.map(jnp.asarray, PARAMS)
    states = naive.init(params), plain.init(params)
    for gradients, losses in steps(3):
        extra = {"losses": jnp.asarray(losses), "key": jax.random.key(0)}
        total = jax.tree.map(lambda leaf: jnp.asarray(leaf).sum(0), gradients)
        factor = 1 / len(TASKS) if reduction is Reduction.MEAN else 1
        combined = jax.tree.map(lambda leaf, factor=factor: leaf * factor, total)
        found, first = naive.update(total, states[0], params, **extra)
        wanted, second = plain.update(combined, states[1], params)
        states = first, second
        np.testing.assert_allclose(flatten(found), flatten(wanted), rtol=1e-4, atol=1e-6)


def test_one_task_gives_the_plain_optimisers_update():
    plain = build_optimizer(OPTIMIZER, PARAMS, total_steps=5)
    problem = steps(3, tasks=1)
    for combiner in COMBINERS:
        optimizer = build_multitask_optimizer(
            MultitaskConfig(combiner=combiner), OPTIMIZER, PARAMS, tasks=("a",), total_steps=5
        )
        state, plain_state = optimizer.init(PARAMS), plain.init(PARAMS)
        for gradients, losses in problem:
            found, state = jax.jit(optimizer.update)(
                gradients, state, PARAMS, losses=jnp.asarray(losses), key=jax.random.key(0)
            )
            alone = jax.tree.map(lambda g: g[0], gradients)
            wanted, plain_state = plain.update(alone, plain_state, PARAMS)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, wanted
            )


def test_a_forgotten_combiner_is_an_error():
    chain = optax.chain(check_combined(), optax.adam(0.1))
    gradients, _ = steps(1)[0]
    with pytest.raises(ConfigError, match=r"bias has shape \(3, 16\)"):
        chain.update(gradients, chain.init(PARAMS), PARAMS)


@pytest.mark.parametrize("combiner", [Combiner.CGD, Combiner.GRADNORM])
def test_neither_devices_nor_the_order_of_tasks_change_anything(combiner):
    """T-SAGE and PCGrad, whose sums round otherwise, have tests of their own."""
    problem, order = steps(3), [1, 2, 0]
    built = build_combiner(MultitaskConfig(combiner), tasks=TASKS, total_steps=3)
    one, _ = run(built, PARAMS, problem)
    eight, _ = run(built, *on_eight_devices(PARAMS, problem))
    other, _ = run(built, PARAMS, permuted(problem, order))
    for wanted, sharded, moved in zip(one, eight, other, strict=True):
        np.testing.assert_allclose(flatten(sharded), flatten(wanted), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(flatten(moved), flatten(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_without_a_task_axis_are_an_error(combiner):
    chain = build_combiner(MultitaskConfig(combiner), tasks=TASKS, total_steps=1)
    state = chain.init(PARAMS)
    gradients, losses = steps(1)[0]
    key = jax.random.key(0)
    alone = jax.tree.map(lambda g: g[0], gradients)
    with pytest.raises(ConfigError, match=r"(?s)not \(3, .*stack the gradients of each task"):
        chain.update(alone, state, PARAMS, losses=losses, key=key)


def test_tasks_must_be_named_once():
    for tasks in ((), ("a", "a")):
        with pytest.raises(ConfigError, match="named twice"):
            build_combiner(MultitaskConfig(), tasks=tasks, total_steps=1)


def take(training: MultitaskTraining, whole: TrainingConfig | None = None) -> MultitaskTraining:
    """What a command does with the Gin files."""
    return training


@pytest.mark.parametrize("combiner", Combiner)
def test_the_gin_file_of_every_combiner_is_its_defaults(combiner, tmp_path):
    command = tmp_path / "take.gin"
    command.write_text(
        f"include 'optim/{combiner.value}.gin'\n"
        "RANDOM_SEED = 0\ntake.training = @MultitaskTraining()\n"
    )
    flags = configuration.GinFlags(files=(str(command),))
    resolved = configuration.resolve(take, flags=flags)
    assert resolved.unused == ("TrainingConfig.multitask",)
    assert resolved.function() == MultitaskTraining(combiner=MultitaskConfig(combiner))
