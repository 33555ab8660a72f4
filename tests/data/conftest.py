"""What several tests of the data share."""

import pytest

from taser_jax.data.seqio_tasks import registry


@pytest.fixture
def empty_registries(monkeypatch):
    """Each test registers its own tasks; those of others come back after it."""
    import seqio

    for name in ("_tasks", "_mixtures", "_passages"):
        monkeypatch.setattr(registry, name, {})
    before = dict(seqio.TaskRegistry._REGISTRY), dict(seqio.MixtureRegistry._REGISTRY)
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = {}, {}
    yield
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = before
