"""The model, batches and optimisers that the multi-task benchmarks measure or compile."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from taser_jax.models.batch import Batch, Tokens
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.parameters import init_params
from taser_jax.models.stack import Remat
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.optim.median import MedianOver
from taser_jax.optim.multitask import (
    Combiner,
    MultitaskConfig,
    build_combiner,
    build_multitask_optimizer,
)
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.optim.tsage import TSageConfig
from taser_jax.training.multitask_step import TaskGradients, make_multitask_step
from taser_jax.training.state import TrainState, init_state
from taser_jax.training.step import TrainStep

PLAIN = "plain"
METHODS = (PLAIN, *(each.value for each in Combiner if each is not Combiner.NAIVE))

# Queries a step and tokens of a query. KILT: temperature 4, 120 in all, the paper's lengths.
TASKS = {
    "kilt": {
        "nq": (16, 32), "tqa": (14, 32), "hopo": (15, 36), "wow": (16, 256),
        "trex": (16, 32), "fever": (15, 64), "zsre": (17, 32), "aida": (11, 128),
    },
    "kilt_mini": {
        "squad": (16, 32), "nq_qed": (16, 32), "selqa": (16, 32), "fm2": (16, 64),
        "climate_fever": (16, 64), "fewrel": (16, 32), "cmu_dog": (16, 128),
    },
}  # fmt: skip

TINY = {
    "model": "bert", "layers": 4, "embed_dim": 256, "heads": 4, "head_dim": 64, "mlp_dim": 1024,
    "vocab_size": 8192, "dtype": "float32", "tasks": "kilt", "batch_share": 0.25,
    "max_query_length": 64, "passage_length": 64, "negatives": 1,
    # Most of a small model's parameters are embeddings of tokens that a batch does not have.
    "median_over": "nonzero",
}  # fmt: skip
SHAPES = {
    "tiny": TINY,
    "minilm": TINY | {
        "layers": 6, "embed_dim": 384, "heads": 12, "head_dim": 32, "mlp_dim": 1536,
        "vocab_size": 30522, "tasks": "kilt_mini", "batch_share": 1.0, "max_query_length": 128,
    },
    "t5_base": TINY | {
        "model": "t5", "layers": 12, "embed_dim": 768, "heads": 12, "mlp_dim": 3072,
        "vocab_size": 32128, "dtype": "bfloat16", "batch_share": 1.0, "max_query_length": 256,
        "passage_length": 160, "negatives": 2, "median_over": "all",
    },
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A shape by name; each of its numbers may be replaced."""
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--model", choices=["bert", "t5"])
    parser.add_argument("--layers", type=int, help="of T5's encoder and of its decoder")
    for name in ("embed_dim", "heads", "head_dim", "mlp_dim", "vocab_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of activations")
    parser.add_argument("--tasks", choices=list(TASKS))
    parser.add_argument("--num_tasks", type=int, help="number of tasks, from the first")
    parser.add_argument("--batch_multiple", type=int, default=1, help="queries of a task; devices")
    parser.add_argument("--batch_share", type=float, help="of the sets' batch sizes")
    parser.add_argument("--max_query_length", type=int)
    parser.add_argument("--passage_length", type=int)
    parser.add_argument("--negatives", type=int)
    parser.add_argument("--remat", choices=[remat.value for remat in Remat], default="none")
    parser.add_argument("--num_chunks", type=int, default=1)
    parser.add_argument("--median_over", choices=["all", "nonzero"], help="of T-SAGE")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))


