"""The data and models of `taser compare`: files, lengths, weights, steps and costs."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.assembly.plans import TrainingConfig
from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.commands.pipelines import compare_plan
from taser_jax.commands.prepare import prepare_files
from taser_jax.commands.train import train
from taser_jax.data.collections.store import (
    PassageStore,
    QuerySet,
    collection_directory,
    list_tasks,
)
from taser_jax.data.prepare.splits import PrepareOptions
from taser_jax.data.text.preprocessors import passage_ids
from taser_jax.data.text.vocabularies import load_vocabulary
from taser_jax.data.token_store.store import TokenStore
from taser_jax.devices.hosts import writes
from taser_jax.interop.hub import read_prompts
from taser_jax.interop.pretrained import (
    pretrained_bert,
    pretrained_normalization,
    pretrained_pooling,
)
from taser_jax.models.batch import Role
from taser_jax.models.bert_dual_encoder import DualEncoderConfig, Pooling
from taser_jax.models.dual_encoder import ModelConfig
from taser_jax.retrieval.encoding import EncodeConfig, encode_rows
from taser_jax.storage.checksums import crc
from taser_jax.storage.errors import ConfigError

_MEASURED_STEPS = 3
# Of each training, that of the initial weights among them.
VALIDATIONS = 5
_PATIENCE = 2
# Passages that are encoded to measure it.
_ENCODED = 64
# GiB that a training takes beside activations: parameters, optimiser, programs, libraries.
_OTHER_GIB = 1.5
# Texts whose tokens are counted.
_SAMPLE = 2000
_LONGEST = {"query": 64, "passage": 256}
# Names that Linux gives to processors that multiply it, on x86 and on Arm.
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
ConfigT = TypeVar("ConfigT")


def filled(config: ConfigT, **values: object) -> ConfigT:
    """A configuration in which fields that have their defaults get other values.

    Example:
        >>> filled(Pretrained("minilm", num_layers=2), num_layers=3).num_layers  # doctest: +SKIP
        2
    """
    fields = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type] # a dataclass
    unset = {name: value for name, value in values.items() if getattr(config, name) == fields[name]}
    return dataclasses.replace(config, **unset)  # type: ignore[type-var] # a dataclass


def check_splits(splits: Mapping[str, Sequence[str]], *, is_pretrained: bool) -> None:
    """Refuses tasks without test queries, and a training from nothing or without validation."""
    untested = [task for task, there in splits.items() if "test" not in there]
    if untested:
        problem = f"task {', '.join(untested)} has no test split"
        fix = "add queries to test with; none are made of training queries"
        raise ConfigError(problem, where="DIRECTORIES", fix=fix)
    unlearned = [task for task, there in splits.items() if "train" not in there]
    if not is_pretrained and (unlearned or not splits):
        tasks = ", ".join(unlearned) or "no task"
        problem = f"{tasks}: no train split, and nothing is pretrained"
        fix = "add training queries, or --pretrained=minilm"
        raise ConfigError(problem, where="DIRECTORIES", fix=fix)
    there = {split for of_task in splits.values() for split in of_task}
    if "train" in there and "validation" not in there:
        problem = "no task has a validation split to choose checkpoints with"
        fix = "set VALIDATION_SHARE=0.1, which makes one of training queries, in a new OUTPUT_DIR"
        raise ConfigError(problem, where="VALIDATION_SHARE", fix=fix)


def check_judged(tasks: Iterable[str], evaluation: EvaluationConfig, **data: str) -> None:
    """Refuses tasks whose test queries have answers alone where positives judge."""
    for task in tasks:
        queries = QuerySet.open(**data, task=task, split="test")
        by_qrels = evaluation.judge_of(task) is Judge.QRELS
        if by_qrels and not any(query.positives for query in queries):
            judge = "--gin.EvaluationConfig.judge=answers --gin.Setting.hybrid_measure=MRR@10 "
            measures = "\"--gin.EvaluationConfig.measures=['R@20','MRR@10']\""
            fix = f"add judgements, or let answers judge: {judge}{measures}"
            raise ConfigError("no test query has a positive", where=f"task {task!r}", fix=fix)


def multiplies_bfloat16() -> bool:
    """Whether programs run on this processor, which multiplies bfloat16, as Linux says of it."""
    try:
        words = pathlib.Path("/proc/cpuinfo").read_text().split()
    except OSError:
        words = []
    return jax.default_backend() == "cpu" and not _BFLOAT16.isdisjoint(words)


def check_folds(folds: int, *, queries: int) -> None:
    """Refuses folds that leave no queries to train on or to rank."""
    if folds and not 2 <= folds <= queries:
        problem = f"{folds} folds of {queries} distinct training queries"
        raise ConfigError(problem, where="FOLDS", fix="set 0, or 2 to the number of queries")


def with_weights(model: ModelConfig, pretrained: str | None, *, dtype: str) -> ModelConfig:
    """The model with the sizes, pooling and normalisation of the pretrained weights."""
    assert isinstance(model, DualEncoderConfig)
    model = dataclasses.replace(model, bert=filled(model.bert, dtype=dtype))
    if pretrained is None:
        # From random weights the mean over tokens learns faster than [CLS].
        return filled(model, pooling=Pooling.MEAN)
    return filled(
        dataclasses.replace(model, bert=pretrained_bert(pretrained, numerics=model.bert)),
        pooling=pretrained_pooling(pretrained),
        normalization=pretrained_normalization(pretrained),
    )


def with_trained_experts(model: ModelConfig, chosen: compare_plan.Plan) -> ModelConfig:
    """The model with experts in trained blocks alone: one that is frozen is no expert.

    The frozen blocks are then those of the other systems, which share their states.
    """
    assert isinstance(model, DualEncoderConfig)
    blocks = model.transformer.num_layers
    if not chosen.frozen_blocks or model.experts.num_experts == 1:
        return model
    trained = [
        block for block in model.experts.specialized_blocks(blocks) if block > chosen.frozen_blocks
    ]
    experts = filled(model.experts, blocks=tuple(trained or [blocks]))
    return dataclasses.replace(model, experts=experts)


def planned(
    training: TrainingConfig,
    chosen: compare_plan.Plan,
    *,
    num_chunks: int,
    states_dir: str | None,
    is_pretrained: bool,
    validation: int,
) -> TrainingConfig:
    """The training with a plan's batches, rate, steps and frozen blocks.

    Where folds choose the row, the last checkpoint is kept: the few validation queries would choose
    one by chance, often that of the initial weights.

    Args:
        training: all else.
        chosen: the plan.
        num_chunks: chunks of a batch.
        states_dir: where states of frozen blocks are kept.
        is_pretrained: whether the initial weights may be the best.
        validation: validation queries; enough of them end a training that gets no better.
    """
    loop = training.loop
    if not chosen.folds:
        loop = filled(
            loop,
            evaluation_period=max(5, chosen.steps // (VALIDATIONS - 1)),
            patience=_PATIENCE if validation >= compare_plan.ENOUGH_VALIDATION else 0,
            # Pretrained weights stay where no later checkpoint is better.
            validates_first=is_pretrained,
        )
    loop = dataclasses.replace(loop, train_steps=chosen.steps)
    optimizer = dataclasses.replace(
        training.optimizer,
        learning_rate=chosen.learning_rate,
        warmup_steps=training.optimizer.warmup_steps or max(1, chosen.steps // 10),
    )
    return dataclasses.replace(
        training,
        loop=loop,
        batching=dataclasses.replace(training.batching, batch_size=chosen.batch_size),
        optimizer=optimizer,
        num_chunks=max(training.num_chunks, num_chunks),
        train_from_block=chosen.frozen_blocks,
        states_dir=states_dir if chosen.frozen_blocks else None,
    )


def chunks_that_fit(
    model: ModelConfig,
    plan: compare_plan.Plan,
    *,
    sides: Mapping[str, compare_plan.FittedLength],
    gib: float,
) -> int:
    """Chunks of a batch whose activations fit beside the rest of a training.

    A trained block keeps about 8·dim + 3·mlp_dim + 2·heads·length floats of each token.

    Args:
        model: the model.
        plan: its batches, frozen blocks and passages' length.
        sides: lengths of the "query" and "passage" texts.
        gib: what a training may take.
    """
    passage = sides["passage"].cut_to(plan.passage_tokens)
    transformer = model.transformer
    floats = 8 * transformer.embed_dim + 3 * transformer.mlp_dim
    floats += 2 * transformer.num_heads * max(passage.tokens, sides["query"].tokens)
    tokens = plan.batch_size * compare_plan.batch_tokens(sides["query"], passage)
    activations = 4 * floats * tokens * (transformer.num_layers - plan.frozen_blocks) / 2**30
    fewest = min(activations / max(gib - _OTHER_GIB, 0.5), plan.batch_size)
    # All chunks are of the same size.
    divisors = (size for size in range(1, plan.batch_size + 1) if plan.batch_size % size == 0)
    return next(size for size in divisors if size >= fewest)


def measured_training(
    training: TrainingConfig, plan: compare_plan.Plan, num_chunks: int
) -> TrainingConfig:
    """A few steps of a plan, without validation; frozen blocks are computed in every step."""
    few = dataclasses.replace(plan, steps=_MEASURED_STEPS)
    training = planned(
        training, few, num_chunks=num_chunks, states_dir=None, is_pretrained=False, validation=0
    )
    loop = dataclasses.replace(training.loop, evaluation_period=0, checkpoint_period=0)
    return dataclasses.replace(training, loop=loop, validation=None)


@writes("{model_dir}")
def measure(
    *,
    model_dir: str,
    token_store: str,
    model: ModelConfig,
    training: TrainingConfig,
    encode: EncodeConfig,
) -> dict[str, float]:
    """Seconds of a step, of a start, and of encoding the collection, from a few of each.

    Args:
        model_dir: of a model that is deleted again.
        token_store: tokens of the collection.
        model: the model.
        training: its training.
        encode: batches of encoding.
    """
    # What a killed run left would be resumed, with fewer steps to time or none.
    shutil.rmtree(model_dir, ignore_errors=True)
    start = time.monotonic()
    data = TrainingData(token_store)
    summary = train(model_dir=model_dir, data=data, model=model, training=training)
    wall = time.monotonic() - start
    assert summary is not None
    step = 1 / summary.steps_per_second
    loaded, passages = load_model(model_dir), TokenStore.open(token_store).passages
    shutil.rmtree(model_dir)
    rows = np.linspace(0, len(passages) - 1, min(_ENCODED, len(passages))).astype(np.int64)
    for _ in ("compiled", "timed"):
        start = time.monotonic()
        encode_rows(loaded.encode_fn(Role.PASSAGE), passages, rows, config=encode)
    blocks, frozen = model.transformer.num_layers, training.train_from_block
    # Each trained block is passed forwards, again where there are chunks, and twice backwards.
    passes = 3 if training.num_chunks == 1 else 4
    computed = frozen + passes * (blocks - frozen)
    return {
        "step_seconds": step * 3 * blocks / computed,
        "start_seconds": max(0.0, wall - training.loop.train_steps * step),
        "encode_seconds": (time.monotonic() - start) * len(passages) / len(rows),
    }


def collection_name(directories: Sequence[str]) -> str:
    """The folder's name, or those of several, as a name for files."""
    names = [pathlib.Path(directory).resolve().name for directory in directories]
    slug = re.sub(r"\W+", "_", "_".join(names).lower(), flags=re.ASCII)[:190].strip("_")
    return slug if slug[:1].isalpha() else f"c_{slug}"


