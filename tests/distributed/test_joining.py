"""Hosts that cannot join the others say what to mend."""

import socket
import threading

import jax
import pytest

from taser_jax.cli import main as cli
from taser_jax.devices import hosts
from taser_jax.storage.errors import ConfigError


@pytest.fixture
def environment(monkeypatch):
    """Sets the variables of a host; nothing is joined."""
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: pytest.fail("joined"))

    def set_variables(address: str, process_id: int) -> None:
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
        monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
        monkeypatch.setenv("JAX_PROCESS_ID", str(process_id))

    return set_variables


@pytest.mark.parametrize("address", ["somewhere", "somewhere:", ":1234", "host:port", "host:70000"])
def test_an_address_without_a_host_or_a_port(environment, address):
    environment(address, 1)
    with pytest.raises(ConfigError, match=r"JAX_COORDINATOR_ADDRESS: .*no HOST:PORT\n.*free port"):
        hosts.initialize(timeout=5)


def test_a_port_that_something_else_has(environment):
    """JAX's own service would end the process with a segmentation fault."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        environment(f"localhost:{port}", 0)
        told = f"JAX_COORDINATOR_ADDRESS: host 0 cannot listen on port {port} .*in use"
        with pytest.raises(ConfigError, match=told):
            hosts.initialize(timeout=5)


ABORTED = jax.errors.JaxRuntimeError("ABORTED: another incarnation")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ABORTED, r"could not be joined \(JaxRuntimeError: ABORTED:.*\n.*fix: "),
        (ValueError("coordinator_address should be defined."), r"no coordinator, .*defined"),
    ],
)
def test_any_other_failure_says_what_where_and_what_to_do(environment, monkeypatch, error, told):
    def fails(**options):
        raise error

    environment("localhost:1234", 1)
    if isinstance(error, ValueError):
        monkeypatch.delenv("JAX_COORDINATOR_ADDRESS")
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ConfigError, match=f"(?s)--multihost.*{told}") as caught:
        hosts.initialize(timeout=5)
    assert caught.value.__cause__ is error


@pytest.fixture
def joined(monkeypatch):
    """This process counts as host 1; how it was ended, if it was."""
    ended = []
    monkeypatch.setattr(hosts, "_joined", [1])
    monkeypatch.setattr(hosts, "_LEAVING", 0.05)
    monkeypatch.setattr(hosts.os, "_exit", ended.append)
    return ended


@pytest.mark.parametrize(
    "error",
    [
        ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore"),
        jax.errors.JaxRuntimeError("UNAVAILABLE: Task 1 heartbeat timeout."),
        TimeoutError("Timed out while waiting for async_write_complete barrier."),
    ],
)
def test_a_lost_host_is_told_of_not_traced(joined, monkeypatch, capsys, error):
    """Without it, JAX's traceback, and 100 seconds later an abort with a stack in C++."""

    def work(*_):
        raise error

    monkeypatch.setattr(hosts, "initialize", lambda timeout: None)
    monkeypatch.setattr(cli, "_execute", work)
    assert cli.run(["train", "--multihost"]) == 134
    told = capsys.readouterr().err
    assert told.startswith("error on host 1: joint work with another host failed (")
    assert "more" not in told
    assert "rerun the command on all hosts to resume" in told


def test_a_defect_stays_one(joined):
    with pytest.raises(ValueError, match="shapes"), hosts.naming_lost_hosts():
        raise ValueError("shapes (3,) and (4,)")


def test_a_failed_host_waits_some_seconds_for_the_others_and_ends(joined, monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: done.wait(60))
    hosts.leave(0)
    assert joined == []
    hosts.leave(2)
    assert joined == [2]
    done.set()
    hosts.leave(2)
    assert joined == [2]
