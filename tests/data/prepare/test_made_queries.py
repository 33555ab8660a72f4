"""Queries made of passages: what asks is cut out of what answers, and pages stay on one side."""

import itertools

import pytest

from taser_jax.data.collections.store import PassageStore, QuerySet, write_collection
from taser_jax.data.prepare import made_queries
from taser_jax.data.prepare.made_queries import TASK, make_queries
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

# Ninety pages of two passages each; every sentence is there once.
PASSAGES = [
    Passage(
        f"{page}#{part}",
        " ".join(f"Sentence {page} {part} number{number} of page{page}." for number in range(4)),
        f"The title of page{page}" if page % 3 else "",
        f"page{page}",
    )
    for page in range(90)
    for part in range(2)
]


@pytest.fixture
def made(tmp_path):
    """Passages -> what is left of them, and queries of each split."""

    def make(passages=PASSAGES):
        write_collection(tmp_path, "notes", passages)
        splits = make_queries(data_dir=tmp_path, collection="made", source="notes")
        assert splits == {TASK: ["train", "validation", "test"]}
        queries = {name: list(QuerySet.open(tmp_path, "made", TASK, name)) for name in splits[TASK]}
        return list(PassageStore.open(tmp_path, "made")), queries

    return make


def test_what_asks_is_not_in_what_answers(made):
    store, queries = made()
    assert [passage.id for passage in store] == [passage.id for passage in PASSAGES]
    pages: dict[str, set[str]] = {}
    changed, titles = set(), 0
    for split, of_split in queries.items():
        for query in of_split:
            for row in query.positives:
                left, whole = store[row], PASSAGES[row]
                assert query.text in f"{whole.title} {whole.text}"
                assert query.text not in f"{left.title} {left.text}"
                words = f"{query.text} {left.title} {left.text}".split()
                assert sorted(words) == sorted(f"{whole.title} {whole.text}".split())
                pages.setdefault(whole.page_id, set()).add(split)
                changed.add(row)
            is_title = query.id.startswith("title:")
            assert query.text.startswith("The title") == is_title
            titles += is_title
            assert len(query.positives) == (2 if is_title else 1)
    assert all(len(page_splits) == 1 for page_splits in pages.values())
    # Every passage has a query here, half the titled pages by their titles.
    assert changed == set(range(len(PASSAGES)))
    assert 15 < titles < 45


def test_sentences_of_chinese_end_without_a_space(made):
    texts = [f"这里是{number}号城市。那里有{number}条大河！谁住在那里？" for number in range(30)]
    store, queries = made([Passage(f"p{n}", text) for n, text in enumerate(texts)])
    for query in itertools.chain(*queries.values()):
        (row,) = query.positives
        assert query.text in texts[row]
        assert query.text[-1] in "。！？"
        assert query.text not in store[row].text


@pytest.mark.parametrize(
    ("title", "text", "left"),
    [
        ("Art", "Artists have four words.", "Artists have four words."),
        ("Art", "art, of four words more.", ", of four words more."),
        ("C++", "C++ has at least four words.", "has at least four words."),
        ("北京", "北京是中国的首都。", "是中国的首都。"),
    ],
)
def test_a_title_is_cut_out_where_its_words_end(made, title, text, left):
    store, queries = made([Passage(f"p{n}", f"{text} {n}", title) for n in range(60)])
    for query in itertools.chain(*queries.values()):
        if query.id.startswith("title:"):
            (row,) = query.positives
            assert store[row].text == f"{left} {row}"


def test_no_more_queries_than_are_of_use(made, monkeypatch):
    most = {"train": 7, "validation": 2, "test": 3}
    monkeypatch.setattr(made_queries, "_MOST", most)
    _, queries = made()
    assert {split: len(of_split) for split, of_split in queries.items()} == most


def test_too_little_text_is_refused(made):
    with pytest.raises(DataError, match="2 passages make no query for train, validation, test"):
        made([Passage("a", "One word."), Passage("b", "Two words here.")])
