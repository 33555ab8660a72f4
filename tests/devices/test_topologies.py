"""Topologies by name; links and hosts. libtpu must load: without it these fail, as they should."""

import functools
import math
import sys
import types

import jax
import numpy as np
import pytest

from taser_jax.devices import mesh
from taser_jax.devices.collectives import DCN, Collective
from taser_jax.devices.mesh import CHIPS, MeshConfig, Topology, make_mesh, open_topology
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


@pytest.mark.parametrize(
    ("config", "slices"),
    [
        (MeshConfig(replica=2), [{0}, {1}]),
        (MeshConfig(replica=4, fsdp=4), [{0}, {0}, {1}, {1}]),
        (MeshConfig(replica=2, fsdp=4, model=2), [{0}, {1}]),
    ],
)
def test_replicas_are_slices(config, slices):
    topology = open_topology("v5e:4x4", num_slices=2)
    assert topology.num_chips == 32
    grid = make_mesh(config, devices=topology.devices).devices
    assert grid.shape == config.shape(32)
    assert len(set(grid.flat)) == 32
    assert [{device.slice_index for device in part.flat} for part in grid] == slices


def test_slices_that_the_axis_cannot_span():
    message = r"1 devices along replica, which must span 2 slices\n.*a multiple of 2"
    with pytest.raises(ConfigError, match=message):
        make_mesh(MeshConfig(), devices=open_topology("v5e:2x2", num_slices=2).devices)


def test_other_devices_slices_are_no_slices():
    """JAX numbers a GPU machine's hosts as slices."""
    gpu = functools.partial(types.SimpleNamespace, platform="gpu", device_kind="H100")
    gpus = [gpu(id=number, slice_index=number // 8) for number in range(16)]
    assert mesh.device_grid(MeshConfig(), gpus).shape == (1, 16, 1, 1)


@pytest.mark.parametrize(
    "config",
    [MeshConfig(), MeshConfig(fsdp=-1, data=1), MeshConfig(fsdp=4), MeshConfig(model=4),
     MeshConfig(data=2, fsdp=2, model=4), MeshConfig(model=2), MeshConfig(model=8)],
)  # fmt: skip
def test_hosts_of_a_pod_hold_the_whole_batch(config):
    """A host's chips are neighbours on the torus, and seldom neighbours in the mesh."""
    partitioner = Partitioner(make_mesh(config, devices=open_topology("v5e:4x4").devices))
    shares = [partitioner.share_of(host) for host in range(4)]
    assert {share.count for share in shares} == {partitioner.batch_devices}
    held = np.concatenate([share.rows(32) for share in shares])
    assert set(held.tolist()) == set(range(32))
    # Twice only where a part's devices belong to two hosts.
    parts = partitioner.mesh.devices.reshape(partitioner.batch_devices, -1)
    hosts = [{device.process_index for device in part} for part in parts]
    for host, share in enumerate(shares):
        assert share.parts == tuple(part for part in range(len(parts)) if host in hosts[part])


@pytest.mark.parametrize("name", ["v5e:3x5", "v5e:4by4", "v9:2x2", "", None, "v5e"])
def test_unknown_topologies_list_the_known(name):
    with pytest.raises(ConfigError, match="v5e:1x1, v5e:2x2, v5e:2x4") as error:
        open_topology(name)
    assert "v6e" in str(error.value)


def test_the_nearest_name_is_suggested():
    with pytest.raises(ConfigError, match="did you mean v5e:4x4"):
        open_topology("v5:4x4")


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match=r"pip install 'jax\[tpu\]=="):
        open_topology("v5e:2x2")


@pytest.mark.parametrize(
    ("chip", "shape", "links"),
    [
        # Rings of 16 on v5e and v6e, in cubes of 4x4x4 on v4 and v5p, and nowhere else.
        ("v5e", (16, 16), 4),
        ("v6e", (8, 16), 3),
        ("v5e", (4, 8), 2),
        ("v5e", (1, 1), 1),
        ("v5p", (4, 4, 4), 6),
        ("v4", (4, 4, 8), 6),
        ("v4", (2, 4, 4), 3),
        ("v4", (2, 2, 1), 2),
        ("tpu7x", (2, 2, 2), 3),
    ],
)
def test_links_of_a_whole_slice(chip, shape, links):
    num_devices = math.prod(shape) * (2 if chip == "tpu7x" else 1)
    topology = Topology("", CHIPS[chip], shape, range(2 * num_devices), num_slices=2)
    assert topology.links(num_devices) == links


def test_a_part_of_a_slice_has_one_link():
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


def estimate(*, flops=0.0, num_bytes=0.0, sent=0, group_size=256, network="ICI"):
    sends = Collective("collective-permute", sent, group_size, 1, network)
    return roofline(
        V5E, flops=flops, model_flops=flops / 2, num_bytes=num_bytes, collectives=[sends]
    )


def test_each_resource_at_its_peak():
    # Four links of 50 GB/s.
    times = estimate(**MILLISECOND, sent=200_000_000)
    assert (times.compute, times.hbm, times.ici) == pytest.approx((1e-3, 1e-3, 1e-3))
    assert times.step_seconds == pytest.approx(1e-3)
    assert times.sequential_seconds == pytest.approx(3e-3)
    assert times.mfu == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("more", "bound"),
    [({"flops": 394e9}, "compute"), ({"num_bytes": 1638e6}, "HBM"), ({"sent": 500_000_000}, "ICI")],
)
def test_the_longest_decides(more, bound):
    times = estimate(**(MILLISECOND | more))
    assert times.bound == bound
    assert times.step_seconds == max(times.compute, times.hbm, times.ici)


@pytest.mark.parametrize(("group_size", "seconds"), [(256, 0.5e-3), (16, 2e-3)])
def test_a_group_smaller_than_the_slice_has_one_link(group_size, seconds):
    assert estimate(sent=10**8, group_size=group_size).ici == pytest.approx(seconds)


def test_slices_share_the_networks_bandwidth_of_their_hosts():
    crossing = estimate(sent=3125 * 10**3, group_size=2, network=DCN)
    assert (crossing.dcn, crossing.ici) == pytest.approx((1e-3, 0.0))
    assert crossing.bound == "DCN"
