"""The documents behind a question, as `taser ask` prints them."""

import numpy as np
import pytest
import tiny_training

from taser_jax.data.collections.store import write_collection
from taser_jax.storage.records import Passage
from taser_jax.systems.moma.augment import fused_documents
from taser_jax.systems.moma.memories import Lookup, Manifest, Memory, Mixture


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
    found = fused_documents(mixture, lookup, attention, data_dir=str(tmp_path / "data"))
    first = [(one.memory, one.passage.id, one.score) for one in found[0]]
    assert first == [("more", "p50", 3.0), ("source", "p3", 4.0), ("source", "p7", 2.0)]
    assert [one.attention for one in found[0]] == pytest.approx([0.6, 0.2, 0.2])
    assert [(one.memory, one.attention) for one in found[1]] == [("more", 1.0)]
