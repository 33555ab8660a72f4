"""How a model is trained: the configuration that recipes build, and all that Gin may set in it."""

from __future__ import annotations

import dataclasses

from taser_jax.assembly.validator import ValidationConfig
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.devices.mesh import MeshConfig
from taser_jax.interop.pretrained import Pretrained
from taser_jax.optim.multitask import MultitaskConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import EmbeddingDtype
from taser_jax.storage.typed_files import Checked, Seed
from taser_jax.training.checkpoints import CheckpointConfig
from taser_jax.training.loop import LoopConfig
from taser_jax.training.objective import ObjectiveConfig


@dataclasses.dataclass(frozen=True)
class MultitaskTraining:
    """Training on a batch of every task in each step.

    Attributes:
        batching: how many queries of each task, and how they are drawn.
        combiner: how the tasks' gradients become one.
    """

    batching: TaskBatchingConfig = TaskBatchingConfig()
    combiner: MultitaskConfig = MultitaskConfig()


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Checked):
    """How a model of any kind is trained.

    Attributes:
        loop: steps and periods.
        batching: how batches are drawn.
        optimizer: AdamW, schedule, decay, freezing.
        objective: what is minimised: labels, a teacher, Matryoshka dimensions, routing.
        checkpoints: what is kept, and which checkpoint counts as best.
        validation: how checkpoints are judged; None validates nothing.
        mesh: devices along each mesh axis.
        num_chunks: GradCache chunks; 1 encodes the batch at once.
        length_buckets: lengths that texts are padded to, in groups; none pads to the token store's.
        train_from_block: number of first blocks that are frozen, with the embeddings below them.
        states_dir: where the frozen blocks' states of the token store are kept; None computes them
            in each step.
        states_dtype: dtype of these states; bfloat16 halves them and keeps 8 bits of each number.
        pretrained: weights that encoders start from; None draws them.
        multitask: a batch of every task in each step, and how their gradients become one, in place
            of `batching`; None gives each batch to one task.
        seed: seed of weights, dropout and routing; batches have `batching.seed`.
    """

    loop: LoopConfig
    batching: BatchingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig | None = None
    mesh: MeshConfig = MeshConfig()
    num_chunks: int = 1
    length_buckets: tuple[int, ...] = ()
    train_from_block: int = 0
    states_dir: str | None = None
    states_dtype: EmbeddingDtype = EmbeddingDtype.BFLOAT16
    pretrained: Pretrained | None = None
    multitask: MultitaskTraining | None = None
    seed: Seed = 0
