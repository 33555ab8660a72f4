"""T5X's own trainer with our model: ten steps by T5X and ten by ours, and checkpoints both ways.

TASER_T5X holds what T5X needs on PYTHONPATH, separated by colons: its source, airio's, and the
packages that it imports (docs/export.md names them).
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from tiny_training import PASSAGE_LENGTH, QUERY_LENGTH, model_config, write_token_store

from taser_jax.data.token_store.store import TokenStore
from taser_jax.interop.pretrained import Pretrained, read_pretrained
from taser_jax.interop.t5x import read_t5x, write_t5x
from taser_jax.models.batch import Batch, Tokens
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params, init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.models.t5 import T5Config
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.training.state import init_state
from taser_jax.training.step import make_train_step

pytestmark = pytest.mark.slow
STEPS, BATCH_SIZE, RATE = 10, 8, 3e-3
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "t5x"
TASER = model_config()
DPR = dataclasses.replace(TASER, experts=ExpertConfig(), towers=Towers.SEPARATE)
T5_SIZES = {"vocab_size": 96, "embed_dim": 16, "num_layers": 1, "num_decoder_layers": 1}
T5_SIZES |= {"num_heads": 2, "head_dim": 8, "mlp_dim": 32, "dropout_rate": 0.0}
T5 = T5DualEncoderConfig(t5=T5Config(**T5_SIZES))


def bindings(config: object, *names: str) -> list[str]:
    """The same in the examples' Gin files."""
    return [f"{type(config).__name__}.{name}={getattr(config, name)}" for name in names]


BERT_SIZES = (*T5_SIZES.keys() - {"num_decoder_layers"}, "attention_dropout_rate")
BERT = (*bindings(TASER.bert, *BERT_SIZES), "DualEncoderConfig.pooling='mean'")
BINDINGS = {
    "dpr": BERT,
    "taser": (*BERT, "ExpertConfig.num_experts=2", "ExpertConfig.blocks=(1,)"),
    "st5_encdec": bindings(T5.t5, *T5_SIZES),
}


@pytest.fixture(scope="module")
def packages() -> str:
    path = os.environ.get("TASER_T5X")
    if path is None:
        pytest.skip("T5X is not here; set TASER_T5X to the folders of it and its packages")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("t5x") / "tokens"
    write_token_store(directory, num_queries=STEPS * BATCH_SIZE, num_passages=400)
    return directory


def train_with_t5x(packages, store, model, directory, start):
    """`python -m t5x.train` with the examples' Gin files."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        "PYTHONPATH": f"{EXAMPLES}:{packages}",
        "TOKEN_STORE": str(store),
        "TASK": "first",
    }
    gin = {
        **{"MODEL_DIR": f"'{directory}'", "QUERY_LENGTH": QUERY_LENGTH, "BATCH_SIZE": BATCH_SIZE},
        **{"PASSAGE_LENGTH": PASSAGE_LENGTH, "LEARNING_RATE": RATE, "TRAIN_STEPS": STEPS},
        **{"SHUFFLE_TRAIN_EXAMPLES": False, "train.stats_period": 1},
        **{"train.random_seed": 0, "INITIAL_CHECKPOINT_PATH": f"'{start}'"},
    }
    files = ("t5x/configs/runs/pretrain.gin", "dual_encoder.gin", f"{model}.gin")
    return subprocess.run(
        [
            *(sys.executable, "-m", "t5x.train", f"--gin_search_paths={EXAMPLES}"),
            *(f"--gin_file={file}" for file in (*files, "from_checkpoint.gin")),
            *(f"--gin.{name}={value}" for name, value in gin.items()),
            *(f"--gin.{binding}" for binding in BINDINGS[model]),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )


def losses(directory: pathlib.Path) -> list[float]:
    """T5X's loss at each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(directory / "train"))
    events.Reload()
    return [float(make_ndarray(event.tensor_proto)) for event in events.Tensors("loss")]


def batch_of(store: TokenStore, step: int) -> Batch:
    """What T5X's feature converter makes of the same queries."""
    queries = store.queries("first", "train")
    rows = np.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
    passages = np.array(
        [r for row in rows for r in (queries.positives[row][0], queries.hard_negatives[row][0])]
    )
    positive_index = np.arange(BATCH_SIZE) * 2
    equal = passages[positive_index][:, None] == passages
    return Batch(
        queries=Tokens(queries.ids[rows].astype(np.int32), queries.ids[rows] != 0),
        passages=store.passages.tokens(passages),
        positive_index=positive_index,
        ignore=equal & (np.arange(len(passages)) != positive_index[:, None]),
        query_rows=rows,
        passage_rows=passages,
    )


@pytest.mark.parametrize(("model", "config"), [("taser", TASER), ("dpr", DPR), ("st5_encdec", T5)])
def test_ten_steps_have_the_losses_of_our_trainer(packages, store, tmp_path, model, config):
    module = DualEncoder(config)
    params = init_params(module, jax.random.key(5))
    start = write_t5x(tmp_path / "start", params, step=0)
    run = train_with_t5x(packages, store, model, tmp_path / "model", start)
    assert run.returncode == 0, run.stderr[-3000:]
    started = flatten_dict(read_t5x(tmp_path / "model" / "checkpoint_0"))
    for path, values in flatten_dict(params).items():
        np.testing.assert_array_equal(started[path], values)

    optimizer = optax.adamw(RATE)
    step = make_train_step(module, optimizer)
    state, ours = init_state(lambda _: params, optimizer, jax.random.key(0)), []
    tokens = TokenStore.open(store)
    for number in range(STEPS):
        state, metrics = step(state, {"first": batch_of(tokens, number)})
        ours.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses(tmp_path / "model"), ours, atol=1e-5)

    saved = read_t5x(tmp_path / "model")
    loaded = read_pretrained(
        Pretrained(str(tmp_path / "model")),
        config=config,
        params=abstract_params(module),
        vocabulary=None,
    )
    for path, values in flatten_dict(loaded).items():
        np.testing.assert_array_equal(values, flatten_dict(saved)[path])
