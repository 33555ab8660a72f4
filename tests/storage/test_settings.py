from __future__ import annotations

import json

import pytest

from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.retrieval.index import IndexConfig
from taser_jax.retrieval.scann_shards import ScannConfig, Structure
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.settings import flatten, from_plain, to_plain


def test_every_setting_has_its_path():
    found = flatten(
        evaluation=EvaluationConfig(judge=Judge.ANSWERS), rates={"nq": 2.0}, tasks=("a", "b"), k=3
    )
    assert found == {
        "evaluation.judge": "answers",
        "evaluation.measures": ["R@1", "R@5", "R@20", "MRR@10", "nDCG@10"],
        "evaluation.page_only_tasks": [],
        "evaluation.qrels_tasks": [],
        "evaluation.regex_tasks": [],
        "rates.nq": 2.0,
        "tasks": ["a", "b"],
        "k": 3,
    }


def test_nested_configurations_survive_json():
    found = flatten(index=IndexConfig())
    assert found["index.kind"] == "exact"
    assert found["index.scann.recall_k"] == 100
    assert json.loads(json.dumps(found)) == found


def test_configurations_are_read_back_by_type():
    config = ScannConfig(structure=Structure.TREE, recall_target=1.0)
    assert from_plain(ScannConfig, json.loads(json.dumps(to_plain(config))), "x") == config
    assert to_plain({"a": (Judge.ANSWERS, None), "b": config})["a"] == ["answers", None]
    assert from_plain(ScannConfig, {"recall_target": 1}, "x") == ScannConfig(recall_target=1.0)
    with pytest.raises(ConfigError, match="x, field 'structure': 'shrub'"):
        from_plain(ScannConfig, {"structure": "shrub"}, "x")
