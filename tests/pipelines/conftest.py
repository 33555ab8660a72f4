"""What the tests of pipelines share: a tiny token store, and a small collection compared."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import pytest
import tiny_training
from capitals import Capitals
from jax.experimental.compilation_cache import compilation_cache
from small_world import SmallWorld, succeed


@pytest.fixture(scope="session")
def tiny_store_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tiny") / "tokens"
    tiny_training.write_token_store(directory)
    return directory


@pytest.fixture(scope="session")
def small_world(tmp_path_factory: pytest.TempPathFactory) -> SmallWorld:
    world = SmallWorld(tmp_path_factory.mktemp("small"))
    world.make()
    return world


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one training compiled, the next of the same shapes takes from disk."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    former = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in former.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def compared(
    small_world: SmallWorld, compiled_once: None, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """A finished `taser pipeline taser`; tests read it, or work on a copy."""
    directory = tmp_path_factory.mktemp("compared") / "out"
    succeed(*small_world.compare(directory))
    return directory


@pytest.fixture(scope="session")
def capitals(tmp_path_factory: pytest.TempPathFactory) -> Capitals:
    made = Capitals(tmp_path_factory.mktemp("capitals"))
    made.make()
    return made
