import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taser_jax.training.state import parameter_table

PARAMS = {
    "encoder": {
        "wi": jax.ShapeDtypeStruct((768, 3072), np.float32),
        "bias": jax.ShapeDtypeStruct((3,), np.float32),
    }
}
AXES = {"encoder": {"wi": PartitionSpec("embed", "mlp"), "bias": PartitionSpec(None)}}


def shardings():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "model"))
    return {
        "encoder": {
            "wi": NamedSharding(mesh, PartitionSpec("fsdp", "model")),
            "bias": NamedSharding(mesh, PartitionSpec()),
        }
    }


def test_table_by_hand():
    lines = parameter_table(PARAMS, logical_axes=AXES, shardings=shardings()).splitlines()
    assert [line.split() for line in lines] == [
        ["parameter", "shape", "axes", "sharding", "count"],
        ["encoder/bias", "3", "-", "3"],
        ["encoder/wi", "768", "x", "3072", "embed,", "mlp", "fsdp,", "model", "2,359,296"],
        ["total", "2,359,299"],
    ]
    assert len({len(line) for line in lines}) == 1
