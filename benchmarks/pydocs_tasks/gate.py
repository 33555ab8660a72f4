"""Do the tasks' gradients conflict? Their cosines before, during and after a multi-task training.

    python benchmarks/pydocs_tasks/gate.py TOKEN_STORE NAIVE_DIR [--seed 0] [--queries 64]

NAIVE_DIR is the output of `taser pipeline ance` with the naive sum. Prints, for random weights and
for the last checkpoint of each of its trainings, the cosines of the tasks' mean gradients over
`batches` batches of `queries` queries: a task whose cosines are negative pays for sharing. Beside
them is the cosine of two halves of the same task's batches, which is what noise leaves of 1.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, PyTree

from taser_jax.assembly import model_directory
from taser_jax.assembly.data import DeviceBatches, training_queries
from taser_jax.data.batches.every_task import TaskBatchingConfig, TaskBatchStream
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.batch import Batch
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.objective import ObjectiveConfig
from taser_jax.training.state import named_key

LABELS = ("warm-up", "episode-1", "episode-2")
TEMPERATURE = 0.05


def main() -> None:
    """Prints a table for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("token_store")
    parser.add_argument("naive_dir", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0, help="of the training")
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--batches", type=int, default=8)
    arguments = parser.parse_args()
    store = TokenStore.open(arguments.token_store)
    negatives = [str(arguments.naive_dir / "bm25" / "negatives")]
    queries = training_queries(store, task_names=None, negatives_dirs=negatives)
    tasks = list(queries)
    batching = TaskBatchingConfig(
        total=arguments.queries * len(tasks), temperature=1e9, num_negatives=1
    )
    partitioner = Partitioner(make_mesh(MeshConfig()))
    stream = TaskBatchStream(
        *(store, queries, batching),
        num_devices=partitioner.batch_devices,
        num_chunks=1,
        share=partitioner.host_share,
    )
    batches = DeviceBatches(stream, queries, partitioner)
    with jax.set_mesh(partitioner.mesh):
        for name, model, params in checkpoints(arguments.naive_dir, seed=arguments.seed):
            drawn = (batch for _, batch in batches.iterate(0, arguments.batches))
            halves = mean_gradients(model, params, tasks, drawn)
            print(f"### {name}\n\n{table(tasks, *cosines(halves))}")


def checkpoints(naive_dir: pathlib.Path, *, seed: int) -> Iterator[tuple[str, DualEncoder, PyTree]]:
    """The initial weights, then each training's last checkpoint."""
    directories = [naive_dir / label / "model" for label in LABELS]
    first = model_directory.load_model(directories[0])
    initial = init_params(first.model, named_key(seed, "init"))
    yield "before training", first.model, initial
    for directory in directories:
        last = model_directory.checkpoint_steps(directory)[-1]
        loaded = model_directory.load_model(directory, step=last)
        yield f"after {directory.parent.name}", loaded.model, loaded.params


def mean_gradients(
    model: DualEncoder, params: PyTree, tasks: list[str], batches: Iterator[Mapping[str, Batch]]
) -> Float[np.ndarray, "2 tasks parameters"]:
    """Each task's mean gradient over the even and over the odd batches."""
    objective = ObjectiveConfig(temperature=TEMPERATURE)
    loss = make_loss(model, objective=objective, train=False)

    @functools.partial(jax.jit, static_argnames="task")
    def gradient(params: PyTree, batch: Batch, task: str) -> jax.Array:
        of_task = jax.grad(
            lambda params: loss(params, batch, step=jnp.zeros((), int), task=task)[0]
        )
        return ravel_pytree(of_task(params))[0]

    sums = np.zeros((2, len(tasks), sum(leaf.size for leaf in jax.tree.leaves(params))))
    counts = np.zeros((2, 1, 1))
    for number, batch in enumerate(batches):
        for row, task in enumerate(tasks):
            sums[number % 2, row] += np.asarray(gradient(params, batch[task], task))
        counts[number % 2] += 1
    return sums / counts


def cosines(
    halves: Float[np.ndarray, "2 tasks parameters"],
) -> tuple[Float[np.ndarray, "tasks tasks"], Float[np.ndarray, " tasks"]]:
    """Cosines of the tasks' mean gradients, and of each task's two halves.

    Example:
        Gradients (1, 0), (1, 0) and (0, 1), (0, 1) in both halves: the identity, and (1, 1).
    """
    whole = halves.mean(axis=0)
    unit = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    halves = halves / np.linalg.norm(halves, axis=2, keepdims=True)
    return unit @ unit.T, np.sum(halves[0] * halves[1], axis=1)


def table(
    tasks: list[str],
    between: Float[np.ndarray, "tasks tasks"],
    of_halves: Float[np.ndarray, " tasks"],
) -> str:
    """One line per task, and the share of negative cosines."""
    lines = [f"| | {' | '.join(tasks)} | two halves |", f"|---|{'---:|' * (len(tasks) + 1)}"]
    for task, row, own in zip(tasks, between, of_halves, strict=True):
        lines.append(f"| {task} | {' | '.join(f'{cosine:.2f}' for cosine in row)} | {own:.2f} |")
    pairs = between[np.triu_indices(len(tasks), 1)]
    lines.append(
        f"\nMean {pairs.mean():.2f}, least {pairs.min():.2f}, negative {np.mean(pairs < 0):.0%}."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
