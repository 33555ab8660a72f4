"""Hosts that cannot join the others say what to mend."""

import socket

import jax
import pytest

from taser_jax import hosts
from taser_jax.errors import ConfigError


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
    with pytest.raises(ConfigError, match=r"JAX_COORDINATOR_ADDRESS: address .*\n.*HOST:PORT"):
        hosts.initialize(timeout=5)


def test_a_port_that_something_else_has(environment):
    """JAX's own service would end the process with a segmentation fault."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        environment(f"localhost:{port}", 0)
        told = f"JAX_COORDINATOR_ADDRESS: cannot listen on port {port} .*in use"
        with pytest.raises(ConfigError, match=told):
            hosts.initialize(timeout=5)


def test_any_other_failure_says_what_where_and_what_to_do(environment, monkeypatch):
    def fails(**options):
        raise jax.errors.JaxRuntimeError("ABORTED: another incarnation")

    environment("localhost:1234", 1)
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ConfigError) as error:
        hosts.initialize(timeout=5)
    told = str(error.value)
    assert told.startswith("--multihost: the hosts could not be joined (JaxRuntimeError: ABORTED:")
    assert "expected: " in told
    assert "fix: " in told
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)


def test_no_coordinator_at_all(environment, monkeypatch):
    def fails(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(ConfigError, match=r"no coordinator .*defined"):
        hosts.initialize(timeout=5)
