"""Where compiled programs are kept."""

import os

import jax
import pytest

from taser_jax.devices.hosts import keep_compiled_programs


@pytest.fixture
def cache(monkeypatch):
    """JAX's own setting, unset for a test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("TASER_CACHE", raising=False)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)


def test_beside_the_model_and_a_pipelines_stays(cache, tmp_path):
    keep_compiled_programs(tmp_path)
    assert cache() == f"{tmp_path}/compilation_cache"
    keep_compiled_programs(tmp_path / "stage")
    assert cache() == f"{tmp_path}/compilation_cache"


@pytest.mark.parametrize(("chosen", "directory"), [("/programs", "/programs"), ("", None)])
def test_the_environment_decides(cache, monkeypatch, tmp_path, chosen, directory):
    monkeypatch.setenv("TASER_CACHE", chosen)
    keep_compiled_programs(tmp_path)
    assert cache() == directory


def test_a_bucket_has_its_own(cache):
    keep_compiled_programs("gs://bucket/model")
    assert cache() == "gs://bucket/model/compilation_cache"


def test_nothing_is_kept_where_nothing_can_be_written(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    keep_compiled_programs(tmp_path)
    assert cache() is None
