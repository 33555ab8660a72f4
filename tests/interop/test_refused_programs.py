"""What neither a SavedModel nor a StableHLO program can be made of; nothing is written."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from tiny_source import DETERMINISTIC, tiny_source, without

from taser_jax.interop.saved_model import export_saved_model
from taser_jax.interop.stablehlo import export_stablehlo
from taser_jax.models.fusion import BertFusionConfig
from taser_jax.storage.errors import TaserError

KERNEL = "encoder/layers_1/experts/wo/kernel"


def of_halves(source):
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16), source.params)
    return dataclasses.replace(source, params=half)


def with_fusion(source):
    return dataclasses.replace(source, config=BertFusionConfig(bert=source.config.bert))


@pytest.mark.parametrize("export", [export_saved_model, export_stablehlo])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_length": 13}, "query_length is 13, not 1 to 12"),
        ({"passage_length": 0}, "passage_length is 0, not 1 to 12"),
        ({"vocabulary_dir": pathlib.Path("nowhere")}, "nowhere"),
        (lambda source: without(source, KERNEL), f"{KERNEL} is missing"),
        (of_halves, r"float16.*not float32"),
        (with_fusion, "an export has no memory"),
    ],
)
def test_what_is_refused(tmp_path, export, change, message):
    source = tiny_source(tmp_path, experts=DETERMINISTIC)
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    source = change(source) if callable(change) else dataclasses.replace(source, **change)
    with pytest.raises(TaserError, match=message):
        export(source, output_dir)
    assert not list(output_dir.iterdir())


@pytest.mark.parametrize("export", [export_saved_model, export_stablehlo])
def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path, export):
    source = tiny_source(tmp_path, bert={"vocab_size": 20})
    with pytest.raises(TaserError, match=r"has 25 ids(.|\n)* 20"):
        export(source, tmp_path)


def test_texts_of_a_saved_model_need_room_for_special_tokens(tmp_path):
    source = dataclasses.replace(tiny_source(tmp_path), query_length=3)
    with pytest.raises(TaserError, match=r"length 3(.|\n)*4 tokens or more"):
        export_saved_model(source, tmp_path)