def with_shape(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what was not given taken from the shape."""
    for name, value in SHAPES[arguments.shape].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a step needs.

    Attributes:
        arguments: the command line, with its shape.
        batches: one batch per task.
        params: abstract parameters.
        initialise: key -> parameters.
        model: the dual encoder.
        config: the model's.
    """

    arguments: argparse.Namespace
    batches: Mapping[str, Batch]
    params: Any
    initialise: Callable[[jax.Array], Any]
    model: Any
    config: ModelConfig

    @property
    def num_parameters(self) -> int:
        """Entries of all parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def training_flops(self) -> float:
        """Model FLOPs of a step: three forward passes of every task's texts."""
        return sum(map(self.config.training_flops, self.batches.values()))

    def about(self) -> dict[str, Any]:
        """What every printed line says of the problem."""
        batches = self.batches.values()
        return {
            "model": self.arguments.model,
            "layers": self.arguments.layers,
            "parameters": self.num_parameters,
            "dtype": self.arguments.dtype,
            "tasks": len(self.batches),
            "queries": sum(len(batch.queries.ids) for batch in batches),
            "tokens": sum(b.queries.ids.size + b.passages.ids.size for b in batches),
            "jax": jax.__version__,
        }

    def optimizer(self, method: str) -> optax.GradientTransformationExtraArgs:
        """AdamW with clipping, behind the method's combiner."""
        adam = OptimizerConfig(learning_rate=1e-5, clip_norm=1.0)
        if method == PLAIN:
            return build_optimizer(adam, self.params, total_steps=1000)
        return build_multitask_optimizer(
            self._config(method), adam, self.params, tasks=tuple(self.batches), total_steps=1000
        )

    def combiner(self, method: str) -> optax.GradientTransformationExtraArgs:
        """The method's combiner alone."""
        return build_combiner(self._config(method), tasks=tuple(self.batches), total_steps=1000)

    def _config(self, method: str) -> MultitaskConfig:
        return MultitaskConfig(
            combiner=Combiner(method),
            tsage=TSageConfig(
                burn_in_share=0.0, median_over=MedianOver(self.arguments.median_over)
            ),
        )

    def state(self, method: str) -> TrainState:
        """A fresh state for the method's step."""
        return init_state(self.initialise, self.optimizer(method), jax.random.key(0))

    def step(self, method: str, **options: Any) -> TrainStep:
        """The jitted step; the plain one sums gradients and has no task axis."""
        gradients = TaskGradients.SUMMED if method == PLAIN else TaskGradients.STACKED
        return make_multitask_step(
            self.model,
            self.optimizer(method),
            tasks=tuple(self.batches),
            gradients=gradients,
            num_chunks=self.arguments.num_chunks,
            **options,
        )


def make_problem(arguments: argparse.Namespace) -> Problem:
    """Abstract parameters and random tokens, without padding."""
    config = _model_config(arguments)
    model = DualEncoder(config)

    def initialise(key: jax.Array) -> Any:
        return init_params(model, key)

    params = jax.eval_shape(initialise, jax.random.key(0))
    return Problem(arguments, _make_batches(arguments), params, initialise, model, config)


def _model_config(arguments: argparse.Namespace) -> ModelConfig:
    names = ("embed_dim", "head_dim", "mlp_dim", "vocab_size", "dtype")
    sizes = {name: getattr(arguments, name) for name in names}
    sizes |= {"num_heads": arguments.heads, "num_layers": arguments.layers}
    sizes |= {"remat": Remat(arguments.remat)}
    if arguments.model == "bert":
        return DualEncoderConfig(bert=BertConfig(**sizes))
    sizes["num_decoder_layers"] = arguments.layers
    return T5DualEncoderConfig(t5=T5Config(**sizes))


def _make_batches(arguments: argparse.Namespace) -> dict[str, Batch]:
    rng = np.random.default_rng(0)

    def tokens(rows: int, length: int) -> Tokens:
        ids = rng.integers(2, arguments.vocab_size, (rows, length)).astype(np.int32)
        return Tokens(ids, np.ones((rows, length), bool))

    batches = {}
    for task, (size, length) in list(TASKS[arguments.tasks].items())[: arguments.num_tasks]:
        multiple = math.lcm(arguments.num_chunks, arguments.batch_multiple)
        queries = max(1, math.ceil(size * arguments.batch_share / multiple)) * multiple
        passages = queries * (1 + arguments.negatives)
        batches[task] = Batch(
            queries=tokens(queries, min(length, arguments.max_query_length)),
            passages=tokens(passages, arguments.passage_length),
            positive_index=np.arange(queries, dtype=np.int32) * (1 + arguments.negatives),
            ignore=np.zeros((queries, passages), bool),
            query_rows=np.arange(queries, dtype=np.int32),
            passage_rows=np.arange(passages, dtype=np.int32),
        )
    return batches


def traffic_bytes(method: str, *, tasks: int, parameters: int, passes: float) -> float:
    """What the combiner must read and write; the stack of gradients is written once in each.

    T-SAGE reads gradients and parameters in each pass of the median, then gradients, parameters and
    average once more, and writes the combined gradient and the new average. The others read
    gradients once for the sum, PCGrad and CGD once more for the dot products, GradNorm for the
    norms.
    """
    stack = 4.0 * tasks * parameters
    vector = 4.0 * parameters
    if method == PLAIN:
        return 0.0
    if method != Combiner.TSAGE.value:
        return stack + stack + (stack + vector)
    update = 3 * stack + 2 * vector
    return stack + passes * (stack + vector) + update
