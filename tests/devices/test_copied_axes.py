"""Which axes of parameters a mesh cannot divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.devices.partitioning import CopiedAxis, copied_axes

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


def found(**sizes: int) -> list[CopiedAxis]:
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        SHAPES,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    return copied_axes(make_mesh(MeshConfig(**sizes)), AXES, shapes)


HEADS = CopiedAxis("heads", 12, "model", 8, ("layer/out", "layer/query"))
VOCABULARY = CopiedAxis("vocab", 30522, "model", 8, ("table",))


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"model": 8}, [HEADS, VOCABULARY]),
        ({"model": 4}, [CopiedAxis("vocab", 30522, "model", 4, ("table",))]),
        ({"model": 2, "fsdp": 4}, []),
        ({}, []),
    ],
)
def test_bert_base(sizes, axes):
    assert found(**sizes) == axes


def test_the_message_names_axis_and_parameters():
    told = str(CopiedAxis("heads", 12, "model", 8, ("a", "b", "c")))
    assert told.startswith("heads of 12 cannot be split over model = 8: ")
    assert told.endswith(
        "copies of 3 parameters, and replicates the computation that uses them: a, b and 1 more"
    )
    assert str(HEADS).endswith(": layer/out, layer/query")
