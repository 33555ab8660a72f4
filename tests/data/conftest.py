"""What several tests of the data share."""

import pytest
from written_files import write_all

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.splits import PrepareOptions
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


@pytest.fixture
def prepare_here(tmp_path):
    """Prepares tmp_path's files as its collection "c"; options are those of PrepareOptions."""

    def prepare_files(passages=None, queries=None, directories=(), **options):
        return prepare(
            data_dir=tmp_path / "data",
            collection="c",
            passages=passages,
            queries=queries,
            directories=directories,
            directory=tmp_path,
            options=PrepareOptions(**options),
        )

    return prepare_files


@pytest.fixture
def queries_of(tmp_path):
    """Queries of a task and split that `prepare_here` has written."""
    return lambda task, split: list(QuerySet.open(tmp_path / "data", "c", task, split))


@pytest.fixture
def prepare_notes(tmp_path, prepare_here):
    """Prepares files as the folder "notes"."""

    def prepare(files: dict, **options):
        write_all(tmp_path / "notes", files)
        prepared = prepare_here(directories="notes", **options)
        return prepared, PassageStore.open(tmp_path / "data", "c")

    return prepare
