import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import tensorflow as tf
from flax.traverse_util import unflatten_dict
from tiny_source import (
    PIECES,
    TEXTS,
    TITLES,
    embed_given,
    embed_passages,
    embed_queries,
    exported,
    t5_source,
    tiny_source,
)

from taser_jax.data.token_store.store import QueryNormalization, QuerySettings, Titles
from taser_jax.interop.saved_model import export_saved_model
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import Pooling
from taser_jax.models.dual_encoder import Towers
from taser_jax.models.routing import Routing

pytestmark = pytest.mark.slow

# TensorFlow and its tokenizer ops alone. (TensorFlow itself may import jax.)
LOADER = """
import json, sys
import numpy as np
import tensorflow as tf
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


def run(directory, role, *texts):
    """What a signature makes of texts, in this process."""
    signature = tf.saved_model.load(str(directory)).signatures[f"encode_{role.value}"]
    names = ("queries",) if role is Role.QUERY else ("titles", "texts")
    inputs = {name: tf.constant(batch, tf.string) for name, batch in zip(names, texts, strict=True)}
    return signature(**inputs)["embedding"].numpy()


def same(embeddings, expected):
    np.testing.assert_allclose(embeddings, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def det_r(tmp_path_factory):
    directory = tmp_path_factory.mktemp("det_r")
    source = tiny_source(directory)
    return source, exported(export_saved_model, source, directory)


def test_a_process_with_tensorflow_alone_gives_our_embeddings(det_r, tmp_path):
    source, directory = det_r
    queries = [{"queries": TEXTS}, {"queries": TEXTS[:1]}, {"queries": []}]
    passages = [{"titles": TITLES, "texts": TEXTS}, {"titles": TITLES[1:2], "texts": TEXTS[1:2]}]
    texts = {"encode_query": queries, "encode_passage": passages, "serving_default": queries[:1]}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    arguments = [directory, tmp_path / "texts.json", tmp_path / "embeddings.npz"]
    subprocess.run([sys.executable, "-c", LOADER, *arguments], check=True)
    embeddings = np.load(arguments[-1])
    by_query, by_passage = (embed_given(source, role) for role in Role)
    for name, expected in {
        "encode_query.0": by_query,
        "encode_query.1": by_query[:1],
        "encode_query.2": by_query[:0],
        "encode_passage.0": by_passage,
        "encode_passage.1": by_passage[1:2],
        "serving_default.0": by_query,
    }.items():
        same(embeddings[name], expected)
    assert np.abs(by_query[0] - by_query[1]).max() > 0.1
    assert np.abs(by_passage[0] - embed_passages(source, [""], TEXTS[:1])).max() > 0.1


def test_t5_with_separate_towers(tmp_path):
    source = t5_source(tmp_path, towers=Towers.SEPARATE, query_tasks=("nq", "fever"))
    directory = exported(export_saved_model, source, tmp_path)
    same(run(directory, Role.QUERY, TEXTS), embed_given(source, Role.QUERY))
    same(run(directory, Role.PASSAGE, TITLES, TEXTS), embed_given(source, Role.PASSAGE))


def test_titles_and_texts_of_different_number_are_refused(det_r):
    with pytest.raises(tf.errors.InvalidArgumentError, match="differ in number"):
        run(det_r[1], Role.PASSAGE, TITLES[:1], TEXTS)


def test_parameters_lie_there_once_and_come_back_bit_for_bit(det_r):
    source, directory = det_r
    # TensorFlow's own reader of what lies below `params`.
    prefix, suffix = "params/", "/.ATTRIBUTES/VARIABLE_VALUE"
    reader = tf.train.load_checkpoint(str(directory / "variables" / "variables"))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith(prefix)]
    variables = {n.removeprefix(prefix).removesuffix(suffix): reader.get_tensor(n) for n in names}
    jax.tree.map(np.testing.assert_array_equal, unflatten_dict(variables, sep="/"), source.params)
    assert b"taser_jax/models" not in (directory / "saved_model.pb").read_bytes(), "local paths"


@pytest.mark.parametrize("titles", [Titles.JOIN, Titles.OMIT])
def test_learned_routing_and_texts_as_in_training(tmp_path, titles):
    experts = {"num_experts": 3, "routing": Routing.SEQUENCE}
    source = dataclasses.replace(
        tiny_source(tmp_path, experts=experts, pooling=Pooling.MEAN),
        query_settings=QuerySettings(QueryNormalization.CURLY_APOSTROPHE, (PIECES.index("the"),)),
        passage_prompt=(PIECES.index("city"),),
        titles=titles,
    )
    directory = exported(export_saved_model, source, tmp_path)
    queries = run(directory, Role.QUERY, ["’", "city’"])
    plain = dataclasses.replace(source, query_settings=QuerySettings())
    same(queries, embed_queries(plain, ["the '", "the city'"]))
    # The first keeps its curly apostrophe here, the second has no prompt.
    other = embed_queries(plain, ["the ’", "city'"])
    assert (np.abs(queries - other).max(axis=1) > 1e-3).all()
    passages = run(directory, Role.PASSAGE, TITLES, TEXTS)
    same(passages, embed_given(source, Role.PASSAGE))
    for changes in ({"titles": Titles.INCLUDE}, {"passage_prompt": ()}):
        other = embed_given(dataclasses.replace(source, **changes), Role.PASSAGE)
        assert np.abs(passages - other).max() > 1e-3