def file_checksums(directories: Sequence[str], output_dir: str) -> dict[str, str]:
    """File -> its CRC-32, of all files in folders: what tells that they have changed.

    Those of the output directory, which may be in one of the folders, and hidden ones do not count.
    """
    written = pathlib.Path(output_dir).resolve()
    return {
        str(path): crc(path)
        for directory in directories
        for path in sorted(pathlib.Path(directory).rglob("*"))
        if path.is_file()
        and written not in path.resolve().parents
        and "/." not in f"/{path.relative_to(directory)}"
    }


@writes("{data_dir}/{collection}")
def prepare_detected(
    *,
    directories: Sequence[str],
    checksums: Mapping[str, str],
    data_dir: str,
    collection: str,
    validation_share: float = 0.1,
    strict: bool = False,
) -> dict[str, list[str]]:
    """Prepares folders as one collection.

    Args:
        directories: the folders, whose files are detected.
        checksums: of the files; other files are another input.
        data_dir: folder of collections.
        collection: name of the collection.
        validation_share: share of training queries that a task without validation queries holds
            out.
        strict: whether what the files lack is refused.

    Returns:
        Task -> its splits.
    """
    del checksums
    # What a run that ended in between has made of files that are another input by now.
    (collection_directory(data_dir, collection) / "queries").rmtree(missing_ok=True)
    prepare_files(
        data_dir=data_dir,
        collection=collection,
        directories=directories,
        options=PrepareOptions(validation_share=validation_share, strict=strict),
    )
    return list_tasks(data_dir, collection)


