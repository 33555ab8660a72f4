"""States of frozen blocks on disk."""

import ml_dtypes
import numpy as np
import pytest

from taser_jax.data.token_store.arrays import StateRows
from taser_jax.storage.errors import DataError

LENGTHS = np.array([2, 1, 3], np.int32)


@pytest.fixture
def directory(tmp_path):
    # State i is (i, -i), of six tokens of three texts.
    states = np.stack([np.arange(6), -np.arange(6)], axis=1)
    np.save(tmp_path / "states.npy", states.astype(ml_dtypes.bfloat16).view(np.uint16))
    return tmp_path


def test_rows_are_padded_like_tokens(directory):
    rows = StateRows.open(directory, LENGTHS, length=4)
    found = rows.tokens(np.array([2, 1]))
    assert found.hidden.dtype == ml_dtypes.bfloat16
    assert found.hidden[..., 0].astype(int).tolist() == [[3, 4, 5, 0], [2, 0, 0, 0]]
    assert found.hidden[..., 1].astype(int).tolist() == [[-3, -4, -5, 0], [-2, 0, 0, 0]]
    assert found.mask.astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    narrow = found.resized(3)
    assert narrow.hidden.shape == (2, 3, 2)
    assert narrow.mask.tolist() == found.mask[:, :3].tolist()


def test_some_rows_in_another_order(directory):
    rows = StateRows.open(directory, LENGTHS, length=4).take(np.array([2, 0]), length=3)
    assert rows.lengths.tolist() == [3, 2]
    found = rows.tokens(np.array([1, 0]))
    assert found.hidden[..., 0].astype(int).tolist() == [[0, 1, 0], [3, 4, 5]]


def test_states_of_other_texts_are_refused(directory):
    with pytest.raises(DataError, match="those of 7 tokens"):
        StateRows.open(directory, np.array([2, 2, 3]), length=4)
    with pytest.raises(DataError, match="missing or damaged"):
        StateRows.open(directory / "nowhere", LENGTHS, length=4)
