"""What every exporter is given: one trained dual encoder and what a reader should know of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from taser_jax.data.token_store.text_settings import QuerySettings, Titles
from taser_jax.models.dual_encoder import ModelConfig

Params = Any


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A trained dual encoder, on its way out.

    Attributes:
        config: the dual encoder.
        params: its parameters, as arrays on this host.
        vocabulary_dir: the vocabulary it was trained with.
        query_length: tokens a query was cut to in training.
        passage_length: tokens a passage was cut to.
        fingerprint: of configuration and parameters.
        facts: what its run recorded (run.json): data fingerprints, steps, negatives per query.
        metrics: name -> value, for the model card; empty where nothing was measured.
        config_text: the Gin configuration it was trained with.
        task: whose query encoder, where encoders differ by task.
        query_settings: how its queries became tokens.
        titles: whether passages were encoded with theirs.
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
