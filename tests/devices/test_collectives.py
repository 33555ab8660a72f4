"""Collectives of HLO texts written by hand in the ways XLA writes them.

tests/training/test_meshes.py and test_compiler.py read those of real modules.
"""

import pytest

from taser_jax.devices.collectives import DCN, Collective, read_collectives


def computation(name: str, *lines: str) -> str:
    inner = "".join(f"  {line}\n" for line in lines)
    return f"{name} (p: f32[8]) -> f32[8] {{\n{inner}}}\n"


def entry(*lines: str) -> str:
    return "HloModule m\n\n" + computation("ENTRY %main", *lines)


GATHER = "f32[8]{0} all-gather"


@pytest.mark.parametrize(
    ("call", "groups", "num_bytes", "group_size"),
    [
        ("f32[8,4]{1,0:T(8,128)S(1)} all-reduce", "replica_groups={{0,1},{2,3}}", 128, 2),
        (
            "(f32[8]{0}, bf16[4,2]{1,0}, /*index=2*/f32[]) all-reduce",
            *("replica_groups=[1,8]<=[8], to_apply=%add", 32 + 16 + 4, 8),
        ),
        (
            "bf16[32,1,128]{2,0,1:T(8,128)(2,1)} all-gather",
            *("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 32 * 128 * 2, 4),
        ),
        ("f32[8]{0} reduce-scatter", "replica_groups=[2,4]<=[8]", 8 * 4 * 4, 4),
        (
            "(bf16[16]{0}, bf16[16]{0}, u32[], u32[]) collective-permute-start",
            *("source_target_pairs={{0,1},{1,0}}", 32, 2),
        ),
        ("s8[64]{0} all-to-all", "replica_groups={}", 64, 8),
        (
            "((f32[8]{0:T(128)S(1)}, f32[16]{0}), (f32[32]{0}, /*index=1*/f32[64]{0})) "
            "all-gather-start",
            *("replica_groups={{0,1,2,3},{4,5,6,7}}", 4 * (32 + 64), 4),
        ),
        (
            "((f32[32]{0}, f32[64]{0}), (f32[8]{0}, f32[16]{0}), u32[]) reduce-scatter-start",
            *("replica_groups=[2,4]<=[8]", 4 * (32 + 64), 4),
        ),
        (GATHER, "replica_groups=[4,2]<=[2,4]T(1,0)", 32, 2),
        (GATHER, "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 32, 8),
        # One factor of eight devices.
        (GATHER, "replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 32, 4),
    ],
)
def test_one_instruction(call, groups, num_bytes, group_size):
    line = f"%r = {call}(%p), channel_id=1, {groups}"
    kind = call.rpartition(" ")[2].removesuffix("-start")
    expected = Collective(kind, num_bytes, group_size, times=1)
    assert read_collectives(entry(line), num_devices=8) == [expected]


def test_between_slices_hosts_carry_it():
    transfer = (
        '_xla_host_transfer_rendezvous="all-reduce_0",_xla_megascale_target="{1,2}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    attributes = f"is_host_transfer=true, frontend_attributes={{{transfer}"
    text = entry(
        f"%r = (f32[4,8]{{1,0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}",
        f"%s = (f32[4,8]{{1,0}}, u32[], token[]) send(%p, %t), channel_id=2, {attributes}",
    )
    (crossing,) = read_collectives(text, num_devices=8, num_slices=2)
    assert (crossing.kind, crossing.network) == ("all-reduce", DCN)
    assert (crossing.num_bytes, crossing.group_size, crossing.times) == (128, 2, 1)


def test_one_device_alone_sends_nothing():
    line = "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0},{1}}"
    assert read_collectives(entry(line), num_devices=2) == []


def test_pieces_under_one_channel_are_one_collective_of_each_kind_and_size():
    calls = [GATHER, GATHER, GATHER, "f32[8]{0} all-reduce", "f32[16]{0} all-gather"]
    lines = [
        f"%g.{channel} = {call}(%p), channel_id={channel}, replica_groups=[1,4]<=[4]"
        for call, channel in zip(calls, (7, 7, 8, 7, 7), strict=True)
    ]
    collectives = read_collectives(entry(*lines), num_devices=4)
    assert [(each.kind, each.num_bytes) for each in collectives] == [
        *(("all-gather", 32), ("all-gather", 32), ("all-reduce", 32), ("all-gather", 64))
    ]


REDUCE = "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[1,4]<=[4]"


def loop(body: str, rounds: int) -> str:
    trip_count = f'backend_config={{"known_trip_count":{{"n":"{rounds}"}}}}'
    return f"%w.{body} = f32[8]{{0}} while(%p), condition=%c, body=%{body}, {trip_count}"


NESTED = [
    computation("%inner", REDUCE),
    computation("%outer", loop("inner", 3)),
    computation("ENTRY %main", loop("outer", 5)),
]
# Once by an asynchronous call, whose later half names it again, and five times in a loop.
CALLED_TWICE = [
    computation("%twice", REDUCE),
    computation("%fused", "%f = f32[8]{0} fusion(%p), kind=kLoop, calls=%twice"),
    computation(
        "ENTRY %main",
        "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%twice",
        "%d = f32[8]{0} async-done(%s), calls=%twice",
        loop("fused", 5),
    ),
]
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
    ("text", "times"),
    [
        ("\n".join(NESTED), 3 * 5),
        ("\n".join(CALLED_TWICE), 1 + 5),
        (SCAN, 7),
        # What is not understood counts once.
        (SCAN.replace("constant(7)", "parameter(1)"), 1),
        (SCAN.replace("direction=LT", "direction=NE"), 1),
    ],
)
def test_loops_and_calls_multiply(text, times):
    (collective,) = read_collectives(text, num_devices=4)
    assert collective.times == times


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
    assert Collective(kind, num_bytes=800, group_size=4, times=2).link_bytes == 2 * sent
