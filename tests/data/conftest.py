"""What several tests of the data share."""

import pytest
import seqio

from taser_jax.data.seqio_tasks import names, registry


@pytest.fixture
def empty_registries(monkeypatch):
    """Each test registers its own tasks; those of others come back after it."""
    monkeypatch.setattr(names, "_here", {})
    monkeypatch.setattr(names, "_in_seqio", set())
    monkeypatch.setattr(registry, "_whole", set())
    before = dict(seqio.TaskRegistry._REGISTRY), dict(seqio.MixtureRegistry._REGISTRY)
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = {}, {}
    yield
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = before
