import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf
from exported_programs import saved_model_params
from sentence_models import save_bert_pieces
from tiny_source import (
    DETERMINISTIC,
    DPR,
    PIECES,
    TEXTS,
    TITLES,
    embed_passages,
    embed_queries,
    tiny_source,
)
from tiny_t5_source import t5_source, t5_vocabulary

from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.interop.saved_model import export_saved_model
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import Routing

pytestmark = pytest.mark.slow

MODELS = {
    "seq_r": {
        "experts": {"num_experts": 3, "routing": Routing.SEQUENCE},
        "pooling": Pooling.MEAN,
        "texts": {"titles": Titles.JOIN},
    },
    "dpr": {"experts": DPR, "towers": Towers.SEPARATE, "kind": "sentencepiece"},
    "t5": {"towers": Towers.SEPARATE, "query_tasks": ("nq", "fever"), "kind": "t5"},
}
# TensorFlow and its tokenizer ops alone. (TensorFlow itself may import jax.)
LOADER = """
import json, sys
import numpy as np
import tensorflow as tf
try:
    tf.saved_model.load(sys.argv[1])
except RuntimeError as error:
    assert "Op type not registered" in str(error), error
else:
    raise AssertionError("loads without tensorflow_text")
import tensorflow_text
model = tf.saved_model.load(sys.argv[1])
results = {}
for name, batches in json.load(open(sys.argv[2])).items():
    for i, batch in enumerate(batches):
        inputs = {key: tf.constant(value, tf.string) for key, value in batch.items()}
        results[f"{name}.{i}"] = model.signatures[name](**inputs)["embedding"].numpy()
np.savez(sys.argv[3], **results)
foreign = {"taser_jax", "flax"} & {name.partition(".")[0] for name in sys.modules}
assert not foreign, foreign
"""


def exported(directory, *, kind="wordpiece", texts=None, **changes):
    if kind == "sentencepiece":
        words = "undoing the city in france is a café, paris: quick brown foxes jump lazy dogs"
        save_bert_pieces(directory / "trained", [words] * 4, 64)
        changes["vocabulary"] = load_vocabulary(directory / "trained")
    if kind == "t5":
        source = t5_source(directory, t5_vocabulary(), **changes)
    else:
        source = tiny_source(directory, **changes)
    source = dataclasses.replace(source, **(texts or {}))
    output_dir = directory / "saved_model"
    output_dir.mkdir()
    export_saved_model(source, output_dir)
    return source, output_dir


def run(directory, role, *texts):
    """What a signature makes of texts, in this process."""
    signature = tf.saved_model.load(str(directory)).signatures[f"encode_{role.value}"]
    names = ("queries",) if role is Role.QUERY else ("titles", "texts")
    inputs = {name: tf.constant(batch, tf.string) for name, batch in zip(names, texts, strict=True)}
    return signature(**inputs)["embedding"].numpy()


@pytest.fixture(scope="module")
def det_r(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("det_r"), experts=DETERMINISTIC)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Parameters that outweigh the graph, bfloat16, texts that are not taken as they are."""
    prompt = (PIECES.index("the"),)
    queries = QuerySettings(QueryNormalization.CURLY_APOSTROPHE, prompt)
    return exported(
        tmp_path_factory.mktemp("wide"),
        experts=DETERMINISTIC,
        bert={"mlp_dim": 24 * 64, "dtype": "bfloat16"},
        texts={
            "query_settings": queries,
            "titles": Titles.OMIT,
            "passage_prompt": (PIECES.index("city"),),
        },
    )


def test_a_process_with_tensorflow_alone_gives_our_embeddings(det_r, tmp_path):
    source, directory = det_r
    queries = [{"queries": TEXTS}, {"queries": TEXTS[:1]}, {"queries": []}]
    passages = [{"titles": TITLES, "texts": TEXTS}, {"titles": TITLES[1:2], "texts": TEXTS[1:2]}]
    texts = {"encode_query": queries, "encode_passage": passages, "serving_default": queries[:1]}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    output = tmp_path / "embeddings.npz"
    arguments = [str(directory), str(tmp_path / "texts.json"), str(output)]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    embeddings = dict(np.load(output))
    by_query, by_passage = (embed_queries(source, TEXTS), embed_passages(source, TITLES, TEXTS))
    for name, expected in {
        "encode_query.0": by_query,
        "encode_query.1": by_query[:1],
        "encode_query.2": by_query[:0],
        "encode_passage.0": by_passage,
        "encode_passage.1": by_passage[1:2],
        "serving_default.0": by_query,
    }.items():
        np.testing.assert_allclose(embeddings[name], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(by_query[0] - by_query[1]).max() > 0.1
    assert np.abs(by_passage[0] - embed_passages(source, [""], TEXTS[:1])).max() > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_learned_routing_joined_titles_separate_towers_sentencepiece_and_t5(tmp_path, name):
    source, directory = exported(tmp_path, **MODELS[name])
    np.testing.assert_allclose(
        run(directory, Role.QUERY, TEXTS), embed_queries(source, TEXTS), rtol=1e-5, atol=1e-5
    )
    embeddings = run(directory, Role.PASSAGE, TITLES, TEXTS)
    expected = embed_passages(source, TITLES, TEXTS, source.titles)
    np.testing.assert_allclose(embeddings, expected, rtol=1e-5, atol=1e-5)
    if source.titles is Titles.JOIN:
        assert np.abs(embeddings - embed_passages(source, TITLES, TEXTS)).max() > 1e-3


def test_titles_and_texts_of_different_number_are_refused(det_r):
    with pytest.raises(tf.errors.InvalidArgumentError, match="differ in number"):
        run(det_r[1], Role.PASSAGE, TITLES[:1], TEXTS)


def test_parameters_lie_there_once_and_come_back_bit_for_bit(det_r):
    source, directory = det_r
    params = saved_model_params(directory)
    jax.tree.map(np.testing.assert_array_equal, params, source.params)
    assert jax.tree.structure(params) == jax.tree.structure(source.params)
    assert b"taser_jax/models" not in (directory / "saved_model.pb").read_bytes(), "local paths"


def test_bfloat16_activations_and_texts_as_in_training(wide):
    source, directory = wide
    queries = run(directory, Role.QUERY, ["’", "city’"])
    expected = embed_queries(source, ["the '", "the city'"])
    # The first keeps its curly apostrophe here, the second has no prompt.
    other = embed_queries(source, ["the ’", "city'"])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(queries, expected, atol=0.05 * scale)
    assert (np.abs(queries - other).max(axis=1) > 0.1 * scale).all()
    passages = run(directory, Role.PASSAGE, TITLES, TEXTS)
    expected = embed_passages(source, [""] * len(TEXTS), TEXTS)
    np.testing.assert_allclose(passages, expected, atol=0.05 * np.abs(expected).max())
    unprompted = dataclasses.replace(source, passage_prompt=())
    other = embed_passages(unprompted, [""] * len(TEXTS), TEXTS)
    assert (np.abs(passages - other).max(axis=1) > 0.1 * scale).all()
    assert queries.dtype == np.float32
