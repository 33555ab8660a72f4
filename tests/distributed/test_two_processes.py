"""Two processes of one device each train what one process with two devices trains."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tiny_command
import tiny_training

PROGRAM = pathlib.Path(__file__).with_name("train_one_process.py")
STEPS = 6


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def train_together(process_count: int, folder: pathlib.Path) -> None:
    """Runs the processes to their end; fails with the output of any that failed."""
    (folder / "without_clu").mkdir(exist_ok=True)
    (folder / "without_clu" / "clu.py").write_text("raise ImportError('not here')\n")
    paths = (folder / "without_clu", tiny_command.REPOSITORY, tiny_command.REPOSITORY / "tests")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    port = free_port()
    logs = [folder / f"{process_count}.{index}.log" for index in range(process_count)]
    processes = []
    for index, log in enumerate(logs):
        arguments = map(str, (PROGRAM, index, process_count, port, folder))
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments], env=environment, stdout=file, stderr=file
                )
            )
    try:
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = "\n".join(log.read_text()[-4000:] for log in logs)
    assert codes == [0] * process_count, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("distributed")
    tiny_training.write_token_store(folder / "tokens")
    train_together(1, folder)
    train_together(2, folder)
    return folder


def test_losses_and_validation_are_equal(folder):
    one = tiny_command.metrics_by_step(folder / "model_1")
    two = tiny_command.metrics_by_step(folder / "model_2")
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    assert "validation/mrr" in two[3]
    for step, metrics in one.items():
        assert metrics.keys() == two[step].keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(two[step][name], value, rtol=2e-4, err_msg=f"{name} {step}")


def test_parameters_and_moments_are_equal(folder):
    one = tiny_command.final_state(folder / "model_1", STEPS)
    two = tiny_command.final_state(folder / "model_2", STEPS)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-3, atol=2e-5, err_msg=name)


def test_dropout_and_training_happened(folder):
    """What is compared above is no standstill."""
    metrics = tiny_command.metrics_by_step(folder / "model_1")
    assert len({values["train/loss"] for values in metrics.values()}) == STEPS
