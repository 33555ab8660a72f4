"""The model and the tasks for T5X, with stand-ins for the two modules of T5X that they need.

tests/shared_data/test_t5x_live.py trains with T5X itself.
"""

import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_training
from flax.traverse_util import flatten_dict
from tiny_training import PASSAGE_LENGTH, QUERY_LENGTH, model_config

from taser_jax.data.token_store.negatives import write_negatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.models.batch import Batch, Tokens
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import init_params
from taser_jax.storage.errors import ConfigError
from taser_jax.training.batch_loss import make_loss
from taser_jax.training.objective import ObjectiveConfig

pytestmark = pytest.mark.slow

CONFIG = model_config()
draw = jax.jit(functools.partial(init_params, DualEncoder(CONFIG)))
LENGTHS = {"inputs": QUERY_LENGTH, "targets": PASSAGE_LENGTH}
LENGTHS["negative_targets"] = 2 * PASSAGE_LENGTH


class BaseModel:
    """What T5X's own does in `__init__`."""

    def __init__(self, optimizer_def):
        self.optimizer_def = optimizer_def


@pytest.fixture(scope="module")
def t5x_model():
    pytest.importorskip("seqio", reason="T5X reads SeqIO tasks")
    t5x, clu = types.ModuleType("t5x"), types.ModuleType("clu")
    metrics = types.ModuleType("clu.metrics")
    t5x.models = types.SimpleNamespace(BaseModel=BaseModel)
    # Gives what it is given.
    metrics.Average, clu.metrics = types.SimpleNamespace(from_model_output=np.asarray), metrics
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {"t5x": t5x, "clu": clu, "clu.metrics": metrics}.items():
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("taser_jax.interop.t5x_model")
        patch.delitem(sys.modules, "taser_jax.interop.t5x_model")


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("t5x") / "tokens"
    tiny_training.write_token_store(directory, num_passages=6, num_queries=8, least_words=4)
    return directory


@pytest.fixture(scope="module")
def mined(store_dir):
    """Rows of each query's positive and two negatives, those after it; where these are mined."""
    queries = TokenStore.open(store_dir).queries("first", "train")
    rows = (np.array(list(queries.positives)) + np.arange(3)) % 6
    directory, metadata = store_dir.parent / "negatives", {"collection_fingerprint": "collection-0"}
    lists = {"rows": rows[:, 1:].tolist(), "scores": [[1.0, 0.5]] * len(rows)}
    lists["query_ids"] = queries.query_ids
    write_negatives(directory, "first", "train", metadata=metadata, **lists)
    return directory, rows


@pytest.fixture(scope="module")
def converted(t5x_model, store_dir, mined):
    """All queries as T5X batches them."""
    import seqio

    where = {"token_store": str(store_dir), "task": "first", "negatives_dir": str(mined[0])}
    task = t5x_model.add_t5x_task("two", **where, num_negatives=2)
    dataset = task.get_dataset(LENGTHS, split="train", shuffle=False)
    examples = list(t5x_model.RetrievalFeatureConverter(pack=False)(dataset, LENGTHS))
    seqio.TaskRegistry.remove("two")
    return {name: np.stack([each[name] for each in examples]) for name in examples[0]}


def make(t5x_model, config=CONFIG, *, batch_size=8):
    sizes = {"batch_size": batch_size, "passage_length": PASSAGE_LENGTH}
    return t5x_model.DualEncoderModel(config, "optimiser", ObjectiveConfig(), **sizes)


def test_features_are_queries_and_positives_before_their_negatives(converted, store_dir, mined):
    store, (_, rows) = TokenStore.open(store_dir), mined
    np.testing.assert_array_equal(converted["queries"], store.queries("first", "train").ids)
    passages = store.passages.tokens(rows.ravel())
    np.testing.assert_array_equal(converted["passages"].reshape(24, PASSAGE_LENGTH), passages.ids)


def test_the_loss_is_that_of_our_step_on_the_same_batch(t5x_model, converted, store_dir, mined):
    store, params = TokenStore.open(store_dir), draw(jax.random.key(3))
    queries, rows = store.queries("first", "train"), mined[1].ravel()
    positive_index = np.arange(8) * 3
    batch = Batch(
        queries=Tokens(queries.ids.astype(np.int32), queries.ids != 0),
        passages=store.passages.tokens(rows),
        positive_index=positive_index,
        # Six passages and eight queries: some are the positive of several.
        ignore=(rows[positive_index][:, None] == rows) & (np.arange(24) != positive_index[:, None]),
        query_rows=np.arange(8),
        passage_rows=rows,
    )
    assert batch.ignore.any()
    loss_fn = make_loss(DualEncoder(CONFIG), train=False)
    expected, metrics = loss_fn(params, batch, step=jnp.int32(0))
    model = make(t5x_model)
    loss, measured = model.loss_fn(params, converted, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(measured["loss"], [expected], rtol=1e-6)
    np.testing.assert_allclose(measured["mrr"][0], metrics["mrr"], rtol=1e-6)
    embeddings, _ = model.predict_batch_with_aux(params, converted)
    assert embeddings.shape == (8, CONFIG.embedding_dim)
    assert model.score_batch(params, converted).shape == (8,)


def test_dropout_draws_depend_on_the_key_and_differ_by_side(t5x_model, converted):
    model = make(t5x_model, model_config(dropout_rate=0.5))
    params = draw(jax.random.key(3))
    first, again, other = (
        float(model.loss_fn(params, converted, jax.random.key(seed))[0]) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_every_parameter_has_the_names_of_its_axes(t5x_model):
    shapes = {"queries": (8, QUERY_LENGTH), "passages": (8, 3 * PASSAGE_LENGTH)}
    variables = make(t5x_model).get_initial_variables(jax.random.key(0), shapes)
    params, axes = (flatten_dict(variables[name]) for name in ("params", "params_axes"))
    assert len(params) == len(axes) > 10
    for path, values in params.items():
        assert len(axes[*path[:-1], f"{path[-1]}_axes"].names) == values.ndim
    assert ("vocab", "embed") in [each.names for each in axes.values()]
    assert {"expert"} <= {name for name, _ in t5x_model.axis_rules()}


def test_microbatches_are_refused(t5x_model, converted):
    message = "(?s)a batch of 8 queries, where the model expects 16.*microbatches"
    with pytest.raises(ConfigError, match=message):
        make(t5x_model, batch_size=16).loss_fn(draw(jax.random.key(0)), converted, None)


@pytest.mark.parametrize(
    ("start", "positives", "message"),
    [
        (0, [0], "texts begin with id 0"),
        (2, [], "1 of 1 queries have no positive"),
        (2, [0], "1 of 1 queries have fewer than 2 hard negatives"),
    ],
)
def test_what_t5x_would_misread_is_refused(t5x_model, tmp_path, start, positives, message):
    writer = tiny_training.store_writer(tmp_path / "tokens")
    writer.vocabulary_directory.mkdir(parents=True)
    writer.write_passages([[start, 7, 3], [start, 8, 3]], count=2)
    texts = {"query_ids": ["q"], "tokens": [[start, 7, 3]], "hard_negatives": [[1]]}
    writer.write_queries("first", "validation", **texts, positives=[positives])
    store = str(writer.finish().directory)
    where = {"token_store": store, "task": "first", "split": "validation"}
    with pytest.raises(ConfigError, match=message):
        t5x_model.add_t5x_task("no", **where, num_negatives=2)
