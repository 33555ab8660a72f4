"""`taser ensemble` on the tiny store: what it leaves, resumes and refuses."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
import tiny_training
from tiny_specialist import write_specialist

from taser_jax.data.batches.one_task import BatchStream
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.store import TokenStore
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import Embeddings
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError, Preempted
from taser_jax.systems.muf.ensemble import ensemble
from taser_jax.systems.muf.ensemble_files import Ensemble, EnsembleTraining, SpecialistVectors
from taser_jax.systems.muf.members import EnsembleConfig
from taser_jax.training.state import named_seed

TRAINING = EnsembleTraining(
    model=EnsembleConfig(members=3, hidden_dims=(16,)),
    batching=BatchingConfig(batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1237),
    epochs=5,
    evaluations=4,
)


@pytest.fixture(scope="module")
def store(tiny_store_dir):
    return TokenStore.open(tiny_store_dir)


@pytest.fixture(scope="module")
def embeddings_dir(tmp_path_factory, store):
    return write_specialist(tmp_path_factory.mktemp("specialist"), store)


def start(output_dir, embeddings_dir, store, *, training=TRAINING, tasks=("first",), **options):
    return ensemble(
        embeddings_dir=str(embeddings_dir),
        token_store=str(store.directory),
        output_dir=str(output_dir),
        tasks=tasks,
        training=training,
        **options,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, embeddings_dir, store):
    directory = tmp_path_factory.mktemp("ensemble") / "out"
    return directory, start(directory, embeddings_dir, store, config_text="X = 1")


def test_it_learns_and_opens_again(trained, embeddings_dir):
    directory, returned = trained
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 20
    validated = {line["step"]: line["validation/nll"] for line in lines if "validation/nll" in line}
    assert list(validated) == [5, 10, 15, 20]
    assert validated[20] < validated[5]
    metadata = json.loads((directory / "metadata.json").read_text())
    assert metadata["step"] == min(validated, key=validated.get)
    assert metadata["validation"]["nll"] == pytest.approx(min(validated.values()))
    specialist = Embeddings(embeddings_dir).fingerprints
    opened = Ensemble.open(directory, fingerprints=specialist)
    assert opened.config == TRAINING.model
    assert opened.tasks == ("first",)
    assert opened.fingerprints == returned.fingerprints
    assert opened.fingerprints.items() > specialist.items()
    jax.tree.map(np.testing.assert_array_equal, opened.params, returned.params)
    assert (directory / "config.gin").read_text() == "X = 1"


def test_the_first_members_are_an_ensemble(trained):
    """Of so many, as one trained with them alone: test_ensemble_step.py."""
    _, three = trained
    cut = three.first(2)
    assert cut.config.members == 2
    first = jax.tree.map(lambda leaf: leaf[:2], three.params)
    jax.tree.map(np.testing.assert_array_equal, cut.params, first)
    assert cut.fingerprints["ensemble"] != three.fingerprints["ensemble"]
    with pytest.raises(ConfigError, match="1 members of an ensemble of 3"):
        three.first(1)


def test_killed_it_resumes_to_the_same_bits(trained, embeddings_dir, store, tmp_path, monkeypatch):
    _, uninterrupted = trained
    batch = SpecialistVectors.batch

    def told_to_stop(vectors, streams, step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(vectors, streams, step)

    monkeypatch.setattr(SpecialistVectors, "batch", told_to_stop)
    with pytest.raises(Preempted):
        start(tmp_path / "out", embeddings_dir, store)
    monkeypatch.undo()
    assert not (tmp_path / "out" / "metadata.json").exists()
    assert start(tmp_path / "out", embeddings_dir, store).fingerprints == uninterrupted.fingerprints
    assert (tmp_path / "out" / "members.npz").exists()


def test_batches_are_the_members_own(embeddings_dir, store):
    vectors = SpecialistVectors.read(embeddings_dir, store, tasks=["first"], split="train")
    queries = store.queries("first", "train")
    stream = vectors.stream(store, TRAINING.batching)
    seeds = [named_seed(0, f"member {member}") for member in range(2)]
    batch = vectors.batch([stream.reseeded(seed) for seed in seeds], step=9)
    encoded = vectors.queries["first"]
    passages = Embeddings(embeddings_dir)
    for member, seed in enumerate(seeds):
        config = dataclasses.replace(TRAINING.batching, seed=seed)
        rows = BatchStream(store, {"first": queries}, config).rows(9)
        np.testing.assert_array_equal(batch.queries[member], encoded[rows.query_rows])
        np.testing.assert_array_equal(batch.passages[member], passages.take(rows.passage_rows))
        np.testing.assert_array_equal(batch.positive_index[member], rows.positive_index)
    assert not np.array_equal(batch.queries[0], batch.queries[1])


def test_what_does_not_belong_together_is_refused(trained, embeddings_dir, store, tmp_path):
    directory, _ = trained
    other = tiny_training.write_token_store(tmp_path / "tokens", seed=1)
    with pytest.raises(FingerprintError, match=": made from passages"):
        start(tmp_path / "out", embeddings_dir, other)
    strange = write_specialist(tmp_path / "other", store, seed=5)
    with pytest.raises(FingerprintError, match="begun with specialist"):
        start(directory, strange, store)
    with pytest.raises(FingerprintError, match="train an ensemble on this model's embeddings"):
        Ensemble.open(directory, fingerprints=Embeddings(strange).fingerprints)
    with pytest.raises(FingerprintError, match="begun with training"):
        start(directory, embeddings_dir, store, training=dataclasses.replace(TRAINING, epochs=6))
    with pytest.raises(DataError, match="no finished ensemble here"):
        Ensemble.open(tmp_path / "nowhere")


def test_tasks_that_are_none_or_not_encoded(embeddings_dir, store, tmp_path):
    for tasks, words in (("first", "list those"), ((), "list those"), (("third",), "no task")):
        with pytest.raises(ConfigError, match=words):
            start(tmp_path / "out", embeddings_dir, store, tasks=tasks)
    bare = write_specialist(tmp_path / "bare", store)
    (bare / "queries" / "first.validation" / "metadata.json").unlink()
    with pytest.raises(DataError, match="no embeddings of task 'first', split 'validation'"):
        start(tmp_path / "out", bare, store)
