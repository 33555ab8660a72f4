"""Topologies by name; links and hosts. libtpu must load: without it these fail, as they should."""

from __future__ import annotations

import importlib.util

import pytest

from taser_jax.compilation.chips import CHIPS
from taser_jax.compilation.topologies import KNOWN_SHAPES, Topology, one_host, open_topology
from taser_jax.errors import ConfigError
from taser_jax.partitioning import MeshConfig, Partitioner, make_mesh


@pytest.mark.parametrize(
    ("name", "num_devices", "num_hosts"),
    [
        ("v4:2x2x4", 16, 4),
        ("v5e:2x4", 8, 2),
        ("v5e:1x1", 1, 1),
        ("v5p:4x4x4", 64, 16),
        ("v6e:4x8", 32, 8),
    ],
)
def test_devices_are_chips(name, num_devices, num_hosts):
    found = open_topology(name)
    assert len(found.devices) == num_devices
    assert len({device.process_index for device in found.devices}) == num_hosts
    assert found.chip.device_kind == found.devices[0].device_kind
    # A mesh of any kind can be laid over them, v4's too, and every host has a share.
    partitioner = Partitioner(make_mesh(MeshConfig(), devices=found.devices))
    shares = {part for host in range(num_hosts) for part in partitioner.share_of(host).parts}
    assert shares == set(range(num_devices))


def test_slices():
    found = open_topology("v5e:2x2", num_slices=2)
    mesh = make_mesh(MeshConfig(replica=2), devices=found.devices)
    slices = [{device.slice_index for device in part.flat} for part in mesh.devices]
    assert slices == [{0}, {1}]


@pytest.mark.parametrize("name", ["v5e:3x5", "v5e:4by4", "v9:2x2", "", None, "v5e"])
def test_unknown_topologies_list_the_known(name):
    with pytest.raises(ConfigError, match="v5e: 1x1, 2x2, 2x4") as error:
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
    ("shape", "chip", "group_size", "links"),
    [
        ((4, 8), "v5e", 32, 4),
        ((2, 4), "v5e", 8, 3),
        ((4, 8), "v5e", 4, 2),
        ((2, 2), "v5e", 2, 1),
        ((4, 4, 4), "v5p", 64, 6),
        ((2, 2, 1), "v4", 4, 2),
        ((1, 1), "v5e", 1, 1),
    ],
)
def test_links_that_a_group_can_use(shape, chip, group_size, links):
    topology = Topology("", CHIPS[chip], shape, 1, ())
    assert topology.links(group_size) == links


@pytest.mark.parametrize(
    ("name", "host"), [("v5e:4x8", "v5e:2x2"), ("v4:2x2x4", "v4:2x2x1"), ("v5e:1x1", "v5e:1x1")]
)
def test_one_of_its_hosts(name, host):
    assert one_host(open_topology(name)).name == host


def test_every_chip_has_shapes():
    assert KNOWN_SHAPES.keys() == CHIPS.keys()
