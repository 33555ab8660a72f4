"""The documents behind a query, as `taser search` and `taser ask` write them."""

import json

import numpy as np
import pytest
import tiny_training

from taser_jax.data.collections.store import write_collection
from taser_jax.storage.errors import DataError, FingerprintError
from taser_jax.storage.records import Passage
from taser_jax.systems.moma.answers import fused_documents, write_documents
from taser_jax.systems.moma.memories import Lookup, Manifest, Memory, Mixture
from taser_jax.systems.moma.query_documents import read_fused, write_fused


@pytest.fixture
def mixture(tmp_path):
    """Two memories, of which the second has the first's 48 texts and 12 of its own."""
    memories = []
    for name, passages in (("source", 48), ("more", 60)):
        store = tiny_training.write_token_store(tmp_path / name, num_passages=passages)
        prints = store.metadata.passages_fingerprint
        memories.append(Memory(name, str(tmp_path / name), "tiny", prints, passages))
    texts = [Passage(id=f"p{i}", text=f"text {i}", title="title") for i in range(60)]
    write_collection(tmp_path / "data", "tiny", texts)
    return Mixture(Manifest({"model": "m"}, tuple(memories), str(tmp_path / "parts")))


def test_documents_are_named_and_ordered_by_attention(mixture, tmp_path):
    rows = np.array([[3, 50, 7, 9], [55, -1, -1, -1]], np.int32)
    lookup = Lookup(["a", "b"], rows, np.array([[4, 3, 2, 1], [5, 0, 0, 0]], np.float32))
    # Three of the four are fused; the first column is the query's own tokens.
    attention = np.array([[9.0, 0.1, 0.3, 0.1], [9.0, 0.2, 0.0, 0.0]], np.float32)
    write_fused(tmp_path, lookup, attention, fingerprints=mixture.fingerprints)
    fused = read_fused(tmp_path, mixture)
    found = fused_documents(mixture, *fused, data_dir=str(tmp_path / "data"))
    first = [(one.memory, one.passage.id, one.score) for one in found[0]]
    assert first == [("more", "p50", 3.0), ("source", "p3", 4.0), ("source", "p7", 2.0)]
    assert [one.attention for one in found[0]] == pytest.approx([0.6, 0.2, 0.2])
    assert [(one.memory, one.attention) for one in found[1]] == [("more", 1.0)]
    write_documents(tmp_path / "run.documents.jsonl", ["a", "b"], found)
    lines = (tmp_path / "run.documents.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "query": "b",
        "documents": [{"document": "p55", "memory": "more", "score": 5.0, "attention": 1.0}],
    }


def test_documents_of_another_mixture_are_refused(mixture, tmp_path):
    with pytest.raises(DataError, match=r"(?s)no documents beside.*attention=True"):
        read_fused(tmp_path, mixture)
    nothing = Lookup([], np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32))
    prints = {**mixture.fingerprints, "mixture": "another"}
    write_fused(tmp_path, nothing, np.zeros((0, 2), np.float32), fingerprints=prints)
    with pytest.raises(FingerprintError, match="name the mixture they are of"):
        read_fused(tmp_path, mixture)
