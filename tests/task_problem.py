"""Parameters, task gradients and losses that every combiner is tested on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taser_jax.optim.multitask import Combiner, MultitaskConfig, reads_task_gradients
from taser_jax.optim.optimizers import OptimizerConfig, Update

TASKS = ("nq", "fever", "wow")
SHAPES = {"kernel": (8, 16), "bias": (16,), "frozen": (4, 8), "scalar": ()}
SPECS = {"kernel": ("data", "model"), "bias": ("model",), "frozen": (None, "data"), "scalar": ()}
TRAINABLE = {"encoder": {name: name != "frozen" for name in SHAPES}}
COMBINERS = [c for c in Combiner if reads_task_gradients(MultitaskConfig(c))]
OPTIMIZER = OptimizerConfig(
    learning_rate=0.1,
    floor=0.5,
    updates=((".*/frozen", Update.FREEZE), (".*/(kernel|bias|scalar)", Update.TRAIN)),
)


def tree(rng, *leading):
    """A parameter tree with leading axes in front of each shape."""
    return {
        "encoder": {
            name: np.asarray(rng.normal(size=(*leading, *shape)), np.float32)
            for name, shape in SHAPES.items()
        }
    }


def steps(number, seed=0, tasks=len(TASKS)):
    """[(task gradients, losses), ...] of tasks that differ in scale."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=tasks))
    problem = []
    for _ in range(number):
        gradients = tree(rng, tasks)
        gradients = jax.tree.map(
            lambda g: (g * sizes.reshape(-1, *(1,) * (g.ndim - 1))).astype(np.float32), gradients
        )
        problem.append((gradients, rng.uniform(0.5, 3.0, tasks).astype(np.float32)))
    return problem


def run(combiner, params, problem, seed=0):
    """Combined gradients of each step, and the last state."""
    state = combiner.init(params)
    update = jax.jit(combiner.update)
    combined = []
    for number, (gradients, losses) in enumerate(problem):
        key = jax.random.key(seed + number)
        updates, state = update(gradients, state, params, losses=jnp.asarray(losses), key=key)
        combined.append(jax.tree.map(np.asarray, updates))
    return combined, state


def flatten(gradients):
    """Trainable parameters as one float64 vector a task, [tasks, n]; without tasks, [n]."""
    leaves = [np.asarray(gradients["encoder"][n], np.float64) for n in SHAPES if n != "frozen"]
    tasks = leaves[-1].shape
    return np.concatenate([leaf.reshape(*tasks, -1) for leaf in leaves], axis=-1)


def permuted(problem, order):
    """The same steps with the tasks in another order."""
    return [(jax.tree.map(lambda g: g[order], grads), losses[order]) for grads, losses in problem]


def on_eight_devices(params, problem):
    """The same arrays on a 2 x 4 mesh, gradients sharded as (None,) + the parameter's own."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def put(gradients, *leading):
        return {
            "encoder": {
                name: jax.device_put(
                    leaf, NamedSharding(mesh, PartitionSpec(*leading, *SPECS[name]))
                )
                for name, leaf in gradients["encoder"].items()
            }
        }

    return put(params), [(put(gradients, None), losses) for gradients, losses in problem]
