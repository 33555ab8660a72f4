"""`taser train` of models with a query tower for each task, from a tied model's checkpoint."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_training
from tiny_models import assert_close, one_block

from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.ask import _served
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.storage.errors import ConfigError

TASKS = ("first", "second")
T5 = one_block(vocab_size=tiny_training.VOCABULARY_SIZE, dropout_rate=0.0)
TIED = {
    "bert": dataclasses.replace(tiny_training.model_config(), experts=ExpertConfig()),
    "t5": T5DualEncoderConfig(t5=T5),
}


def q_spec(config, tasks=TASKS):
    return dataclasses.replace(config, towers=Towers.SEPARATE, query_tasks=tasks)


def start(model_dir, store, model, *, rate=3e-3, **options):
    training = tiny_training.training_config(train_steps=2, learning_rate=rate)
    return tiny_training.start(model_dir, store, training, model=model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", pytest.param("t5", marks=pytest.mark.release)])
def test_it_starts_as_the_tied_model_and_validates_every_task(tiny_store_dir, tmp_path, kind):
    tied_dir = tmp_path / "tied"
    start(tied_dir, tiny_store_dir, TIED[kind])
    begun = {"initial_checkpoint": str(tied_dir / "checkpoint_2"), "rate": 1e-12}
    summary = start(tmp_path / "q_spec", tiny_store_dir, q_spec(TIED[kind]), **begun)
    tied, several = load_model(tied_dir), load_model(tmp_path / "q_spec")
    for tower in several.params.values():
        assert_close(tower, tied.params["encoder"], rtol=1e-7, atol=1e-7)
    validated = json.loads((tied_dir / "metrics.jsonl").read_text().splitlines()[-1])
    # Validation takes each task's tower: as copies they are judged as the tied one was.
    for name, value in summary.validation.items():
        assert value == pytest.approx(validated[f"validation/{name}"], rel=1e-4), name
    tokens = tiny_training.TokenStore.open(tiny_store_dir).passages.tokens(np.arange(8))
    for role, task in ((Role.QUERY, "first"), (Role.QUERY, "second"), (Role.PASSAGE, None)):
        np.testing.assert_allclose(
            several.encode_fn(role, task=task)(tokens), tied.encode_fn(role)(tokens), atol=1e-5
        )


def test_a_task_without_a_tower_is_reported_before_anything_is_computed(tiny_store_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no query tower for second.*query_tasks: first"):
        start(tmp_path / "model", tiny_store_dir, q_spec(TIED["bert"], ("first",)))
    assert not (tmp_path / "model").exists()


def test_it_is_served_with_the_query_tower_of_the_task_asked_for(tiny_store_dir, tmp_path):
    model = q_spec(TIED["bert"]).with_transformer(max_length=64)
    tiny_training.write_untrained(tmp_path / "model", model, tiny_store_dir)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    WordPieceVocabulary(pieces).save(str(tmp_path / "model" / "vocabulary"))
    served = _served(tmp_path / "model")
    assert served.tasks == TASKS
    # A request may name none: it is the first's.
    for retriever in (served, served.for_task("second")):
        assert retriever.encode_queries(["a"]).shape == (1, model.embedding_dim)
    with pytest.raises(ConfigError, match=r"(?s)no task 'third'.*tasks: first, second"):
        served.for_task("third")
