import dataclasses
import os
import weakref

import numpy as np
import pytest
import tensorflow_datasets as tfds

from taser_jax.data.collections import records
from taser_jax.data.collections import store as collections
from taser_jax.data.collections.store import PassageStore, QuerySet, write_collection, write_queries
from taser_jax.storage.artifacts import Fingerprint
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError
from taser_jax.storage.records import Passage, Query

PASSAGES = [
    Passage("a", "first text", "One", "p1"),
    Passage("b", "second\ttext\n\u2028 é", ""),
    Passage("c-d", "", "kept since asked for"),
    Passage("e", "first  text", "One"),
]
QUERIES = [
    Query("q1", "who?", "nq", positives=(2, 0), relevance=(2, 1), answers=("é", "b")),
    Query("q2", "when?", "nq", positives=(1,), hard_negatives=(3, 0)),
    Query("q3", "no positive", "nq", answers=("x",)),
]


def _many(count: int) -> list[Passage]:
    return [Passage(f"id{n}", f"text of {n}", f"title {n % 7}") for n in range(count)]


def _write(data_dir, passages=PASSAGES, **options) -> PassageStore:
    return write_collection(data_dir, "tiny", passages, **options)


def test_what_is_written_is_read_by_row_and_id(tmp_path):
    store = _write(tmp_path)
    for opened in (store, PassageStore.open(tmp_path, "tiny")):
        assert (len(opened), opened.name) == (4, "tiny")
        assert list(opened) == PASSAGES
        assert opened[1] == PASSAGES[1]
        assert opened.get_many([3, 0, 3]) == [PASSAGES[3], PASSAGES[0], PASSAGES[3]]
        assert opened.get_many([]) == []
        assert list(opened.ids) == ["a", "b", "c-d", "e"]
        assert [opened.row_of(passage.id) for passage in PASSAGES] == [0, 1, 2, 3]
        assert opened.rows_with(title=" One", text="first text") == [0, 3]
        assert opened.rows_with(title="One", text="other") == []
    with pytest.raises(DataError, match="none of its 4 passages has the id 'zz'"):
        store.row_of("zz")
    for row in (-1, 4):
        with pytest.raises(IndexError, match=f"row {row} "):
            store[row]


def test_rows_run_on_across_shards(tmp_path, monkeypatch):
    passages = _many(5000)
    monkeypatch.setattr(records, "_PER_SHARD", 700)
    store = _write(tmp_path, passages)
    # The files are a data set of TFDS.
    builder = tfds.builder_from_directory(tmp_path / "tiny" / "passages")
    assert builder.info.splits["passages"].num_shards == 8
    assert builder.info.disable_shuffling
    source = builder.as_data_source(split="passages")
    assert [source[row]["id"] for row in (0, 4999)] == [b"id0", b"id4999"]
    assert list(store) == passages
    rows = np.random.default_rng(0).integers(0, 5000, size=300)
    assert store.get_many(rows) == [passages[row] for row in rows]
    assert [store.row_of(passages[row].id) for row in rows] == list(rows)


def test_building_is_a_stream(tmp_path):
    alive, most = weakref.WeakSet(), 0

    class Watched(Passage):
        """As instances of `Passage` itself are not, it may be referred to weakly."""

    def passages():
        nonlocal most
        for number in range(10_000):
            passage = Watched(str(number), "text")
            alive.add(passage)
            most = max(most, len(alive))
            yield passage

    _write(tmp_path, passages())
    assert most < 3000


def test_the_fingerprint_follows_content_and_order_only(tmp_path, monkeypatch):
    fingerprint = _write(tmp_path / "0").fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(records, "_PER_SHARD", 1)
        assert _write(tmp_path / "1").fingerprint == fingerprint
    others = [PASSAGES[::-1], PASSAGES[:3]]
    for change in ({"id": "z"}, {"text": "first text!"}, {"title": "Two"}, {"page_id": "p2"}):
        others.append([dataclasses.replace(PASSAGES[0], **change), *PASSAGES[1:]])
    fingerprints = {_write(tmp_path / "2", passages).fingerprint for passages in others}
    aliased = _write(tmp_path / "2", aliases={"other": 1})
    assert len(fingerprints | {fingerprint, aliased.fingerprint}) == 8
    assert aliased.row_of("other") == 1


def test_new_content_replaces_the_old_with_a_warning_and_its_queries_are_refused(tmp_path, caplog):
    _write(tmp_path)
    write_queries(tmp_path, "tiny", "nq", "train", QUERIES)
    assert len(_write(tmp_path, _many(9))) == 9
    assert "must be made again" in caplog.text
    with pytest.raises(FingerprintError, match="taser prepare"):
        QuerySet.open(tmp_path, "tiny", "nq", "train")


