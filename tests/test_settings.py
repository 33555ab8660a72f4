from __future__ import annotations

import json

from taser_jax.commands.evaluate import EvaluationConfig, Judge
from taser_jax.retrieval.index import IndexConfig
from taser_jax.settings import flatten


def test_every_setting_has_its_path():
    found = flatten(
        evaluation=EvaluationConfig(judge=Judge.ANSWERS), rates={"nq": 2.0}, tasks=("a", "b"), k=3
    )
    assert found == {
        "evaluation.judge": "answers",
        "evaluation.measures": ["R@1", "R@5", "R@20", "MRR@10", "nDCG@10"],
        "evaluation.match": "string",
        "evaluation.page_only_tasks": [],
        "rates.nq": 2.0,
        "tasks": ["a", "b"],
        "k": 3,
    }


def test_nested_configurations_survive_json():
    found = flatten(index=IndexConfig())
    assert found["index.kind"] == "exact"
    assert found["index.scann.recall_k"] == 100
    assert json.loads(json.dumps(found)) == found
