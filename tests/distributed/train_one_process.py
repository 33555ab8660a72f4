"""One of several processes that work together; started by the test beside it."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import sys
import time

import jax

STEPS = 6


def main(phase: str, process_count: int, folder: pathlib.Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("taser").setLevel(logging.INFO)
    jax.config.update("jax_num_cpu_devices", 2 // process_count)
    from taser_jax import hosts

    if process_count > 1:
        hosts.initialize(timeout=120)
    assert jax.device_count() == 2
    process_id = jax.process_index()

    import tiny_training

    from taser_jax.errors import ConfigError, TaserError
    from taser_jax.pipelines.train import train

    training = tiny_training.training_config(
        train_steps=STEPS, evaluation_period=3, checkpoint_period=2
    )

    def train_into(name: str, config=training) -> None:
        train(
            model_dir=str(folder / name),
            token_store=str(folder / "tokens"),
            model=tiny_training.model_config(),
            training=config,
        )

    if phase == "whole":
        train_into(f"model_{process_count}")
    if phase == "whole" and process_count > 1:
        try:
            train_into("refused", dataclasses.replace(training, seed=process_id))
        except ConfigError as error:
            (folder / f"refused.{process_id}").write_text(str(error))
        stages_and_errors(folder, process_id, hosts, TaserError)
        encode_passages(folder)
        # The test kills a process of this training; what is left of it goes on in "resumed".
        wait_at_step(4)
        train_into("killed")
    if phase == "resumed":
        train_into("killed")


def wait_at_step(step: int) -> None:
    """Makes trainings of this process stand still there, for the test to kill it."""
    from taser_jax.pipelines import batch_plans

    make = batch_plans.make_train_step

    def make_waiting(*args, **kwargs):
        train_step = make(*args, **kwargs)

        def waiting(state, batch):
            if int(state.step) == step:
                print("waits to be killed", flush=True)
                time.sleep(600)
            return train_step(state, batch)

        return waiting

    batch_plans.make_train_step = make_waiting


def stages_and_errors(folder, process_id, hosts, error_type) -> None:
    from taser_jax.pipelines.stages import Stages

    calls = []

    @hosts.first_host_only
    def once() -> dict[str, int]:
        calls.append(process_id)
        return {"made on": process_id}

    @hosts.first_host_only
    def fails() -> None:
        raise FileNotFoundError("no such run")

    stages = Stages(folder / "pipeline")
    outputs = [stages.run("work", once, inputs={"seed": 0}) for _ in range(2)]
    assert outputs == [{"made on": 0}] * 2
    assert calls == [0] * (process_id == 0)
    try:
        fails()
    except (FileNotFoundError, error_type) as error:
        (folder / f"failed.{process_id}").write_text(f"{type(error).__name__}: {error}")


def encode_passages(folder) -> None:
    from taser_jax.pipelines.encode import encode
    from taser_jax.retrieval.embeddings import EncodeConfig

    encode(
        model_dir=str(folder / "model_2"),
        token_store=str(folder / "tokens"),
        output_dir=str(folder / "embeddings"),
        config=EncodeConfig(shard_rows=10),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))
