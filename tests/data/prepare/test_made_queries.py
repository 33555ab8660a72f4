"""Queries made of passages: what asks is cut out of what answers, and pages stay on one side."""

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
def data_dir(tmp_path) -> str:
    write_collection(tmp_path, "notes", PASSAGES)
    return str(tmp_path)


def test_what_asks_is_not_in_what_answers(data_dir):
    splits = make_queries(data_dir=data_dir, collection="made", source="notes")
    assert splits == {TASK: ["train", "validation", "test"]}
    store, changed, titles = list(PassageStore.open(data_dir, "made")), set(), 0
    assert [passage.id for passage in store] == [passage.id for passage in PASSAGES]
    pages: dict[str, set[str]] = {}
    for split in splits[TASK]:
        for query in QuerySet.open(data_dir, "made", TASK, split):
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


def test_sentences_of_chinese_end_without_a_space(tmp_path):
    texts = [f"这里是{number}号城市。那里有{number}条大河！谁住在那里？" for number in range(30)]
    write_collection(tmp_path, "notes", [Passage(f"p{n}", text) for n, text in enumerate(texts)])
    for split in make_queries(data_dir=tmp_path, collection="made", source="notes")[TASK]:
        for query in QuerySet.open(tmp_path, "made", TASK, split):
            (row,) = query.positives
            assert query.text in texts[row]
            assert query.text[-1] in "。！？"
            assert query.text not in PassageStore.open(tmp_path, "made")[row].text


@pytest.mark.parametrize(
    ("title", "text", "left"),
    [
        ("Art", "Artists have four words.", "Artists have four words."),
        ("Art", "art, of four words more.", ", of four words more."),
        ("C++", "C++ has at least four words.", "has at least four words."),
        ("北京", "北京是中国的首都。", "是中国的首都。"),
    ],
)
def test_a_title_is_cut_out_where_its_words_end(tmp_path, title, text, left):
    passages = [Passage(f"p{n}", f"{text} {n}", title) for n in range(60)]
    write_collection(tmp_path, "notes", passages)
    for split in make_queries(data_dir=tmp_path, collection="made", source="notes")[TASK]:
        for query in QuerySet.open(tmp_path, "made", TASK, split):
            if query.id.startswith("title:"):
                (row,) = query.positives
                assert PassageStore.open(tmp_path, "made")[row].text == f"{left} {row}"


def test_no_more_queries_than_are_of_use(data_dir, monkeypatch):
    most = {"train": 7, "validation": 2, "test": 3}
    monkeypatch.setattr(made_queries, "_MOST", most)
    make_queries(data_dir=data_dir, collection="made", source="notes")
    for split, count in most.items():
        assert len(QuerySet.open(data_dir, "made", TASK, split)) == count


def test_too_little_text_is_refused(tmp_path):
    write_collection(tmp_path, "few", [Passage("a", "One word."), Passage("b", "Two words here.")])
    with pytest.raises(DataError, match="2 passages make no query for train, validation, test"):
        make_queries(data_dir=tmp_path, collection="made", source="few")
