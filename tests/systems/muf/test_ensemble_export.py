"""Exported members: the confidence of a NumPy program beside ours."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taser_jax.systems.muf.confidence import confidence, member_logits
from taser_jax.systems.muf.export import write_members
from taser_jax.systems.muf.members import EnsembleConfig, apply_members, init_members


def load(directory):
    spec = importlib.util.spec_from_file_location("confidence", directory / "confidence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("hidden_dims", [(12, 10), (12,)])
def test_the_numpy_program_has_our_confidence(tmp_path, hidden_dims):
    config = EnsembleConfig(4, hidden_dims)
    params = init_members(jax.random.key(0), dim=6, config=config, members=4)
    write_members(tmp_path, params, temperature=0.05, k=9, tasks=("qa",))
    theirs = load(tmp_path)
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(7, 6)).astype(np.float32)
    passages = rng.normal(size=(7, 9, 6)).astype(np.float32)
    embedded = apply_members(params, queries)
    for temperature in (0.05, 1.0, 1e-3):
        logits = member_logits(embedded, jnp.asarray(passages))
        ours = confidence(logits, jnp.ones((7, 9), bool), temperature=temperature)
        found = [
            theirs.confidence(query, some, temperature)
            for query, some in zip(queries, passages, strict=True)
        ]
        np.testing.assert_allclose(found, ours, atol=1e-5)
    assert theirs.confidence(queries[0], passages[0]) == pytest.approx(
        theirs.confidence(queries[0], passages[0], 0.05)
    )
    assert theirs.confidence(queries[0], passages[0][:0]) == 0.0
    settings = json.loads((tmp_path / "confidence.json").read_text())
    assert settings == {"temperature": 0.05, "k": 9, "tasks": ["qa"]}
    with np.load(tmp_path / "members.npz") as arrays:
        assert arrays["layers_0/kernel"].shape == (4, 6, 12)
