"""`taser vocab` beside other vocabularies."""

from __future__ import annotations

import pytest
from small_world import gin, refused


@pytest.mark.parametrize("name", ["vocab.txt", "config.json", "spiece.model"])
def test_a_vocabulary_of_weights_is_never_replaced(tmp_path, capsys, name):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / name).write_text("precious")
    message = refused(
        capsys,
        "vocab",
        *gin(DATA_DIR=tmp_path, COLLECTION="docs", VOCABULARY=tmp_path / "bert", VOCAB_SIZE=100),
    )
    assert f"here is {name}: a vocabulary of pretrained weights" in message
    assert "go on with `taser tokenize`" in message
    assert [path.read_text() for path in (tmp_path / "bert").iterdir()] == ["precious"]
