import json

import ml_dtypes
import numpy as np
import pytest
from tiny_training import store_writer

from taser_jax.data.token_store.arrays import StateRows
from taser_jax.data.token_store.store import TokenStore
from taser_jax.storage.errors import ConfigError, DataError

PASSAGES = [[2, 7, 3], [2, 3], [2, 9, 8, 7, 3]]


def make_writer(directory, **changes):
    sizes = {"vocabulary_size": 10, "query_length": 4, "passage_length": 5}
    return store_writer(directory, **(sizes | changes))


def write(directory, passages=PASSAGES, query=(2, 5, 3), **changes):
    writer = make_writer(directory, **changes)
    writer.write_passages(iter(passages), count=len(passages))
    texts = {"query_ids": ["q0", "q1"], "tokens": [query, [2, 3]]}
    rows = {"positives": [[2, 0], [1]], "hard_negatives": [[], [0, 2]]}
    writer.write_queries("squad/v1", "train", **texts, **rows)
    return writer


def test_reads_back_what_was_written(tmp_path):
    write(tmp_path).finish()
    store = TokenStore.open(tmp_path)
    tokens = store.passages.tokens([2, 1])
    np.testing.assert_array_equal(tokens.ids, [[2, 9, 8, 7, 3], [2, 3, 0, 0, 0]])
    np.testing.assert_array_equal(tokens.mask, [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert tokens.ids.dtype == np.int32
    assert tokens.mask.dtype == bool
    assert len(store) == 3
    assert store.passages.ids.dtype == np.uint16
    assert isinstance(store.passages.ids, np.memmap)
    assert store.tasks == {"squad/v1": ["train"]}

    queries = store.queries("squad/v1", "train")
    assert queries.query_ids == ["q0", "q1"]
    assert [row.tolist() for row in queries.positives] == [[2, 0], [1]]
    assert [row.tolist() for row in queries.hard_negatives] == [[], [0, 2]]
    np.testing.assert_array_equal(queries.tokens([1, 0]).ids, [[2, 3, 0, 0], [2, 5, 3, 0]])
    assert queries.collection_fingerprint == "c0"


def test_many_blocks_stream_in_order_and_large_vocabularies_need_int32(tmp_path):
    writer = make_writer(tmp_path, vocabulary_size=70_000)
    writer.write_passages(([60_000 + row, 1] for row in range(10_000)), count=10_000)
    store = writer.finish()
    np.testing.assert_array_equal(store.passages.ids[:, 0], 60_000 + np.arange(10_000))
    assert set(store.passages.lengths) == {2}


def test_fingerprint_follows_the_contents(tmp_path):
    same = [write(tmp_path / name).finish().metadata.fingerprint for name in ("a", "b")]
    assert same[0] == same[1]
    changed = [
        write(tmp_path / "c", passages=[*PASSAGES[:2], [2, 9, 8, 6, 3]]).finish(),
        write(tmp_path / "d", query=(2, 6, 3)).finish(),
        write(tmp_path / "e", vocabulary_fingerprint="v1").finish(),
    ]
    assert len({same[0], *(store.metadata.fingerprint for store in changed)}) == 4


def test_a_store_is_unfinished_until_its_end_and_then_nothing_is_written_into_it(tmp_path):
    writer = write(tmp_path)
    with pytest.raises(DataError, match=r"unfinished.*\n.*taser tokenize"):
        TokenStore.open(tmp_path)
    writer.finish()
    with pytest.raises(ConfigError, match="something here already"):
        make_writer(tmp_path)
    TokenStore.open(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        TokenStore.open(tmp_path / "nowhere")


# Of texts that became tokens otherwise.
OTHERWISE = "(?s)'preprocessing_version': .* by version {} .*version 2.*replace="


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("passages/ids.npy", b"\x93NUMPY", r"ids\.npy: missing or damaged"),
        ("metadata.json", b"{", r"metadata\.json: not JSON"),
        ("metadata.json", b'{"format_version": 1}', "missing required field 'collection'"),
        ("metadata.json", b'{"format_version": 99}', "format version 99"),
        ("metadata.json", {"preprocessing_version": 1}, OTHERWISE.format(1)),
        ("metadata.json", {"preprocessing_version": 3}, OTHERWISE.format(3)),
    ],
)
def test_damaged_or_foreign_files(tmp_path, file, content, message):
    path = tmp_path / file
    write(tmp_path).finish()
    (tmp_path / "checksums.txt").unlink()
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("passages", "count", "message"),
    [
        ([[2, 3], []], 2, "row 1: 0 tokens"),
        ([[1] * 6], 1, r"row 0: 6 tokens\n  expected: 1 to 5"),
        ([[2, 3], [2, 3, 10]], 2, "row 1: token id 10"),
        ([[-1]], 1, "row 0: token id -1"),
        (PASSAGES, 1, "more than 1"),
        (PASSAGES, 4, r"3 passages\n  expected: 4"),
    ],
)
def test_bad_passages(tmp_path, passages, count, message):
    with pytest.raises(DataError, match=message):
        make_writer(tmp_path).write_passages(passages, count=count)


def test_wrong_counts(tmp_path):
    told = "1 query ids, 2 lists of positives and 2 of hard negatives for 2 token"
    with pytest.raises(DataError, match=told):
        make_writer(tmp_path).write_queries(
            "t", "train", query_ids=["a"], tokens=[[1], [1]], positives=[[0], [0]]
        )
    with pytest.raises(DataError, match="no passages"):
        make_writer(tmp_path).finish()


def test_unknown_task_names_the_nearest(tmp_path):
    store = write(tmp_path).finish()
    with pytest.raises(ConfigError, match="did you mean squad/v1"):
        store.queries("squad/v2", "train")
    with pytest.raises(ConfigError, match="with a split 'trian'"):
        store.queries("squad/v1", "trian")


LENGTHS = np.array([2, 1, 3], np.int32)


@pytest.fixture
def directory(tmp_path):
    # State i is (i, -i), of six tokens of three texts.
    states = np.stack([np.arange(6), -np.arange(6)], axis=1)
    np.save(tmp_path / "states.npy", states.astype(ml_dtypes.bfloat16).view(np.uint16))
    return tmp_path


def test_rows_are_padded_like_tokens(directory):
    states = StateRows.open(directory, LENGTHS, length=4).tokens(np.array([2, 1]))
    assert states.hidden.dtype == ml_dtypes.bfloat16
    assert states.hidden[..., 0].astype(int).tolist() == [[3, 4, 5, 0], [2, 0, 0, 0]]
    assert states.hidden[..., 1].astype(int).tolist() == [[-3, -4, -5, 0], [-2, 0, 0, 0]]
    assert states.mask.astype(int).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    narrow = states.resized(3)
    assert narrow.hidden.shape == (2, 3, 2)
    assert narrow.mask.tolist() == states.mask[:, :3].tolist()


def test_some_rows_in_another_order(directory):
    rows = StateRows.open(directory, LENGTHS, length=4).take(np.array([2, 0]), length=3)
    assert rows.lengths.tolist() == [3, 2]
    states = rows.tokens(np.array([1, 0]))
    assert states.hidden[..., 0].astype(int).tolist() == [[0, 1, 0], [3, 4, 5]]


def test_states_of_other_texts_are_refused(directory):
    with pytest.raises(DataError, match="those of 7 tokens"):
        StateRows.open(directory, np.array([2, 2, 3]), length=4)
    with pytest.raises(DataError, match="missing or damaged"):
        StateRows.open(directory / "nowhere", LENGTHS, length=4)
