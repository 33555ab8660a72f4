"""What the tests of checkpoints and of the loop share."""

import contextlib

import pytest

from taser_jax.training.checkpoints import Checkpoints


@pytest.fixture
def opened():
    """As `Checkpoints`, closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *given: stack.enter_context(contextlib.closing(Checkpoints(*given)))
