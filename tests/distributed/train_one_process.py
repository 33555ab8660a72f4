"""One of several processes that train the tiny model together; started by the test beside it."""

from __future__ import annotations

import pathlib
import sys

import jax


def main(process_id: int, process_count: int, port: int, folder: pathlib.Path) -> None:
    jax.config.update("jax_num_cpu_devices", 2 // process_count)
    if process_count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", process_count, process_id)
    assert jax.device_count() == 2

    import tiny_training

    from taser_jax.pipelines.train import train

    train(
        model_dir=str(folder / f"model_{process_count}"),
        token_store=str(folder / "tokens"),
        model=tiny_training.model_config(),
        training=tiny_training.training_config(
            train_steps=6, evaluation_period=3, checkpoint_period=2
        ),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
