"""A validation split carved out of the training queries, and what is listed of incomplete files."""

import itertools
import pathlib

import pytest
from written_files import beir

from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.mapping import WITHOUT_POSITIVE
from taser_jax.data.prepare.receipts import left_out_directory
from taser_jax.data.prepare.splits import PrepareOptions, divide_by_positives
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Query


def _query(id: str, *positives: int) -> Query:
    return Query(id=id, text=id, task="t", positives=positives)


def _beir(root: pathlib.Path, *, queries: int, splits: tuple[str, ...]) -> None:
    """As many passages as queries; queries 0 and 1 share their passage, and the last has none."""
    beir(
        root,
        corpus={f"d{n}": f"passage {n}" for n in range(queries)},
        queries={f"q{n}": f"query q{n}" for n in range(queries)},
        **{
            split: [f"q{n} d{max(n, 1)} {int(n < queries - 1)}" for n in range(queries)]
            for split in splits
        },
    )


def test_no_positive_is_on_both_sides():
    # Every other query has a second positive, which links it to another.
    queries = [_query(str(n), n // 2, *([n // 2 + 500] if n % 4 else [])) for n in range(1000)]
    train, held_out = divide_by_positives(queries, share=0.2)
    sides = [{row for query in part for row in query.positives} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    assert sorted(train + held_out, key=lambda query: int(query.id)) == queries
    assert 120 < len(held_out) < 280


def test_queries_linked_through_others_stay_together():
    chain = [_query(str(n), n, n + 1) for n in range(50)]
    for share, order in itertools.product((0.1, 0.5, 0.9), (1, -1)):
        assert [] in divide_by_positives(chain[::order], share=share)


def test_equal_positives_divide_two_tasks_alike():
    first = divide_by_positives([_query(f"a{n}", n) for n in range(100)], share=0.3)
    second = divide_by_positives([_query(f"b{n}", n) for n in reversed(range(100))], share=0.3)
    assert {q.positives for q in first[1]} == {q.positives for q in second[1]}
    assert divide_by_positives([_query("none")], share=0.99) == ([_query("none")], [])


def test_a_share_of_training_becomes_validation(tmp_path: pathlib.Path):
    _beir(tmp_path / "beir", queries=60, splits=("train", "test"))
    arguments = {"collection": "c", "directories": {"t": tmp_path / "beir"}}
    prepare(data_dir=tmp_path / "whole", **arguments)
    options = PrepareOptions(validation_share=0.3)
    prepared = prepare(data_dir=tmp_path / "carved", options=options, **arguments)

    assert list_tasks(tmp_path / "whole", "c")["t"] == ["train", "test"]
    assert list_tasks(tmp_path / "carved", "c")["t"] == ["train", "validation", "test"]
    ids = {
        name: [query.id for query in QuerySet.open(tmp_path / folder, "c", "t", split)]
        for name, folder, split in [
            ("whole", "whole", "train"),
            ("train", "carved", "train"),
            ("validation", "carved", "validation"),
            ("test before", "whole", "test"),
            ("test", "carved", "test"),
        ]
    }
    assert sorted(ids["train"] + ids["validation"]) == sorted(ids["whole"])
    assert ids["test"] == ids["test before"]
    assert 5 < len(ids["validation"]) < 35
    # Without the share, the validation queries that are left would be training queries, too.
    with pytest.raises(
        ConfigError, match=r"queries/t/validation: validation queries of an earlier"
    ):
        prepare(data_dir=tmp_path / "carved", **arguments)
    # q0 and q1 have one passage.
    assert ("q0" in ids["train"]) == ("q1" in ids["train"])
    counts = {split.split: split.left_out for split in prepared.splits}
    assert counts == {
        "train": {WITHOUT_POSITIVE: 1},
        "validation": {},
        "test": {WITHOUT_POSITIVE: 1},
    }
    listed = (left_out_directory(tmp_path / "carved", "c") / "t.train.txt").read_text()
    assert listed == f"{tmp_path}/beir/queries.jsonl:60, question 'query q59': without a positive\n"


def test_a_validation_split_of_the_files_stays(tmp_path: pathlib.Path):
    _beir(tmp_path / "beir", queries=20, splits=("train", "dev"))
    options = PrepareOptions(validation_share=0.5)
    prepared = prepare(
        data_dir=tmp_path, collection="c", directories={"t": tmp_path / "beir"}, options=options
    )
    assert {split.split: split.queries for split in prepared.splits} == {
        "train": 19,
        "validation": 20,
    }


def test_a_share_that_leaves_one_side_empty(tmp_path: pathlib.Path):
    _beir(tmp_path / "beir", queries=3, splits=("train",))
    with pytest.raises(ConfigError, match="0 of 2 training queries become"):
        prepare(
            data_dir=tmp_path,
            collection="c",
            directories={"t": tmp_path / "beir"},
            options=PrepareOptions(validation_share=0.001),
        )
