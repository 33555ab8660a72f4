"""What several tests of the data share."""

import pytest
import seqio


@pytest.fixture
def empty_registries():
    """Each test registers its own tasks; those of others come back after it."""
    before = dict(seqio.TaskRegistry._REGISTRY), dict(seqio.MixtureRegistry._REGISTRY)
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = {}, {}
    yield
    seqio.TaskRegistry._REGISTRY, seqio.MixtureRegistry._REGISTRY = before
