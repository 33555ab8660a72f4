"""Which axes of parameters a mesh cannot divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import copied_axes

SHAPES = {
    "table": (30522, 768),
    "layer": {"wi": (768, 3072), "query": (768, 12, 64), "out": (12, 64, 768), "scale": (768,)},
}
AXES = {
    "table": P("vocab", "embed"),
    "layer": {
        "wi": P("embed", "mlp"),
        "query": P("embed", "heads", "kv"),
        "out": P("heads", "kv", "embed"),
        "scale": P(None),
    },
}


def copied(**sizes: int) -> list[str]:
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        SHAPES,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    return copied_axes(make_mesh(MeshConfig(**sizes)), AXES, shapes)


HEADS = (
    "heads of 12 cannot be split over model = 8: each of these devices has whole copies of 2 "
    "parameters, and replicates the computation that uses them: layer/out first"
)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"model": 8}, [HEADS, "vocab of 30,522 cannot be split over model = 8"]),
        ({"model": 4}, ["vocab of 30,522 cannot be split over model = 4"]),
        ({"model": 2, "fsdp": 4}, []),
        ({}, []),
    ],
)
def test_bert_base(sizes, axes):
    messages = copied(**sizes)
    assert len(messages) == len(axes)
    for message, words in zip(messages, axes, strict=True):
        assert message.startswith(words)
