"""Ten steps of training, `taser export`, and the result in TensorFlow and as StableHLO.

The same of the formats of plain BERTs is in test_plain_exports, which needs PyTorch.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ten_steps
import tensorflow as tf
from exported_programs import run_snippet

from taser_jax.assembly.model_directory import write_run_record
from taser_jax.cli import main as cli
from taser_jax.data.text.preprocessors import encode_passages, encode_queries
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.models.batch import Role
from taser_jax.storage.records import Passage
from taser_jax.training.checkpoints import Checkpoints
from taser_jax.training.state import TrainState

pytestmark = pytest.mark.slow

KINDS = ("taser", "minilm")
TITLES, TEXTS = zip(*ten_steps.PASSAGES, strict=True)


@dataclasses.dataclass(frozen=True)
class Exported:
    trained: ten_steps.Trained
    saved_model: pathlib.Path
    stablehlo: pathlib.Path


@pytest.fixture(scope="module", params=KINDS)
def exported(request, make_once, tmp_path_factory):
    directory = tmp_path_factory.mktemp("program")
    is_taser = request.param == "taser"
    trained = (
        ten_steps.from_scratch(directory, "taser", steps=10)
        if is_taser
        else make_once(request.param)
    )
    write_model(trained, directory / "model")
    bindings = {
        "MODEL_DIR": directory / "model",
        "EXPORT_DIR": directory / "out",
        "export_model.formats": ["saved_model", "stablehlo"],
    }
    arguments = [f"--gin.{name}={value}" for name, value in bindings.items()]
    assert cli.run(["export", *arguments]) == 0
    return Exported(trained, directory / "out" / "saved_model", directory / "out" / "stablehlo")


def write_model(trained, directory):
    """What `taser train` leaves."""
    source = trained.source
    checkpoints = Checkpoints(directory)
    state = TrainState(jnp.asarray(10, jnp.int32), jax.tree.map(jnp.asarray, source.params), ())
    checkpoints.save(state, step=10, about={})
    checkpoints.close()
    lengths = {"query_length": source.query_length, "passage_length": source.passage_length}
    write_run_record(
        directory,
        model_config=source.config,
        facts={**source.facts, **lengths},
        parameter_table="",
        config_text=source.config_text,
        vocabulary=source.vocabulary_dir,
    )


def same(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-5)


@pytest.mark.release
def test_tensorflow_gives_the_models_own_embeddings_of_strings(exported):
    signatures = tf.saved_model.load(str(exported.saved_model)).signatures
    queries = signatures["encode_query"](queries=tf.constant(ten_steps.QUERIES))["embedding"]
    passages = signatures["encode_passage"](titles=tf.constant(TITLES), texts=tf.constant(TEXTS))
    check(exported.trained, queries, passages["embedding"])


@pytest.mark.release
def test_stablehlo_gives_the_models_own_embeddings(exported):
    vocabulary = load_vocabulary(exported.stablehlo / "vocabulary")
    signature = json.loads((exported.stablehlo / "signature.json").read_text(encoding="utf-8"))
    functions = signature["functions"]
    lengths = [functions[f"encode_{role.value}"]["length"] for role in Role]
    queries = encode_queries(ten_steps.QUERIES, vocabulary, length=lengths[0])
    passages = [Passage("", text, title) for title, text in ten_steps.PASSAGES]
    passages = encode_passages(passages, vocabulary, length=lengths[1])
    check(
        exported.trained,
        run_snippet(exported.stablehlo, Role.QUERY, queries.ids, queries.mask).embeddings,
        run_snippet(exported.stablehlo, Role.PASSAGE, passages.ids, passages.mask).embeddings,
    )


def check(trained, queries, passages):
    same(queries, trained.queries)
    same(passages, trained.passages)
    # Texts do differ, or the comparison would show nothing.
    assert np.abs(np.diff(trained.queries, axis=0)).max() > 1e-3


@pytest.mark.release
def test_facts_of_training_are_written(exported):
    for directory in (exported.saved_model, exported.stablehlo):
        facts = json.loads((directory / "export.json").read_text(encoding="utf-8"))
        assert facts["training"]["checkpoint_step"] == 10
        assert facts["fingerprints"]["data"] == "fedcba9876543210"
