import numpy as np
from etils import epath

from taser_jax.storage.records import HashIndex, normalized_content, text_hash


def test_hash_and_normal_form_are_fixed():
    # Written down: saved indexes are read by other processes and other machines.
    assert text_hash("12") == 0xE330C688E1097A6B
    assert normalized_content(" A  b", "c\n\td e\u0301") == "A b\nc d \u00e9"


def test_hash_index_lists_every_row_of_a_hash(tmp_path):
    index = HashIndex.from_hashes(np.array([7, 2**64 - 1, 7, 0, 7], np.uint64))
    index.save(epath.Path(tmp_path), "x")
    for opened in (index, HashIndex.open(epath.Path(tmp_path), "x")):
        assert opened.candidates(7) == [0, 2, 4]
        assert opened.candidates(2**64 - 1) == [1]
        assert opened.candidates(0) == [3]
        assert opened.candidates(8) == []
        assert list(opened.repeated()) == [(0, 2), (2, 4)]
