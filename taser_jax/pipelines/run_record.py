"""What a training run leaves beside its checkpoints, for people and for later commands."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from taser_jax.data.batching import BatchingConfig, BatchStream
from taser_jax.data.token_store import TokenStore
from taser_jax.models import config_io
from taser_jax.models.build import ModelConfig
from taser_jax.pipelines.models import MODEL_FILE, RUN_FILE, VOCABULARY


def data_facts(stream: BatchStream, store: TokenStore) -> dict[str, Any]:
    """What the data of a run was."""
    return {
        "batches_per_epoch": stream.batches_per_epoch,
        "data_fingerprint": stream.fingerprint,
        "collection": store.metadata.collection,
        "collection_fingerprint": store.metadata.collection_fingerprint,
    }


def batch_facts(batching: BatchingConfig) -> dict[str, Any]:
    """How many negatives a query sees, and from how many devices."""
    passages = 1 + batching.num_negatives
    return {
        "negatives_per_query": (
            f"{batching.batch_size * passages - 1} = "
            f"{batching.batch_size} queries x {passages} passages - 1, "
            f"over {jax.device_count()} devices on {jax.process_count()} hosts"
        ),
        "false_negatives": batching.false_negatives.value,
    }


def write_run_record(
    model_dir: pathlib.Path,
    *,
    model_config: ModelConfig,
    facts: Mapping[str, Any],
    parameter_table: str,
    config_text: str,
    vocabulary: pathlib.Path | None,
) -> None:
    """Writes model.json, config.gin, model-info.txt, run.json and the vocabulary.

    Args:
        model_dir: made where absent.
        model_config: the model.
        facts: of the run; JSON-able.
        parameter_table: every parameter with shape, axes and sharding.
        config_text: the Gin configuration as it was resolved.
        vocabulary: directory of the vocabulary, copied; None where it is there already.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / MODEL_FILE).write_text(config_io.to_json(model_config), encoding="utf-8")
    (model_dir / "config.gin").write_text(config_text, encoding="utf-8")
    (model_dir / "model-info.txt").write_text(parameter_table + "\n", encoding="utf-8")
    (model_dir / RUN_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if vocabulary is not None:
        shutil.copytree(vocabulary, model_dir / VOCABULARY, dirs_exist_ok=True)
