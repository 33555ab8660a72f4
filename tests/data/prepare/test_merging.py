import pytest

from taser_jax.data.collections.store import write_collection
from taser_jax.data.prepare.merging import PassageMerger
from taser_jax.data.readers.located import Context
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage


def _passages(*passages: tuple[str, str]) -> list[Passage]:
    return [Passage(*passage) for passage in passages]


def _collection(tmp_path, **sources):
    merger = PassageMerger(sources)
    store = write_collection(tmp_path, "c", merger.passages(), aliases=merger.aliases)
    return merger, store, merger.resolver(store)


def test_two_files_by_hand(tmp_path):
    merger, store, resolver = _collection(
        tmp_path,
        a=_passages(("1", "x"), ("2", "y")),
        b=_passages(("1", "y "), ("3", "x"), ("2", "z"), ("4", "w")),
    )
    assert [(passage.id, passage.text) for passage in store] == [
        ("1", "x"),
        ("2", "y"),
        ("b:2", "z"),
        ("4", "w"),
    ]
    assert (merger.merged, merger.renamed) == (2, 1)
    assert merger.aliases == {"b:1": 1, "b:3": 0, "3": 0}
    assert [store.row_of(id) for id in ("1", "2", "3", "4", "b:1", "b:2", "b:3")] == [
        *(0, 1, 0, 3),
        *(1, 2, 0),
    ]

    def row(id, label=""):
        return resolver.row_of_id(id, label=label, where="q.tsv:1")

    assert [row("1", "a"), row("2", "a"), row("3", "a"), row("4", "a")] == [0, 1, None, None]
    assert [row("1", "b"), row("2", "b"), row("3", "b"), row("4", "b")] == [1, 2, 0, 3]
    assert [row("3"), row("4"), row("5")] == [0, 3, None]
    with pytest.raises(DataError, match=r"q\.tsv:1: the passage id '1' means different(.|\n)*a, b"):
        row("1")


def test_contexts_go_by_content_unless_the_id_is_certain(tmp_path):
    _, _, resolver = _collection(
        tmp_path, a=_passages(("1", "x")), b=_passages(("1", "y"), ("2", "z"))
    )
    assert resolver.row_of_context(Context("", "y", "1"), label="", where="") == 1
    assert resolver.row_of_context(Context("", "y", "1"), label="a", where="") == 0
    assert resolver.row_of_context(Context("", " z", "gone"), label="b", where="") == 2
    assert resolver.row_of_context(Context("", "gone", "gone"), label="b", where="") is None


def test_merging_a_file_with_itself_changes_nothing_but_aliases(tmp_path):
    passages = [(str(n), f"text {n % 40}") for n in range(50)]
    _, once, _ = _collection(tmp_path / "1", a=_passages(*passages[:40]))
    _, twice, resolver = _collection(
        tmp_path / "2", a=_passages(*passages[:40]), b=_passages(*passages)
    )
    assert list(once) == list(twice)
    for number in range(50):
        assert resolver.row_of_id(str(number), label="b", where="") == number % 40
        assert twice.row_of(str(number)) == number % 40


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([("1", "x"), ("b:1", "y")], [("1", "z")], "passages 'b': the id 'b:1' is used for two"),
        ([("1", "x"), ("1", "y")], [("2", "z")], "passages 'a': .*'a:1' is used for two texts"),
        ([("1", "x")], [("2", "x"), ("2", "z")], "passages 'b': .*'b:2' is used for two texts"),
    ],
)
def test_an_id_that_stays_ambiguous_is_refused(tmp_path, first, second, message):
    with pytest.raises(DataError, match=message):
        _collection(tmp_path, a=_passages(*first), b=_passages(*second))
