r"""What a multi-task optimiser costs: T-SAGE, PCGrad, CGD, GradNorm, the sum, and a plain step.

    python benchmarks/multitask_step.py                         # small, for a CPU
    python benchmarks/multitask_step.py --model t5 --layers 12 --embed_dim 768 --heads 12 \
        --mlp_dim 3072 --vocab_size 32128 --dtype bfloat16      # T5-base, the paper's batch

Needs jax, flax, optax and numpy. The plain step is the sum of the tasks' losses, differentiated
task by task, without a task axis. Prints one JSON line a figure:

    bandwidth   bytes read and written a second by scaling a large array on this device
    <method>    milliseconds (best of --steps), their ratio to the plain step's, bytes of the
                optimiser's state, of the compiler's scratch, and what the combiner moves:
                `traffic_bytes`, counted by hand, `traffic_milliseconds` at the measured bandwidth,
                `extra_milliseconds` over the plain step and their quotient `extra_over_traffic`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from taser_jax.batch import Batch, Tokens
from taser_jax.models.bert import BertConfig, Remat
from taser_jax.models.build import build_model
from taser_jax.models.dual_encoder import DualEncoderConfig, init_params
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.optim.multitask import Combiner, MultitaskConfig, build_multitask_optimizer
from taser_jax.optim.optimizers import OptimizerConfig, build_optimizer
from taser_jax.optim.skipping import skip_non_finite
from taser_jax.optim.tsage import AverageDtype, TSageConfig
from taser_jax.training.multitask_step import TaskGradients, make_multitask_train_step
from taser_jax.training.state import init_state

# KILT: queries a step at temperature 4 and 120 in all, and the paper's query lengths.
TASKS = {
    "nq": (16, 32), "tqa": (14, 32), "hopo": (15, 36), "wow": (16, 256),
    "trex": (16, 32), "fever": (15, 64), "zsre": (17, 32), "aida": (11, 128),
}  # fmt: skip
PLAIN = "plain"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["bert", "t5"], default="bert")
    parser.add_argument("--layers", type=int, default=4, help="of T5's encoder and of its decoder")
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--mlp_dim", type=int, default=1024)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--remat", choices=[remat.value for remat in Remat], default="none")
    parser.add_argument("--tasks", type=int, default=8, help="the first so many of KILT's")
    parser.add_argument("--batch_share", type=float, default=1.0, help="of the paper's batch sizes")
    parser.add_argument("--passage_length", type=int, default=160)
    parser.add_argument("--max_query_length", type=int, default=256)
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--num_chunks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bandwidth_megabytes", type=int, default=256)
    parser.add_argument("--average_dtype", choices=["float32", "bfloat16"], default="float32")
    names = [PLAIN, *(combiner.value for combiner in Combiner)]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    return parser.parse_args()


def make_model(arguments: argparse.Namespace) -> Any:
    names = ("embed_dim", "head_dim", "mlp_dim", "vocab_size", "dtype")
    sizes = {name: getattr(arguments, name) for name in names}
    sizes |= {"num_heads": arguments.heads, "num_layers": arguments.layers}
    sizes |= {"remat": Remat(arguments.remat)}
    if arguments.model == "bert":
        return build_model(DualEncoderConfig(bert=BertConfig(**sizes)))
    sizes["num_decoder_layers"] = arguments.layers
    return build_model(T5DualEncoderConfig(t5=T5Config(**sizes)))


def make_batches(arguments: argparse.Namespace) -> dict[str, Batch]:
    rng = np.random.default_rng(0)

    def tokens(rows: int, length: int) -> Tokens:
        ids = rng.integers(2, arguments.vocab_size, (rows, length)).astype(np.int32)
        return Tokens(ids, np.ones((rows, length), bool))

    batches = {}
    for task, (size, length) in list(TASKS.items())[: arguments.tasks]:
        chunks = arguments.num_chunks
        queries = max(1, math.ceil(size * arguments.batch_share / chunks)) * chunks
        passages = queries * (1 + arguments.negatives)
        batches[task] = Batch(
            queries=tokens(queries, min(length, arguments.max_query_length)),
            passages=tokens(passages, arguments.passage_length),
            positive_index=np.arange(queries, dtype=np.int32) * (1 + arguments.negatives),
            ignore=np.zeros((queries, passages), bool),
            query_rows=np.arange(queries, dtype=np.int32),
            passage_rows=np.arange(passages, dtype=np.int32),
        )
    return jax.device_put(batches)


def bandwidth(megabytes: int) -> float:
    """Bytes a second, read and written, of x <- 1.5·x in place; best of five."""
    array = jnp.zeros((megabytes * 2**20 // 4,), jnp.float32)
    scale = jax.jit(lambda x: x * 1.5, donate_argnums=0)
    array = jax.block_until_ready(scale(array))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        array = jax.block_until_ready(scale(array))
        times.append(time.perf_counter() - start)
    return 2 * array.nbytes / min(times)


def traffic_bytes(
    method: str, *, tasks: int, parameters: int, average_bytes: int, passes: float
) -> float:
    """What the combiner must read and write; the stack of gradients is written once in each.

    T-SAGE reads gradients and parameters in each pass of the median, then gradients, parameters and
    average once for the combined gradient and once for the new average. The others read gradients
    once for the sum, PCGrad and CGD once more for the dot products, GradNorm for the norms.
    """
    stack = 4.0 * tasks * parameters
    vector = 4.0 * parameters
    average = average_bytes * tasks * parameters
    if method == PLAIN:
        return 0.0
    if method == Combiner.NAIVE.value:
        return stack + (stack + vector)
    if method != Combiner.TSAGE.value:
        return stack + stack + (stack + vector)
    update = (stack + average + 2 * vector) + (stack + 2 * average + vector)
    return stack + passes * (stack + vector) + update


def main() -> None:
    arguments = parse()
    model = make_model(arguments)
    batches = make_batches(arguments)
    tasks = tuple(batches)

    def initialise(key: jax.Array) -> Any:
        return init_params(model, key)

    shapes = jax.eval_shape(initialise, jax.random.key(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    about = {
        "benchmark": "multitask_step",
        "model": arguments.model,
        "parameters": parameters,
        "dtype": arguments.dtype,
        "tasks": len(tasks),
        "queries": sum(len(batch.queries.ids) for batch in batches.values()),
        "tokens": sum(b.queries.ids.size + b.passages.ids.size for b in batches.values()),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "jax": jax.__version__,
    }
    rate = bandwidth(arguments.bandwidth_megabytes)
    print(json.dumps(about | {"figure": "bandwidth", "gigabytes_per_second": rate / 1e9}))

    adam = OptimizerConfig(learning_rate=1e-5, clip_norm=1.0)
    config = MultitaskConfig(
        tsage=TSageConfig(burn_in_share=0.0, average_dtype=AverageDtype(arguments.average_dtype))
    )
    plain_seconds = None
    for method in sorted(arguments.methods, key=lambda name: name != PLAIN):
        if method == PLAIN:
            optimizer = skip_non_finite(build_optimizer(adam, shapes, total_steps=1000))
            gradients = TaskGradients.SUMMED
        else:
            chosen = dataclasses.replace(config, combiner=Combiner(method))
            optimizer = build_multitask_optimizer(
                chosen, adam, shapes, tasks=tasks, total_steps=1000
            )
            gradients = TaskGradients.STACKED
        step = make_multitask_train_step(
            model, optimizer, tasks=tasks, gradients=gradients, num_chunks=arguments.num_chunks
        )
        state = init_state(initialise, optimizer, jax.random.key(0))
        start = time.perf_counter()
        compiled = step.lower(state, batches).compile()
        compile_seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
        times, passes = [], 0.0
        # The first step has no last median.
        for number in range(arguments.steps + 1):
            start = time.perf_counter()
            state, metrics = compiled(state, batches)
            jax.block_until_ready(state)
            if number:
                times.append(time.perf_counter() - start)
                passes += float(metrics.get("median_passes", 0)) / arguments.steps
        assert bool(metrics["finite"])
        seconds = min(times)
        plain_seconds = seconds if method == PLAIN else plain_seconds
        figure = {
            "figure": method,
            "milliseconds": 1e3 * seconds,
            "compile_seconds": compile_seconds,
            "state_bytes": state_bytes,
            "scratch_bytes": memory.temp_size_in_bytes,
            "traffic_bytes": traffic_bytes(
                method,
                tasks=len(tasks),
                parameters=parameters,
                average_bytes=jnp.dtype(arguments.average_dtype).itemsize,
                passes=passes,
            ),
        }
        traffic = figure["traffic_bytes"] / rate
        figure["traffic_milliseconds"] = 1e3 * traffic
        if method == Combiner.TSAGE.value:
            figure["median_passes"] = passes
        if plain_seconds is not None:
            figure["ratio_to_plain"] = seconds / plain_seconds
            if traffic:
                extra = seconds - plain_seconds
                figure["extra_milliseconds"] = 1e3 * extra
                figure["extra_over_traffic"] = extra / traffic
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figure.items()}
        print(json.dumps(about | rounded), flush=True)
        del state, metrics


if __name__ == "__main__":
    main()
