"""The roofline by hand."""

from __future__ import annotations

import pytest

from taser_jax.compilation.chips import CHIPS
from taser_jax.compilation.collectives import Collective, CollectiveKind
from taser_jax.compilation.roofline import Bound, roofline
from taser_jax.compilation.topologies import Topology

V5E = Topology("v5e:4x8", CHIPS["v5e"], (4, 8), 1, ())
MILLISECOND = {"flops": 197e9, "num_bytes": 819e6}


def estimate(*, flops=0.0, num_bytes=0.0, sent=0.0):
    each = Collective(CollectiveKind.COLLECTIVE_PERMUTE, int(sent), 32, 1, "")
    return roofline(
        V5E, flops=flops, model_flops=flops / 2, num_bytes=num_bytes, collectives=[each]
    )


def test_each_resource_at_its_peak():
    # Four links of 50 GB/s.
    found = estimate(**MILLISECOND, sent=200e6)
    assert (found.compute, found.hbm, found.ici) == pytest.approx((1e-3, 1e-3, 1e-3))
    assert found.step_seconds == pytest.approx(1e-3)
    assert found.sequential_seconds == pytest.approx(3e-3)
    assert found.mfu == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({"flops": 394e9}, Bound.COMPUTE),
        ({"num_bytes": 1638e6}, Bound.HBM),
        ({"sent": 500e6}, Bound.ICI),
    ],
)
def test_the_longest_decides(more, bound):
    found = estimate(**(MILLISECOND | more))
    assert found.bound is bound
    assert found.step_seconds == max(found.compute, found.hbm, found.ici)
