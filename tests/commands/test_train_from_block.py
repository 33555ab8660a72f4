"""`train_from_block` through `taser train`."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import tiny_training

from taser_jax.assembly.model_directory import load_model, read_settings
from taser_jax.assembly.plans import MultitaskTraining
from taser_jax.assembly.text_sources import frozen_texts
from taser_jax.commands.encode import encode
from taser_jax.data.batches.draws import queries_of
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.batches.stream import FalseNegatives
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.partitioning import leaves_by_path
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.stack import Scan
from taser_jax.retrieval.embeddings import EmbeddingDtype, Embeddings
from taser_jax.storage.errors import FingerprintError
from taser_jax.training.state import named_key

TRAINING = tiny_training.training_config(train_steps=2, validates=False)
MODEL = tiny_training.model_config(dropout_rate=0.1).with_transformer(num_layers=2)


def start(store_dir, model_dir, *, model=MODEL, **changes):
    training = dataclasses.replace(TRAINING, **changes)
    return tiny_training.start(model_dir, store_dir, training, model=model)


@pytest.fixture(scope="module")
def ragged_store_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ragged") / "tokens"
    tiny_training.write_token_store(directory, least_words=1)
    return directory


# The exact median's number of passes, one of the metrics, may differ by one where gradients differ
# in their last bits; with these labels it does not.
EVERY_TASK = MultitaskTraining(
    batching=TaskBatchingConfig(total=32, num_negatives=1, false_negatives=FalseNegatives.KEEP)
)
VALIDATED = tiny_training.training_config(train_steps=3)


def metrics_of(store_dir, model_dir, **changes):
    training = {"loop": VALIDATED.loop, "validation": VALIDATED.validation, "train_from_block": 1}
    start(store_dir, model_dir, **{**training, **changes})
    lines = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: v for name, v in line.items() if not name.endswith("_second")} for line in lines]


def check_saved(model_dir):
    """The saved model has the frozen parameters, too, as they were drawn."""
    model = load_model(model_dir)
    drawn = tiny_training.draw_params(model.model, named_key(TRAINING.seed, "init"))
    stands = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), drawn, model.params)
    for path, same in leaves_by_path(stands).items():
        # Keys' biases cancel in the softmax: their gradient is rounding noise, or nothing.
        if not path.endswith("key/bias"):
            assert same == bool(re.match(r"\w+/(embeddings|layers_0)/", path)), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"multitask": EVERY_TASK, "length_buckets": (5, 9)}, marks=pytest.mark.release
        ),
    ],
)
def test_cached_states_train_and_validate_as_tokens_do(changes, ragged_store_dir, tmp_path):
    states_dir = tmp_path / "states"
    expected = metrics_of(ragged_store_dir, tmp_path / "tokens", **changes)
    changes = {**changes, "states_dir": str(states_dir)}
    exact = {"states_dtype": EmbeddingDtype.FLOAT32, **changes}
    check_saved(tmp_path / "tokens")
    metrics = metrics_of(ragged_store_dir, tmp_path / "states_of", **exact)
    made = {path: path.stat().st_mtime_ns for path in states_dir.rglob("states.npy")}
    assert len(made) == 5, "passages, and two splits of two tasks"
    # Dropout above the frozen blocks is on: its draws are the same.
    for line, other in zip(metrics, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert "validation/mrr" in metrics[-1]
    # Made once; a training that goes on reads the frozen parameters from its checkpoint.
    longer = dataclasses.replace(VALIDATED.loop, train_steps=4)
    gone_on = metrics_of(ragged_store_dir, tmp_path / "states_of", loop=longer, **exact)
    assert gone_on[:3] == metrics
    assert read_settings(tmp_path / "states_of")["training.loop.train_steps"] == 4
    assert {path: path.stat().st_mtime_ns for path in states_dir.rglob("states.npy")} == made


def test_states_of_something_else_are_refused(ragged_store_dir, tiny_store_dir, tmp_path):
    store, other = TokenStore.open(ragged_store_dir), TokenStore.open(tiny_store_dir)
    model = DualEncoder(MODEL, frozen_blocks=1)
    params = tiny_training.draw_params(model, named_key(0, "init"))
    begun = {"model": model, "params": params, "store": store, "dtype": EmbeddingDtype.FLOAT32}
    frozen_texts(str(tmp_path), queries=[], **begun)
    for told, change in (
        ("weights", {"params": tiny_training.draw_params(model, named_key(1, "init"))}),
        ("tokens", {"store": other}),
        ("blocks 1", {"model": model.clone(frozen_blocks=2)}),
        ("dtype float32", {"dtype": EmbeddingDtype.BFLOAT16}),
    ):
        with pytest.raises(FingerprintError, match=f"(?s)begun with.*{told}"):
            frozen_texts(str(tmp_path), queries=[], **{**begun, **change})


def test_towers_of_the_same_weights_share_states(ragged_store_dir, tmp_path):
    """DPR's two towers and Shared's one begin with the same pretrained blocks.

    Training in one loop changes no state, and `taser encode` does not know of it.
    """
    store = TokenStore.open(ragged_store_dir)
    plain = dataclasses.replace(MODEL, experts=ExpertConfig())
    tied = DualEncoder(plain, frozen_blocks=1)
    params = tiny_training.draw_params(tied, named_key(0, "init"))
    scanned = plain.with_transformer(scan=Scan.BLOCKS)
    separate = tied.clone(config=dataclasses.replace(scanned, towers=Towers.SEPARATE))
    copies = {name: params["encoder"] for name in separate.config.tower_names}
    nothing = queries_of(store.queries("second", "validation"), np.zeros(0, np.int64))
    queries = [store.queries("first", "validation"), nothing]
    options = {"store": store, "queries": queries, "dtype": EmbeddingDtype.FLOAT32}
    made = frozen_texts(str(tmp_path), model=tied, params=params, **options)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("states.npy")}
    assert len(times) == 2, "an empty split has no states"
    shared = frozen_texts(str(tmp_path), model=separate, params=copies, **options)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("states.npy")} == times
    rows = np.arange(3)
    np.testing.assert_array_equal(
        shared.passages.tokens(rows).hidden, made.passages.tokens(rows).hidden
    )
    other = copies | {"passage_encoder": jax.tree.map(lambda leaf: leaf + 1, params["encoder"])}
    with pytest.raises(FingerprintError, match=r"(?s)begun with.*weights"):
        frozen_texts(str(tmp_path), model=separate, params=other, **options)


@pytest.mark.slow
def test_a_model_without_training_is_encoded_from_states_too(ragged_store_dir, tmp_path):
    """What frozen blocks make of the texts is what the whole untrained model makes of them."""
    model_dir = tmp_path / "model"
    tiny_training.write_untrained(model_dir, MODEL, ragged_store_dir)
    states = {"states_dir": str(tmp_path / "states"), "states_dtype": EmbeddingDtype.FLOAT32}
    for name, options in (("whole", {}), ("of_states", {"frozen_blocks": 1, **states})):
        encode(
            model_dir=str(model_dir),
            token_store=str(ragged_store_dir),
            output_dir=str(tmp_path / name),
            query_splits=["validation"],
            **options,
        )
    whole, of_states = (Embeddings(tmp_path / name) for name in ("whole", "of_states"))
    np.testing.assert_allclose(of_states[:], whole[:], rtol=1e-5, atol=1e-6)
