"""The training step on a batch of every task: `make_train_step` with `tasks`."""

from taser_jax.training.step import TaskGradients
from taser_jax.training.step import make_train_step as make_multitask_step

__all__ = ["TaskGradients", "make_multitask_step"]
