"""One of several processes that work together; started by the test beside it."""

import contextlib
import dataclasses
import io
import logging
import math
import os
import pathlib
import signal
import sys
import time

import jax
import tiny_training

from taser_jax.assembly import program
from taser_jax.cli import main as cli
from taser_jax.commands.encode import encode
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.devices import hosts
from taser_jax.retrieval.encoding import EncodeConfig
from taser_jax.storage.errors import ConfigError, TaserError
from taser_jax.training.watch import agree_to_save

STEPS = 6


def main(phase: str, process_count: int, folder: pathlib.Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("taser").setLevel(logging.INFO)
    jax.config.update("jax_num_cpu_devices", 2 // process_count)
    if process_count > 1:
        hosts.initialize(timeout=120)
    assert jax.device_count() == 2
    process_id = jax.process_index()
    model = tiny_training.model_config(dropout_rate=0.1)
    training = tiny_training.training_config(
        train_steps=STEPS, evaluation_period=3, checkpoint_period=2
    )

    def train_into(name: str, config=training) -> None:
        tiny_training.start(folder / name, folder / "tokens", config, model=model)

    if phase == "whole":
        train_into(f"model_{process_count}")
    if phase == "whole" and process_count > 1:
        try:
            train_into("refused", dataclasses.replace(training, seed=process_id))
        except ConfigError as error:
            (folder / f"refused.{process_id}").write_text(str(error))
        commands_that_differ(folder, process_id)
        stages_and_errors(folder, process_id)
        clocks_that_differ(process_id)
        encode_passages(folder, "embeddings")
        # The test kills a process of this training; what is left of it goes on in "resumed".
        wait_at_step(4)
        train_into("killed")
    if phase == "resumed":
        train_into("killed")
        # Last, since JAX takes one notice of preemption in a process's life.
        preempted(folder, process_id)


def wait_at_step(step: int) -> None:
    """Makes trainings of this process stand still there, for the test to kill it."""

    def wait(done: int) -> None:
        if done == step:
            print("waits to be killed", flush=True)
            time.sleep(600)

    before_each_step(wait)


def before_each_step(call) -> None:
    """Makes trainings of this process call it with the number of steps done."""
    make = program.make_train_step

    def make_calling(*args, **kwargs):
        train_step = make(*args, **kwargs)

        def calling(state, batches):
            call(int(state.step))
            return train_step(state, batches)

        return calling

    program.make_train_step = make_calling


def run_command(folder, name: str, process_id: int, *flags: str) -> None:
    """`taser train --multihost` in this process, which has joined the other; notes what it said."""

    def initialize(*, timeout: int) -> None:
        if not hosts.is_first():
            logging.getLogger("taser").setLevel(logging.WARNING)

    hosts.initialize = initialize
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        recipe = [f"--gin_file={folder / 'tiny.gin'}", f"--gin.MODEL_DIR={folder / name}"]
        store = f"--gin.TOKEN_STORE={folder / 'tokens'}"
        status = cli.run(["train", *recipe, store, *flags, "--multihost"])
    (folder / f"{name}.{process_id}").write_text(f"{status}\n{errors.getvalue()}")


def commands_that_differ(folder, process_id: int) -> None:
    """What hosts are told whose commands are not the same, before anything is computed."""
    for name, flag in {
        "other_seed": "--gin.RANDOM_SEED=1",
        "one_broken": "--gin.TrainingConfig.sede=0",
        "one_dry": "--dry_run",
    }.items():
        of_second = [flag] if process_id == 1 else []
        run_command(folder, name, process_id, "--gin.TRAIN_STEPS=1", *of_second)


def preempted(folder, process_id: int) -> None:
    """A training whose second process gets SIGTERM."""

    def signal_once(done: int) -> None:
        # JAX looks for the signal once a second, and tells the others.
        time.sleep(0.02)
        if done == 2 and process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before_each_step(signal_once)
    flags = ["--gin.TRAIN_STEPS=3000", "--gin.EVAL_PERIOD=0", "--gin.CHECKPOINT_PERIOD=0"]
    run_command(folder, "preempted", process_id, *flags)


def stages_and_errors(folder, process_id: int) -> None:
    calls = []

    @hosts.first_host_only
    def once(*, seed: int) -> dict[str, int]:
        calls.append(process_id)
        return {"made on": process_id}

    @hosts.first_host_only
    def fails() -> None:
        raise FileNotFoundError("no such run")

    stages = Stages(folder / "pipeline")
    assert [stages.run("work", once, seed=0) for _ in range(2)] == [{"made on": 0}] * 2
    assert calls == [0] * (process_id == 0)
    try:
        fails()
    except (FileNotFoundError, TaserError) as error:
        (folder / f"failed.{process_id}").write_text(f"{type(error).__name__}: {error}")


def clocks_that_differ(process_id: int) -> None:
    """Host 0's clock decides when a checkpoint is due."""
    past, future = -math.inf, math.inf
    assert agree_to_save((past, future)[process_id], logs=True)
    assert not agree_to_save((future, past)[process_id], logs=True)
    # Without a line to log no host waits for the other.
    assert not agree_to_save(past, logs=False)


def encode_passages(folder, name: str) -> dict[str, str]:
    return encode(
        model_dir=str(folder / "model_2"),
        token_store=str(folder / "tokens"),
        output_dir=str(folder / name),
        config=EncodeConfig(shard_rows=10),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
