"""Topologies by name; links and hosts. libtpu must load: without it these fail, as they should."""

import importlib.util
import math
import types

import jax
import pytest

from taser_jax.devices import mesh
from taser_jax.devices.collectives import DCN, Collective
from taser_jax.devices.mesh import (
    CHIPS,
    MeshConfig,
    Topology,
    make_mesh,
    open_topology,
)
from taser_jax.devices.partitioning import Partitioner
from taser_jax.devices.step_report import roofline
from taser_jax.storage.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "num_devices", "num_hosts"),
    [
        ("v4:2x2x4", 16, 4),
        ("v5e:2x4", 8, 2),
        ("v5e:1x1", 1, 1),
        ("v5p:4x4x4", 64, 16),
        ("v6e:4x8", 32, 8),
        # Two devices on a chip.
        ("tpu7x:2x2x2", 16, 2),
    ],
)
def test_devices_are_chips(name, num_devices, num_hosts):
    topology = open_topology(name)
    assert len(topology.devices) == num_devices
    assert len({device.process_index for device in topology.devices}) == num_hosts
    assert topology.chip.device_kind == topology.devices[0].device_kind
    # A mesh of any kind can be laid over them, v4's too, and every host has a share.
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=topology.devices))
    shares = {part for host in range(num_hosts) for part in partitioner.share_of(host).parts}
    assert shares == set(range(num_devices))


def test_slices():
    topology = open_topology("v5e:2x2", num_slices=2)
    mesh = make_mesh(MeshConfig(replica=2), devices=topology.devices)
    slices = [{device.slice_index for device in part.flat} for part in mesh.devices]
    assert slices == [{0}, {1}]
    assert topology.num_chips == 8


@pytest.mark.parametrize("name", ["v5e:3x5", "v5e:4by4", "v9:2x2", "", None, "v5e"])
def test_unknown_topologies_list_the_known(name):
    with pytest.raises(ConfigError, match="v5e:1x1, v5e:2x2, v5e:2x4") as error:
        open_topology(name)
    assert "v6e" in str(error.value)


def test_the_nearest_name_is_suggested():
    with pytest.raises(ConfigError, match="did you mean v5e:4x4"):
        open_topology("v5:4x4")


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'jax\[tpu\]=="):
        open_topology("v5e:2x2")


@pytest.mark.parametrize(
    ("chip", "shape", "links"),
    [
        # Rings of 16 on v5e and v6e, in cubes of 4x4x4 on v4 and v5p, and nowhere else.
        ("v5e", (16, 16), 4),
        ("v6e", (8, 16), 3),
        ("v5e", (4, 8), 2),
        ("v6e", (4, 8), 2),
        ("v5e", (2, 4), 2),
        ("v5e", (1, 1), 1),
        ("v5p", (4, 4, 4), 6),
        ("v4", (4, 4, 8), 6),
        ("v4", (2, 4, 4), 3),
        ("v4", (2, 2, 4), 3),
        ("v4", (2, 2, 1), 2),
        ("tpu7x", (2, 2, 2), 3),
    ],
)
def test_links_of_a_whole_slice(chip, shape, links):
    num_devices = math.prod(shape) * (2 if chip == "tpu7x" else 1)
    topology = Topology("", CHIPS[chip], shape, range(2 * num_devices), num_slices=2)
    assert topology.links(num_devices) == links


def test_a_part_of_a_slice_has_one_link():
    assert V5E.links(16) == 1
    # Eight of its sixteen devices: TPU7x has two on a chip.
    assert Topology("", CHIPS["tpu7x"], (2, 2, 2), range(16)).links(8) == 1


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        # Fewer and slower cores than those of the SXM modules.
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_the_card(monkeypatch, kind, peak):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert mesh.peak_flops() == (peak and 4 * peak)


V5E = Topology("v5e:16x16", CHIPS["v5e"], (16, 16), range(256))
MILLISECOND = {"flops": 197e9, "num_bytes": 819e6}


def estimate(*, flops=0.0, num_bytes=0.0, sent=0.0):
    collectives = [Collective("collective-permute", int(sent), 256, 1)]
    return roofline(
        V5E, flops=flops, model_flops=flops / 2, num_bytes=num_bytes, collectives=collectives
    )


def test_each_resource_at_its_peak():
    # Four links of 50 GB/s.
    times = estimate(**MILLISECOND, sent=200e6)
    assert (times.compute, times.hbm, times.ici) == pytest.approx((1e-3, 1e-3, 1e-3))
    assert times.step_seconds == pytest.approx(1e-3)
    assert times.sequential_seconds == pytest.approx(3e-3)
    assert times.mfu == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("more", "bound"),
    [({"flops": 394e9}, "compute"), ({"num_bytes": 1638e6}, "HBM"), ({"sent": 500e6}, "ICI")],
)
def test_the_longest_decides(more, bound):
    times = estimate(**(MILLISECOND | more))
    assert times.bound == bound
    assert times.step_seconds == max(times.compute, times.hbm, times.ici)


@pytest.mark.parametrize(("group_size", "seconds"), [(256, 0.5e-3), (16, 2e-3)])
def test_a_group_smaller_than_the_slice_has_one_link(group_size, seconds):
    each = Collective("collective-permute", 10**8, group_size, 1)
    times = roofline(V5E, flops=1.0, model_flops=1.0, num_bytes=1.0, collectives=[each])
    assert times.ici == pytest.approx(seconds)


def test_slices_share_the_networks_bandwidth_of_their_hosts():
    each = Collective("collective-permute", 3125 * 10**3, 2, 1, DCN)
    crossing = roofline(V5E, flops=1.0, model_flops=1.0, num_bytes=1.0, collectives=[each])
    assert (crossing.dcn, crossing.ici) == pytest.approx((1e-3, 0.0))
    assert crossing.bound == "DCN"
