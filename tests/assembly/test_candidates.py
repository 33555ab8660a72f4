"""Which meshes there are for a step, and what formulas say of them."""

from __future__ import annotations

import dataclasses

import pytest

from taser_jax.assembly.candidates import Candidate, best_first, candidates, estimate
from taser_jax.devices.topologies import CHIPS, Topology
from taser_jax.models.batch import BatchShape
from taser_jax.models.bert import BertConfig
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.models.layers import Remat

BASE = DualEncoderConfig(bert=BertConfig(dtype="bfloat16"))
SHAPE = BatchShape(queries=256, query_length=256, passages=512, passage_length=256)
# Of TASER base, by its dry run.
PARAMETERS = 127_787_520
PLAIN = Candidate(fsdp=1, model=1, remat=Remat.NONE, num_chunks=1)


def torus(*shape: int, chip: str = "v5e") -> Topology:
    """Chips without libtpu; formulas read their number alone."""
    number = 1
    for size in shape:
        number *= size
    return Topology("test", CHIPS[chip], shape, 1, [None] * number)  # type: ignore[list-item]


def judge(candidate: Candidate, *shape: int, batch: BatchShape = SHAPE, chip: str = "v5e"):
    return estimate(
        candidate, torus(*shape, chip=chip), config=BASE, shapes=[batch], param_bytes=4 * PARAMETERS
    )


def test_candidates_divide_devices_heads_and_batch():
    found = list(candidates(8, shapes=[dataclasses.replace(SHAPE, queries=24)], num_heads=12))
    # 8 does not divide 12 heads.
    assert {(each.fsdp, each.model) for each in found} == {
        *((1, 1), (2, 1), (4, 1), (8, 1)),
        *((1, 2), (2, 2), (4, 2)),
        *((1, 4), (2, 4)),
    }
    # 24 queries over 8, 4 and 2 parts: 3, 6 and 12 a part.
    chunks = {model: set() for model in (1, 2, 4)}
    for each in found:
        chunks[each.model].add(each.num_chunks)
    assert chunks == {1: {1}, 2: {1, 2}, 4: {1, 2, 4}}


def test_a_batch_that_no_mesh_divides_has_no_candidate():
    shape = dataclasses.replace(SHAPE, queries=5)
    assert {each.model for each in candidates(8, shapes=[shape], num_heads=12)} == set()


def test_compute_is_the_models_flops_and_a_third_for_each_further_pass():
    plain = judge(PLAIN, 2, 4)
    # 62.4 ms in docs/measurements.md, of which a little is the loss in float32.
    assert plain.roofline.compute == pytest.approx(62.4e-3, rel=0.01)
    again = judge(dataclasses.replace(PLAIN, remat=Remat.BLOCK, num_chunks=4), 2, 4)
    assert again.roofline.compute == pytest.approx(plain.roofline.compute * 5 / 3)


@pytest.mark.parametrize(
    ("shape", "queries", "chunks", "peak", "hbm"),
    # Rows of docs/measurements.md: GiB per device and ms, by the compiler.
    [((2, 4), 256, 1, 10.11, 92.1), ((4, 8), 256, 1, 3.87, 29.8), ((4, 8), 4096, 4, 8.73, 560.5)],
)
def test_formulas_are_near_the_compilers_figures(shape, queries, chunks, peak, hbm):
    batch = dataclasses.replace(SHAPE, queries=queries, passages=2 * queries)
    found = judge(dataclasses.replace(PLAIN, num_chunks=chunks), *shape, batch=batch)
    assert found.peak / 2**30 == pytest.approx(peak, rel=0.25)
    assert 1e3 * found.roofline.hbm == pytest.approx(hbm, rel=0.1)


def test_fsdp_and_model_split_the_state_and_cost_links():
    plain, fsdp = judge(PLAIN, 2, 4), judge(dataclasses.replace(PLAIN, fsdp=8), 2, 4)
    assert plain.peak - fsdp.peak == pytest.approx(4 * 4 * PARAMETERS * 7 / 8, rel=1e-6)
    # Gathered in the forward and in the backward pass: as much again as the gradients.
    assert fsdp.roofline.ici == pytest.approx(2 * plain.roofline.ici)
    # Gradients alone: 2 * 7/8 * 4 bytes over two open axes of 50 GB/s.
    assert plain.roofline.ici == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS / (2 * 50e9))


def test_what_does_not_fit_is_left_out_and_the_shortest_step_comes_first():
    large = dataclasses.replace(SHAPE, queries=4096, passages=8192)
    found = [judge(each, 2, 4, batch=large) for each in candidates(8, shapes=[large], num_heads=12)]
    ranked = best_first(found)
    assert PLAIN not in [each.candidate for each in ranked]
    assert all(each.peak <= 0.9 * 16 * 2**30 for each in ranked)
    seconds = [each.roofline.step_seconds for each in ranked]
    assert seconds == sorted(seconds)