def test_a_build_that_is_interrupted_leaves_what_was_there(tmp_path):
    def interrupted():
        yield from PASSAGES
        raise KeyboardInterrupt

    for before in ([], ["passages"]):
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path, interrupted())
        assert os.listdir(tmp_path / "tiny") == before
        assert list(_write(tmp_path)) == PASSAGES


def test_missing_and_other_collections_are_reported(tmp_path):
    with pytest.raises(DataError, match="there is no such data set"):
        PassageStore.open(tmp_path, "tiny")
    _write(tmp_path)
    metadata = tmp_path / "tiny/passages/metadata.json"
    metadata.write_text(metadata.read_text().replace('"format_version": 1', '"format_version": 99'))
    (metadata.parent / "checksums.txt").unlink()
    with pytest.raises(DataError, match="format version 99"):
        PassageStore.open(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([], "there are no passages"),
        ([Passage("a", "x"), Passage("", "y")], r"row 1, field 'id': the id is empty"),
        ([Passage("1 ", "x")], r"row 0, field 'id': the id '1 ' has a space"),
        ([*_many(3), Passage("id1", "y")], r"the id 'id1' is used twice, in rows 1 and 3"),
    ],
)
def test_bad_passages_leave_nothing_behind(tmp_path, passages, message):
    with pytest.raises(DataError, match=message):
        write_collection(tmp_path, "tiny", passages)
    assert os.listdir(tmp_path / "tiny") == []


def test_queries_come_back_as_they_were(tmp_path):
    store = _write(tmp_path)
    written = write_queries(tmp_path, "tiny", "nq", "train", QUERIES)
    for queries in (written, QuerySet.open(tmp_path, "tiny", "nq", "train")):
        assert list(queries) == QUERIES
        assert queries[1] == QUERIES[1]
        assert (len(queries), queries.task, queries.split) == (3, "nq", "train")
        assert queries.collection_fingerprint == store.fingerprint
    write_queries(tmp_path, "tiny", "nq", "test", QUERIES[:1])
    write_queries(tmp_path, "tiny", "alpha", "validation", [Query("x", "y", "alpha")])
    tasks = collections.list_tasks(tmp_path, "tiny")
    assert tasks == {"alpha": ["validation"], "nq": ["train", "test"]}
    assert collections.list_tasks(tmp_path, "other") == {}


def test_query_fingerprints_follow_every_field(tmp_path):
    _write(tmp_path)
    query = Query("q", "t", "nq", (1, 2), (1, 2), (3,), ("a", "b"))
    changes = (
        *({}, {"id": "p"}, {"text": "u"}, {"positives": (2, 1)}, {"relevance": (2, 1)}),
        *({"hard_negatives": (0,)}, {"answers": ("ab",)}),
    )

    def fingerprint(**change):
        changed = dataclasses.replace(query, **change)
        return write_queries(tmp_path, "tiny", "nq", "train", [changed]).fingerprint

    assert len({fingerprint(**change) for change in changes}) == len(changes)
    assert fingerprint() == fingerprint()


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([], "there are no queries"),
        ([QUERIES[0], QUERIES[0]], "query 'q1': the query id is used twice"),
        ([Query(" 1", "t", "nq")], "the id ' 1' has a space"),
        ([Query("q", "t", "nq", positives=(4,))], "query 'q': row 4"),
        ([Query("q", "t", "nq", hard_negatives=(-1,))], "query 'q': row -1"),
    ],
)
def test_bad_queries_are_reported(tmp_path, queries, message):
    _write(tmp_path)
    with pytest.raises(DataError, match=message):
        write_queries(tmp_path, "tiny", "nq", "train", queries)
    assert collections.list_tasks(tmp_path, "tiny") == {}


def test_names_that_make_no_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"collection name '\.\./up'"):
        write_collection(tmp_path, "../up", PASSAGES)
    _write(tmp_path)
    with pytest.raises(ConfigError, match="split 'dev'"):
        write_queries(tmp_path, "tiny", "nq", "dev", QUERIES)
    with pytest.raises(ConfigError, match="task name 'a/b'"):
        QuerySet.open(tmp_path, "tiny", "a/b", "train")


def test_two_processes_write_the_same_bytes():
    """Protocol buffers order a map by a hash with a seed of its process, unless told not to."""
    features = tfds.features.FeaturesDict(records.QUERY_FEATURES)
    [example] = records.query_examples(QUERIES[:1], Fingerprint(), count=4, where="nq")
    serializer = records._SameBytes(features.get_serialized_info())
    written = serializer.serialize_example(features.encode_example(example))
    assert sorted(features, key=lambda name: written.index(name.encode())) == sorted(features)