def fit_lengths(
    *,
    data_dir: str,
    collection: str,
    vocabulary: str,
    own_length: int | None,
    given: Mapping[str, int],
) -> dict[str, compare_plan.FittedLength]:
    """Lengths of queries and passages, from a sample of the texts.

    Args:
        data_dir: folder of collections.
        collection: the collection.
        vocabulary: directory of the vocabulary; its prompts, as of a sentence-transformers model,
            have room before every text.
        own_length: tokens that the pretrained model takes: texts are cut there and nowhere below;
            None cuts at the 95th percentiles, and at 64 and 256 tokens.
        given: lengths to use instead, {"query": ..., "passage": ...} or one of them.
    """
    words = load_vocabulary(vocabulary)
    prompts = read_prompts(pathlib.Path(vocabulary), words)
    store = PassageStore.open(data_dir, collection)
    texts = [
        queries[row].text
        for task, splits in store.tasks.items()
        for split in splits
        for queries in [store.queries(task, split)]
        for row in _sampled(len(queries))
    ]
    passages = store.get_many(_sampled(len(store)))
    titles, bodies = [passage.title for passage in passages], [passage.text for passage in passages]
    counts = {
        "query": [2 + len(ids) for ids in words.encode(texts)] or [_LONGEST["query"]],
        "passage": [len(ids) for ids in passage_ids(titles, bodies, words, None)],
    }
    return {
        side: compare_plan.fit_length(
            [len(prompt) + length for length in lengths],
            longest=own_length or _LONGEST[side],
            given=given.get(side),
            share=0.95 if own_length is None else 1.0,
        )
        for prompt, (side, lengths) in zip(prompts, counts.items(), strict=True)
    }


def _sampled(count: int) -> list[int]:
    """Rows of a sample, in order."""
    rng = np.random.default_rng(0)
    size = min(count, _SAMPLE)
    return sorted(rng.choice(count, size=size, replace=False).tolist())
