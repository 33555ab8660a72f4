"""Tasks with quadratic losses, whose gradients a line of NumPy gives, on one device or eight."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TASKS = ("nq", "fever", "wow")
SHAPES = {"bias": (16,), "kernel": (24, 16), "scale": ()}
SPECS = {"bias": ("model",), "kernel": ("data", "model"), "scale": ()}


def loss(params, batch):
    """Σ a·(θ − c)²/2, with gradient a·(θ − c)."""
    terms = jax.tree.map(
        lambda p, a, c: jnp.sum(0.5 * a * jnp.square(p - c)), params, batch["a"], batch["c"]
    )
    return sum(jax.tree.leaves(terms))


LOSSES = {task: loss for task in TASKS}


def tree(rng):
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def stiffness(rng):
    """Of lognormal sizes, so that tasks differ; a third of the kernel's rows is untouched."""
    leaves = {
        name: np.asarray(np.exp(1.5 * rng.normal(size=shape)), np.float32)
        for name, shape in SHAPES.items()
    }
    leaves["kernel"][rng.permutation(24)[:8]] = 0
    return leaves


def batches(number, seed=0):
    rng = np.random.default_rng(seed)
    sizes = {task: stiffness(rng) for task in TASKS}
    return [{task: {"a": sizes[task], "c": tree(rng)} for task in TASKS} for _ in range(number)]


def mesh(devices):
    shape = (2, 4) if devices == 8 else (1, 1)
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), ("data", "model"))


def put(params, devices=1):
    return {
        name: jax.device_put(leaf, NamedSharding(mesh(devices), PartitionSpec(*SPECS[name])))
        for name, leaf in params.items()
    }


def flat(params):
    """All parameters as one float64 vector, in the order of the tree's leaves."""
    return np.concatenate([np.float64(leaf).reshape(-1) for leaf in jax.tree.leaves(params)])


def sensitivities(params, batch):
    """|g·θ| in float64, [tasks, parameters]."""
    theta = flat(params)
    parts = [(flat(batch[task]["a"]), flat(batch[task]["c"])) for task in TASKS]
    return np.stack([np.abs(a * (theta - c) * theta) for a, c in parts])


def lower_medians(values, *, nonzero=False):
    """By sorting, [tasks, 1]."""
    rows = [np.sort(row[row > 0] if nonzero else row) for row in values]
    return np.array([row[(len(row) - 1) // 2] for row in rows])[:, None]


def entropy(values, temperature):
    """Of the softmax over tasks, [parameters]."""
    scores = np.exp((values - values.max(0)) / temperature)
    weights = scores / scores.sum(0)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    return -(weights * logs).sum(0), weights
