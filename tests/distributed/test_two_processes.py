"""Two processes of one device each train what one process with two devices trains."""

import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_command
import tiny_training
from tiny_models import assert_close
from train_one_process import STEPS, encode_passages

from taser_jax.retrieval.embeddings import Embeddings

pytestmark = pytest.mark.slow

PROGRAM = pathlib.Path(__file__).with_name("train_one_process.py")
SECONDS = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def environment(folder: pathlib.Path, port: int, count: int, index: int) -> dict[str, str]:
    return tiny_command.environment(folder) | {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }


class Together:
    """Processes of one job, with what each printed."""

    def __init__(self, phase: str, count: int, folder: pathlib.Path) -> None:
        self.logs = [folder / f"{phase}.{count}.{index}.log" for index in range(count)]
        self.processes = []
        port = free_port()
        for index, log in enumerate(self.logs):
            command = [sys.executable, *map(str, (PROGRAM, phase, count, folder))]
            where = environment(folder, port, count, index)
            with log.open("w") as file:
                process = subprocess.Popen(command, env=where, stdout=file, stderr=file)
            self.processes.append(process)

    def told(self) -> str:
        return "\n".join(log.read_text()[-4000:] for log in self.logs)

    def finish(self) -> None:
        """Waits for all; fails with the output of any that failed."""
        try:
            codes = [process.wait(timeout=SECONDS) for process in self.processes]
        finally:
            self.kill()
        assert codes == [0] * len(codes), self.told()

    def wait_for(self, words: str) -> None:
        """Until every process has printed `words`."""
        end = time.monotonic() + SECONDS
        while not all(words in log.read_text() for log in self.logs):
            assert time.monotonic() < end, self.told()
            assert all(process.poll() is None for process in self.processes), self.told()
            time.sleep(0.2)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "tiny.gin").write_text(tiny_training.GIN_FILE)
    tiny_training.write_token_store(folder / "tokens")
    Together("whole", 1, folder).finish()
    whole = Together("whole", 2, folder)
    try:
        whole.wait_for("waits to be killed")
        # A host is lost; the launcher stops the others, which cannot go on without it.
        whole.processes[1].send_signal(signal.SIGKILL)
        whole.processes[1].wait()
    finally:
        whole.kill()
    assert not (folder / "killed" / f"checkpoint_{STEPS}").exists()
    Together("resumed", 2, folder).finish()
    return folder


def test_losses_and_validation_are_equal(folder):
    single = tiny_command.metrics_by_step(folder / "model_1")
    two = tiny_command.metrics_by_step(folder / "model_2")
    assert list(single) == list(two) == list(range(1, STEPS + 1))
    # What is compared is no standstill.
    assert len({values["train/loss"] for values in single.values()}) == STEPS
    assert "validation/mrr" in two[3]
    assert_close(two, single, rtol=2e-4, atol=0)


def test_parameters_and_moments_are_equal(folder):
    single, two = (tiny_command.final_state(folder / f"model_{n}", STEPS) for n in (1, 2))
    assert_close(two, single, rtol=1e-3, atol=2e-5)


def test_restarted_after_a_kill_they_reach_the_same_bits(folder):
    whole, resumed = folder / "model_2", folder / "killed"
    expected = tiny_command.final_state(whole, STEPS)
    np.testing.assert_equal(tiny_command.final_state(resumed, STEPS), expected)
    assert tiny_command.metrics_by_step(resumed) == tiny_command.metrics_by_step(whole)
    log = (folder / "resumed.2.0.log").read_text()
    # The save of step 4 may have been under way.
    assert re.search(f"resuming after step [34] of {STEPS}", log)


def test_only_the_first_process_logs(folder):
    assert "parameters:" in (folder / "resumed.2.0.log").read_text()
    assert not re.search("parameters:|train:|resuming", (folder / "resumed.2.1.log").read_text())


def test_hosts_started_with_other_settings_are_reported_which(folder):
    told = [(folder / f"refused.{index}").read_text() for index in range(2)]
    assert told[0] == told[1]
    assert "training differs on host 1" in told[0]
    assert "from host 0" in told[0]
    assert "model differs" not in told[0]
    assert not (folder / "refused").exists()


def command(folder, name) -> list[tuple[int, str]]:
    """(status, standard error) of `taser train` on each host."""
    texts = [(folder / f"{name}.{index}").read_text() for index in range(2)]
    return [(int(text.partition("\n")[0]), text.partition("\n")[2]) for text in texts]


@pytest.mark.parametrize(
    ("name", "differs"), [("other_seed", "configuration"), ("one_dry", "command")]
)
def test_commands_with_other_settings_stop_on_both_hosts(folder, name, differs):
    for index, (status, errors) in enumerate(command(folder, name)):
        assert status == 2
        assert errors.startswith(f"error on host {index}: ")
        assert f"{differs} differs on host 1" in errors


def test_an_error_in_one_hosts_configuration_stops_both(folder):
    (first_status, first), (second_status, second) = command(folder, "one_broken")
    assert first_status == second_status == 2
    assert "configuration differs on host 1" in first
    # Where it is, it is told itself.
    assert second.startswith("error on host 1: ")
    assert "sede" in second
    assert "differs" not in second


def test_sigterm_to_one_host_makes_both_save_the_same_step(folder):
    (first_status, first), (second_status, second) = command(folder, "preempted")
    assert first_status == second_status == 75
    step = int(re.search(r"preempted on host 0: saved after step (\d+)", first)[1])
    assert f"preempted on host 1: saved after step {step} of" in second
    saved = tiny_command.final_state(folder / "preempted", step)
    assert int(saved["step"]) == step > 2


def test_a_failure_on_the_first_host_stops_the_others(folder):
    assert (folder / "failed.0").read_text() == "FileNotFoundError: no such run"
    other = (folder / "failed.1").read_text()
    assert other.startswith("TaserError: fails: host 0 stopped (FileNotFoundError: no such run)")


def test_two_hosts_encode_what_one_encodes(folder):
    together = Embeddings(folder / "embeddings")
    assert len(together) == 48
    assert together.fingerprints == encode_passages(folder, "alone")
    np.testing.assert_allclose(together[:], Embeddings(folder / "alone")[:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("process_id", [pytest.param(0, marks=pytest.mark.release), 1])
def test_a_host_or_a_coordinator_that_does_not_answer(folder, process_id):
    command = ["train", "--multihost", "--coordinator_timeout=1"]
    completed = subprocess.run(
        [sys.executable, "-m", "taser_jax.cli.main", *command],
        env=environment(folder, free_port(), 2, process_id),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert completed.returncode == 2, completed.stderr
    # On a busy machine the coordinator's own thread may say first that it stops.
    assert "error: --multihost: the coordinator at localhost:" in completed.stderr
    assert "did not answer, or not all hosts came, within 1 s" in completed.stderr
    assert "--coordinator_timeout" in completed.stderr
