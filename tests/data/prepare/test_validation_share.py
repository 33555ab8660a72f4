"""A validation split carved out of the training queries, and files divided by their questions."""

import itertools

import pytest
from written_files import beir, write

from taser_jax.data.collections.store import list_tasks
from taser_jax.data.prepare.mapping import WITHOUT_POSITIVE
from taser_jax.data.prepare.splits import divide_by_positives
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Query


def _query(id: str, *positives: int) -> Query:
    return Query(id=id, text=id, task="t", positives=positives)


@pytest.fixture
def prepared(tmp_path, prepare_here):
    """Prepares as many passages as queries; 0 and 1 share their passage, and the last has none."""

    def prepare_beir(queries: int, *splits: str, **options):
        judged = [f"q{n} d{max(n, 1)} {int(n < queries - 1)}" for n in range(queries)]
        corpus = {f"d{n}": f"passage {n}" for n in range(queries)}
        asked = {f"q{n}": f"query q{n}" for n in range(queries)}
        beir(tmp_path / "beir", corpus=corpus, queries=asked, **dict.fromkeys(splits, judged))
        return prepare_here(directories={"t": "beir"}, **options).splits

    return prepare_beir


def test_no_positive_is_on_both_sides():
    # Chains of eight queries, of which two that follow each other have a positive in common.
    queries = [_query(str(n), n, *([n + 1] if n % 8 < 7 else [])) for n in range(1000)]
    for share, order in itertools.product((0.1, 0.5, 0.9), (1, -1)):
        train, held_out = divide_by_positives(queries[::order], share=share)
        sides = [{row for query in part for row in query.positives} for part in (train, held_out)]
        assert not sides[0] & sides[1]
        assert sorted(train + held_out, key=lambda query: int(query.id)) == queries
        assert len(held_out) / 1000 == pytest.approx(share, abs=0.1)


def test_questions_without_ids_are_divided_alike_in_any_order(tmp_path, prepare_here, queries_of):
    """A question that is there twice is on one side."""
    (tmp_path / "p.tsv").write_text("id\ttext\np\tpassage\n")
    texts = [f"question {n % 150}?" for n in range(200)]

    def divided(texts):
        records = [{"question": text, "positive_ctxs": [{"passage_id": "p"}]} for text in texts]
        write(tmp_path / "q.jsonl", records)
        prepare_here("p.tsv", {"t": "q.jsonl"})
        splits = ("train", "validation", "test")
        return [{query.text for query in queries_of("t", split)} for split in splits]

    first = divided(texts)
    assert sum(map(len, first)) == 150
    assert divided(texts[::-1]) == first


@pytest.mark.parametrize(
    ("split", "again"),
    [
        ("validation", {"train": "q.jsonl", "test": "q.jsonl"}),
        ("test", {"train+validation": "q.jsonl"}),
    ],
)
def test_what_was_held_out_is_not_left_beside_new_training(tmp_path, prepare_here, split, again):
    (tmp_path / "p.tsv").write_text("id\ttext\np\tpassage\n")
    record = {"positive_ctxs": [{"passage_id": "p"}]}
    write(tmp_path / "q.jsonl", [{"question": f"question {n}?", **record} for n in range(150)])
    prepare_here("p.tsv", {"t": "q.jsonl"})
    with pytest.raises(ConfigError, match=f"queries/t/{split}: {split} queries of an earlier"):
        prepare_here("p.tsv", {"t": again})
    # Test queries alone may follow.
    prepare_here("p.tsv", {"t": {"test": "q.jsonl"}})


def test_where_most_queries_hang_together_their_texts_divide_them():
    chain = [_query(f"chain{n}", n, n + 1) for n in range(51)]
    queries = chain + [_query(str(n), n) for n in range(100, 150)]
    held_out = divide_by_positives(queries, share=0.3)[1]
    assert 5 < sum(query in held_out for query in chain) < 25
    for size in (2, 38):
        assert all(divide_by_positives(chain[:size], share=0.1))


@pytest.mark.parametrize("count", [2, 3, 9])
def test_of_few_queries_one_at_least_is_on_each_side(count):
    queries = [_query(str(n), n) for n in range(count)]
    assert len(divide_by_positives(queries, share=1e-6)[1]) == 1
    assert len(divide_by_positives(queries, share=0.999999)[0]) == 1


def test_equal_positives_divide_two_tasks_alike():
    first = divide_by_positives([_query(f"a{n}", n) for n in range(100)], share=0.3)
    second = divide_by_positives([_query(f"b{n}", n) for n in reversed(range(100))], share=0.3)
    assert {q.positives for q in first[1]} == {q.positives for q in second[1]}
    assert divide_by_positives([_query("none")], share=0.99) == ([_query("none")], [])


def test_a_share_of_training_becomes_validation(tmp_path, prepared, queries_of):
    def ids(split):
        return [query.id for query in queries_of("t", split)]

    prepared(60, "train", "test")
    assert list_tasks(tmp_path / "data", "c")["t"] == ["train", "test"]
    whole, test = ids("train"), ids("test")
    splits = prepared(60, "train", "test", validation_share=0.3)
    assert list_tasks(tmp_path / "data", "c")["t"] == ["train", "validation", "test"]
    train, validation = ids("train"), ids("validation")
    assert sorted(train + validation) == sorted(whole)
    assert ids("test") == test
    assert 5 < len(validation) < 35
    # q0 and q1 have one passage.
    assert ("q0" in train) == ("q1" in train)
    lacks = {WITHOUT_POSITIVE: 1}
    counts = {split.split: split.left_out for split in splits}
    assert counts == {"train": lacks, "validation": {}, "test": lacks}


def test_a_validation_split_of_the_files_stays(prepared):
    splits = prepared(20, "train", "dev", validation_share=0.5)
    assert [(split.split, split.queries) for split in splits] == [("train", 19), ("validation", 20)]


def test_a_share_that_leaves_one_side_empty(prepared):
    with pytest.raises(ConfigError, match=r"^VALIDATION_SHARE = 0\.001, .*0 of 1 train"):
        prepared(2, "train", validation_share=0.001)
