"""The input of every exporter: a trained dual encoder and facts for its model card."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from taser_jax.data.token_store.text_settings import QuerySettings, Titles
from taser_jax.models.dual_encoder import ModelConfig, Params


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A trained dual encoder to export.

    Attributes:
        config: the dual encoder.
        params: its parameters, as arrays on this host.
        vocabulary_dir: the vocabulary it was trained with.
        query_length: tokens per query in training; longer queries were truncated.
        passage_length: tokens per passage, as for queries.
        fingerprint: fingerprint of configuration and parameters.
        facts: the record of its run (run.json): data fingerprints, steps, negatives per query.
        metrics: name -> value, for the model card; may be empty.
        config_text: the Gin configuration it was trained with.
        task: the task whose query encoder to export, if encoders differ by task.
        query_settings: how queries were converted to tokens.
        titles: whether passages were encoded with their titles.
        prompts: task -> ids of its prompt, for the tasks that differ only in their prompts.
    """

    config: ModelConfig
    params: Params
    vocabulary_dir: pathlib.Path
    query_length: int
    passage_length: int
    fingerprint: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    config_text: str = ""
    task: str | None = None
    query_settings: QuerySettings = QuerySettings()
    titles: Titles = Titles.INCLUDE
    prompts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
