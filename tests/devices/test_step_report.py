"""The roofline by hand."""

from __future__ import annotations

import pytest

from taser_jax.devices.collectives import DCN, Collective
from taser_jax.devices.step_report import roofline
from taser_jax.devices.topologies import CHIPS, Topology

V5E = Topology("v5e:16x16", CHIPS["v5e"], (16, 16), ())
MILLISECOND = {"flops": 197e9, "num_bytes": 819e6}


def estimate(*, flops=0.0, num_bytes=0.0, sent=0.0):
    collectives = [Collective("collective-permute", int(sent), 256, 1, "")]
    return roofline(
        V5E, flops=flops, model_flops=flops / 2, num_bytes=num_bytes, collectives=collectives
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
    [({"flops": 394e9}, "compute"), ({"num_bytes": 1638e6}, "HBM"), ({"sent": 500e6}, "ICI")],
)
def test_the_longest_decides(more, bound):
    found = estimate(**(MILLISECOND | more))
    assert found.bound == bound
    assert found.step_seconds == max(found.compute, found.hbm, found.ici)


@pytest.mark.parametrize(("group_size", "seconds"), [(256, 0.5e-3), (16, 2e-3)])
def test_a_group_smaller_than_the_slice_has_one_link(group_size, seconds):
    each = Collective("collective-permute", 10**8, group_size, 1, "")
    found = roofline(V5E, flops=1.0, model_flops=1.0, num_bytes=1.0, collectives=[each])
    assert found.ici == pytest.approx(seconds)


def test_slices_share_the_networks_bandwidth_of_their_hosts():
    each = Collective("collective-permute", 3125 * 10**3, 2, 1, "", DCN)
    crossing = roofline(V5E, flops=1.0, model_flops=1.0, num_bytes=1.0, collectives=[each])
    assert (crossing.dcn, crossing.ici) == pytest.approx((1e-3, 0.0))
    assert crossing.bound == "DCN"
