"""A token store, a model and a recipe small enough to train in a second, without TensorFlow."""

import pathlib
import shutil
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from tiny_models import tiny_bert

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import VOCABULARY, write_model
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.assembly.validator import PoolConfig, ValidationConfig
from taser_jax.commands.train import TrainSummary, train
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.token_store.store import TokenStore, TokenStoreMetadata
from taser_jax.data.token_store.writer import TokenStoreWriter
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import Partitioner
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import DualEncoder, ModelConfig
from taser_jax.models.parameters import init_params
from taser_jax.models.routing import ExpertConfig
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.training.checkpoints import CheckpointConfig, Selection
from taser_jax.training.loop import LoopConfig
from taser_jax.training.state import named_key

VOCABULARY_SIZE, QUERY_LENGTH, PASSAGE_LENGTH = 96, 8, 12
_CLS, _SEP, _FIRST_WORD = 2, 3, 5

draw_params = jax.jit(init_params, static_argnums=0)
"""Parameters of (model, key), of one compiled program."""


def store_writer(directory: pathlib.Path, **changes: object) -> TokenStoreWriter:
    """A writer of a small store, with some settings changed."""
    settings = {
        "collection": "tiny",
        "collection_fingerprint": "c0",
        "vocabulary_fingerprint": "vocabulary",
        "vocabulary_size": VOCABULARY_SIZE,
        "query_length": QUERY_LENGTH,
        "passage_length": PASSAGE_LENGTH,
    }
    return TokenStoreWriter(directory, TokenStoreMetadata(**(settings | changes)))


def write_token_store(
    directory: pathlib.Path,
    *,
    num_passages: int = 48,
    num_queries: int = 32,
    seed: int = 0,
    least_words: int = PASSAGE_LENGTH - 2,
) -> TokenStore:
    """Two tasks in which a query is made of words of its positive, so that learning shows."""
    rng = np.random.default_rng(seed)
    words = rng.integers(_FIRST_WORD, VOCABULARY_SIZE, (num_passages, PASSAGE_LENGTH - 2))
    # Where they differ, most passages are short.
    shares = np.random.default_rng(seed).random(num_passages) ** 3
    counts = least_words + (shares * (PASSAGE_LENGTH - 1 - least_words)).astype(int)
    writer = store_writer(directory, collection_fingerprint=f"collection-{seed}")
    writer.vocabulary_directory.mkdir(parents=True)
    (writer.vocabulary_directory / "vocabulary.json").write_text("{}")
    writer.write_passages(
        [[_CLS, *row[:count].tolist(), _SEP] for row, count in zip(words, counts, strict=True)],
        count=num_passages,
    )
    for task in ("first", "second"):
        for split in ("train", "validation"):
            count = num_queries if split == "train" else num_queries // 2
            rows = rng.integers(0, num_passages, count)
            writer.write_queries(
                task,
                split,
                query_ids=[f"{task}-{split}-{i}" for i in range(count)],
                tokens=[
                    [_CLS, *rng.choice(words[row], QUERY_LENGTH - 2).tolist(), _SEP] for row in rows
                ],
                positives=[[int(row)] for row in rows],
                hard_negatives=[[int(row + 1) % num_passages] for row in rows],
            )
    return writer.finish()


def model_config(*, width: int = 16, dropout_rate: float = 0.0) -> DualEncoderConfig:
    """One block with two experts: the smallest TASER, since compiling is what takes time.

    Dropout doubles that of a training's step.
    """
    sizes = {"embed_dim": width, "num_layers": 1, "head_dim": width // 2, "mlp_dim": 2 * width}
    rates = {"dropout_rate": dropout_rate, "attention_dropout_rate": dropout_rate}
    bert = tiny_bert(vocab_size=VOCABULARY_SIZE, max_length=PASSAGE_LENGTH, **sizes, **rates)
    experts = ExpertConfig(num_experts=2, blocks=(1,))
    return DualEncoderConfig(bert=bert, experts=experts, pooling=Pooling.MEAN)


def training_config(
    *,
    train_steps: int,
    evaluation_period: int = 0,
    checkpoint_period: int = 0,
    learning_rate: float = 3e-3,
    validates: bool = True,
    batch_size: int = 8,
) -> TrainingConfig:
    """A recipe of a few steps."""
    validation = ValidationConfig(
        batch_size=8,
        num_batches=2,
        pool=PoolConfig(max_queries=16, hard_negatives=1, other_negatives=1),
    )
    return TrainingConfig(
        loop=LoopConfig(
            train_steps=train_steps,
            evaluation_period=evaluation_period,
            checkpoint_period=checkpoint_period,
            log_period=1,
        ),
        batching=BatchingConfig(batch_size=batch_size),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2),
        checkpoints=CheckpointConfig(selection=Selection.NLL),
        validation=validation if validates else None,
    )


def write_untrained(
    model_dir: pathlib.Path, config: ModelConfig, store_dir: pathlib.Path, *, seed: int = 0
) -> None:
    """A model of drawn weights, as training would begin with, which takes no compiled step."""
    model_dir.mkdir(parents=True)
    shutil.copytree(TokenStore.open(store_dir).vocabulary_directory, model_dir / VOCABULARY)
    model = DualEncoder(config)
    params = draw_params(model, named_key(seed, "init"))
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=jax.devices()[:1]))
    write_model(model_dir, model, params, facts={}, partitioner=partitioner)


def start(
    model_dir: pathlib.Path,
    store_dir: pathlib.Path,
    training: TrainingConfig,
    *,
    model: ModelConfig | None = None,
    data: Mapping[str, Any] = types.MappingProxyType({}),
    **options: Any,
) -> TrainSummary:
    """`taser train` of a tiny model; `data` are further fields of `TrainingData`."""
    return train(
        model_dir=str(model_dir),
        data=TrainingData(str(store_dir), **data),
        model=model or model_config(),
        training=training,
        **options,
    )


GIN_FILE = """\
include 'runs/train.gin'
include 'models/bert_tiny.gin'
include 'models/taser.gin'

MODEL = @DualEncoderConfig()
BertConfig.embed_dim = 16
BertConfig.num_layers = 1
BertConfig.num_heads = 2
BertConfig.head_dim = 8
BertConfig.mlp_dim = 32
BertConfig.max_length = 12
LEARNING_RATE = 3e-3
WARMUP_STEPS = 2
BATCH_SIZE = 8
LoopConfig.log_period = 1
ValidationConfig.num_batches = 1
EVAL_PERIOD = 20
CHECKPOINT_PERIOD = 10
ExpertConfig.blocks = [1]
DualEncoderConfig.pooling = 'mean'
"""
