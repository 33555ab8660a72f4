"""Collectives of HLO texts written by hand in the ways XLA writes them, and of a real module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from taser_jax.devices.collectives import DCN, Collective, read_collectives
from taser_jax.devices.mesh import MeshConfig, make_mesh


def entry(*lines: str) -> str:
    return "\n".join(["HloModule m", "", "ENTRY %main (p: f32[8]) -> f32[8] {", *lines, "}"])


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes", "group_size"),
    [
        (
            "  %r = f32[8,4]{1,0:T(8,128)S(1)} all-reduce(%p), channel_id=1, "
            "replica_groups={{0,1},{2,3}}, to_apply=%add",
            "all-reduce",
            128,
            2,
        ),
        (
            "  %r = (f32[8]{0}, bf16[4,2]{1,0}, /*index=2*/f32[]) all-reduce(%p, %q, %s), "
            "channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add",
            "all-reduce",
            32 + 16 + 4,
            8,
        ),
        (
            "  %g = bf16[32,1,128]{2,0,1:T(8,128)(2,1)} all-gather(%p), channel_id=9, "
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}",
            "all-gather",
            32 * 128 * 2,
            4,
        ),
        (
            "  %s = f32[8]{0} reduce-scatter(%p), channel_id=2, replica_groups=[2,4]<=[8], "
            "to_apply=%add",
            "reduce-scatter",
            8 * 4 * 4,
            4,
        ),
        (
            "  %x = (bf16[16]{0}, bf16[16]{0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            32,
            2,
        ),
        ("  %a = s8[64]{0} all-to-all(%p), channel_id=3, replica_groups={}", "all-to-all", 64, 8),
        (
            "  %g = ((f32[8]{0:T(128)S(1)}, f32[16]{0}), (f32[32]{0}, /*index=1*/f32[64]{0})) "
            "all-gather-start(%p, %q), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}",
            "all-gather",
            4 * (32 + 64),
            4,
        ),
        (
            "  %s = ((f32[32]{0}, f32[64]{0}), (f32[8]{0}, f32[16]{0}), u32[]) "
            "reduce-scatter-start(%p, %q), channel_id=4, replica_groups=[2,4]<=[8]",
            "reduce-scatter",
            4 * (32 + 64),
            4,
        ),
    ],
)
def test_one_instruction(line, kind, num_bytes, group_size):
    (found,) = read_collectives(entry(line), num_devices=8)
    assert (found.kind, found.num_bytes, found.group_size, found.times) == (
        *(kind, num_bytes, group_size),
        1,
    )


def test_between_slices_hosts_carry_it():
    transfer = (
        '_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_target="{1,2}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = entry(
        "  %r = (f32[4,8]{1,0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, "
        "frontend_attributes={" + transfer,
        "  %s = (f32[4,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, "
        "is_host_transfer=true, frontend_attributes={" + transfer,
    )
    (crossing,) = read_collectives(text, num_devices=8, num_slices=2)
    assert (crossing.kind, crossing.network) == ("all-reduce", DCN)
    assert (crossing.num_bytes, crossing.group_size, crossing.times) == (128, 2, 1)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
        # One factor of eight devices.
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
        ("replica_groups={}", 8),
        ("source_target_pairs={{0,4},{4,0}}", 2),
    ],
)
def test_devices_of_a_group(groups, size):
    line = f"  %g = f32[8]{{0}} all-gather(%p), channel_id=1, {groups}, dimensions={{0}}"
    (found,) = read_collectives(entry(line), num_devices=8)
    assert found.group_size == size


def test_where_it_comes_from():
    line = '  %r = f32[8] all-reduce(%p), replica_groups={}, metadata={op_name="jit(f)/add" id=1}'
    assert read_collectives(entry(line), num_devices=2)[0].operation == "jit(f)/add"


def test_one_device_alone_sends_nothing():
    line = "  %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0},{1}}"
    assert read_collectives(entry(line), num_devices=2) == []


def test_pieces_under_one_channel_are_one_collective():
    line = "  %g.{} = bf16[8]{{0}} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4]"
    text = entry(line.format(1), line.format(2), line.format(3).replace("_id=7", "_id=8"))
    assert len(read_collectives(text, num_devices=4)) == 2


LOOPS = """
%inner (p: f32[8]) -> f32[8] {
  %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4]
}

%outer (p: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%p), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%unknown (p: f32[8]) -> f32[8] {
  %r2 = f32[8]{0} all-gather(%p), channel_id=2, replica_groups=[1,4]<=[4]
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w1 = f32[8] while(%p), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %w2 = f32[8]{0} while(%p), condition=%c, body=%unknown
}
"""


def test_one_channel_may_carry_several_kinds():
    text = entry(
        "  %a = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}",
        "  %g = f32[8]{0} all-gather(%p), channel_id=1, replica_groups={{0,1}}",
        "  %h = f32[16]{0} all-gather(%q), channel_id=1, replica_groups={{0,1}}",
    )
    assert [each.num_bytes for each in read_collectives(text, num_devices=2)] == [32, 32, 64]


def test_loops_multiply():
    times = {each.kind: each.times for each in read_collectives(LOOPS, num_devices=4)}
    assert times == {"all-reduce": 15, "all-gather": 1}


# As the TPU compiler writes a scan: nothing beside the loop says how often it goes round.
SCAN = """
%body (b: (f32[8], s32[])) -> (f32[8], s32[]) {
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4]
}

%condition (c: (f32[8], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=1
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (f32[8]{0}, s32[]{:T(128)}) while(%all), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
    ("old", "new", "times"),
    [
        ("", "", 7),
        # What is not understood counts once.
        ("constant(7)", "parameter(1)", 1),
        ("direction=LT", "direction=NE", 1),
    ],
)
def test_the_length_of_a_loop_is_its_counters_limit(old, new, times):
    assert read_collectives(SCAN.replace(old, new), num_devices=4)[0].times == times


def test_a_computation_that_is_called_twice_counts_twice():
    text = """
%twice (p: f32[8]) -> f32[8] {
  %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4]
}

%loop (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%twice
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%twice
  %d = f32[8]{0} async-done(%s), calls=%twice
  %w = f32[8] while(%d), condition=%c, body=%loop, backend_config={"known_trip_count":{"n":"5"}}
}
"""
    (found,) = read_collectives(text, num_devices=4)
    assert found.times == 1 + 5


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        # 800 bytes on 4 devices: three quarters leave each device, twice in an all-reduce.
        ("all-reduce", 1200),
        ("all-gather", 600),
        ("reduce-scatter", 600),
        ("all-to-all", 600),
        ("collective-permute", 800),
    ],
)
def test_bytes_that_leave_a_device(kind, sent):
    each = Collective(kind=kind, num_bytes=800, group_size=4, times=2, operation="")
    assert each.link_bytes == 2 * sent


def test_a_module_of_this_jax():
    """A sum over a sharded axis is one all-reduce of its result, on each of five rounds."""
    mesh = make_mesh(MeshConfig())
    split = NamedSharding(mesh, PartitionSpec(("data",)))

    def body(total, _):
        return total + (x_of(total) ** 2).sum(0), None

    def x_of(total):
        return jax.lax.with_sharding_constraint(jnp.outer(jnp.arange(8.0), total), split)

    step = jax.jit(lambda start: jax.lax.scan(body, start, length=5)[0])
    hlo = step.lower(jnp.ones(16)).compile().as_text()
    reduced = [each for each in read_collectives(hlo, num_devices=8) if each.kind == "all-reduce"]
    assert [(each.num_bytes, each.group_size, each.times) for each in reduced] == [(64, 8, 5)]
