"""Data as people have it: the same documents in many layouts become the same collection."""

import csv
import io
import logging
import pathlib

import pytest
from written_files import write_all

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.detection import given_passages
from taser_jax.data.prepare.mapping import MISSING_QUERIES
from taser_jax.data.prepare.splits import PrepareOptions
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.storage.records import Passage

TITLES = ["Bern", "Aare", "Bears"]
TEXTS = ["A city, on a river.", 'A "river" in Bern; it is long.', "They live in the city."]
QUESTIONS = ["which city", "which river", "which animals"]


def _table(rows: list[list[str]], delimiter: str = ",") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _prepare(root: pathlib.Path, files: dict, **options):
    folder = write_all(root / "notes", files)
    data, options = root / "data", PrepareOptions(**options)
    prepared = prepare(data_dir=data, collection="c", directories=folder, options=options)
    return prepared, PassageStore.open(data, "c")


def _table_of_passages(delimiter: str) -> str:
    rows = zip(TITLES, TEXTS, "abc", strict=True)
    return _table([["Title", "Content", "doc-id"], *map(list, rows)], delimiter)


PASSAGES = [
    {"passages.csv": _table_of_passages(",")},
    {"export.csv": _table_of_passages(";")},
    {"lone.tsv": _table_of_passages("\t")},
    {"judged.tsv": _table_of_passages("\t").replace("doc-id", "passage_id")},
    {
        "docs.jsonl": [
            {"docid": id, "title": title, "contents": text}
            for id, title, text in zip("abc", TITLES, TEXTS, strict=True)
        ]
    },
    {
        "docs.sgml": "".join(
            f"<DOC>\n<DOCNO> {id} </DOCNO>\n<TITLE>{title}</TITLE>\n<TEXT>\n{text}\n</TEXT>\n"
            "</DOC>\n"
            for id, title, text in zip("abc", TITLES, TEXTS, strict=True)
        )
    },
]


@pytest.mark.parametrize("files", PASSAGES, ids=lambda files: next(iter(files)))
def test_passages_alone_by_the_names_of_their_fields(tmp_path, files):
    prepared, store = _prepare(tmp_path, files)
    passages = [(passage.id, passage.title, passage.text) for passage in store]
    assert passages == list(zip("abc", TITLES, TEXTS, strict=True))
    assert prepared.splits == ()


def test_a_lone_parquet_file(tmp_path):
    import pyarrow.parquet

    table = pyarrow.table({"doc_id": list("abc"), "heading": TITLES, "body": TEXTS})
    (tmp_path / "notes").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "notes" / "docs.parquet")
    _, store = _prepare(tmp_path, {})
    passages = [(passage.id, passage.title, passage.text) for passage in store]
    assert passages == list(zip("abc", TITLES, TEXTS, strict=True))


@pytest.mark.parametrize("saved", [True, False], ids=["save_to_disk", "cloned"])
def test_a_hugging_face_dataset(tmp_path, saved):
    import pyarrow.parquet

    folder = write_all(tmp_path / "notes", {"dataset_dict.json" if saved else "README.md": "{}"})
    for split, rows in (("train", slice(0, 2)), ("test", slice(2, 3))):
        table = pyarrow.table({"anchor": QUESTIONS[rows], "positive": TEXTS[rows]})
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        if saved:
            path = folder / split / "data-00000-of-00001.arrow"
        path.parent.mkdir(exist_ok=True)
        if saved:
            with pyarrow.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table)
        else:
            pyarrow.parquet.write_table(table, path)
    _, store = _prepare(tmp_path, {})
    assert sorted(passage.text for passage in store) == sorted(TEXTS)
    assert list_tasks(tmp_path / "data", "c") == {"notes": ["train", "test"]}
    (query,) = QuerySet.open(tmp_path / "data", "c", "notes", "test")
    assert (query.text, store[query.positives[0]].text) == (QUESTIONS[2], TEXTS[2])
    path.write_text("no rows")
    with pytest.raises(DataError, match=rf"{path.name}: no rows of Arrow"):
        _prepare(tmp_path, {})


def test_a_heading_stands_with_what_follows(tmp_path):
    text = "## Methods\n\n" + " ".join(f"word{n}" for n in range(12))
    _, store = _prepare(tmp_path, {"a.txt": text}, passage_words=11)
    assert [passage.text.split()[0] for passage in store] == ["##", "word9"]


def test_rows_without_ids_are_numbered(tmp_path):
    rows = [list(row) for row in zip(TITLES, TEXTS, strict=True)]
    _, store = _prepare(tmp_path, {"passages.csv": _table([["title", "text"], *rows])})
    assert list(store.ids) == ["0", "1", "2"]


def test_a_folder_of_text_files(tmp_path):
    long = " ".join(f"word{n}" for n in range(7))
    files = {
        "a b.txt": f"one two\n\nthree\n\n{long}\n",
        "deep.md/page.md": "intro\n\n# A heading #\n\nbody\n",
        "code.md": "Set up:\n\n```bash\n# install\npip\n```\n\n## Use\n\nrun\n",
        "page.html": "<html><head><title>The <b>title</title><style>p {}</style></head><body>"
        "<h1>Head</h1><p>one &amp; two</p><script>no()</script><p>three</p></body></html>",
        "bare.html": "<h2>Only a heading</h2><p>text</p>",
        "empty.txt": "",
    }
    prepared, store = _prepare(tmp_path, files, passage_words=5)
    passages = {passage.id: (passage.title, passage.text, passage.page_id) for passage in store}
    assert passages == {
        "a_b.txt#0": ("a b", "one two three", "a_b.txt"),
        "a_b.txt#1": ("a b", "word0 word1 word2 word3 word4", "a_b.txt"),
        "a_b.txt#2": ("a b", "word5 word6", "a_b.txt"),
        "bare.html#0": ("Only a heading", "text", "bare.html"),
        "code.md#0": ("Use", "Set up:", "code.md"),
        "code.md#1": ("Use", "```bash # install pip ```", "code.md"),
        "code.md#2": ("Use", "run", "code.md"),
        "deep.md/page.md#0": ("A heading", "intro body", "deep.md/page.md"),
        "page.html#0": ("The title", "Head one & two three", "page.html"),
    }
    assert prepared.left_out == {"empty passages": 1}


def _pairs(*names: str) -> list[dict]:
    negatives = TEXTS[1:] + TEXTS[:1]
    columns = zip(QUESTIONS, TEXTS, negatives, strict=True)
    return [dict(zip(names, values, strict=False)) for values in columns]


ROWS = [list(row) for row in zip(QUESTIONS, TEXTS, strict=True)]
PAIRS = [
    {"train.csv": _table([["anchor", "positive"], *ROWS])},
    {"train.jsonl": _pairs("query", "pos")},
    {"faq.train.csv": _table([["Question", "Answer"], *ROWS])},
    {"qa.train.jsonl": _pairs("question", "context")},
    {"triplets.train.jsonl": _pairs("anchor", "positive", "negative_1")},
]


@pytest.mark.parametrize("files", PAIRS, ids=lambda files: next(iter(files)))
def test_pairs_are_passages_and_queries(tmp_path, files):
    # Answers and pairs come without ids; a repeated passage is one.
    prepared, store = _prepare(tmp_path, files)
    assert sorted(passage.text for passage in store) == sorted(TEXTS)
    queries = [
        query
        for task, splits in list_tasks(tmp_path / "data", "c").items()
        for split in splits
        for query in QuerySet.open(tmp_path / "data", "c", task, split)
    ]
    assert {q.text: store[q.positives[0]].text for q in queries} == dict(
        zip(QUESTIONS, TEXTS, strict=True)
    )
    negatives = {q.text: [store[row].text for row in q.hard_negatives] for q in queries}
    has_negatives = "triplets" in next(iter(files))
    assert negatives[QUESTIONS[0]] == ([TEXTS[1]] if has_negatives else [])
    assert prepared.left_out == {}


def test_pairs_of_several_splits_share_their_passages(tmp_path):
    records = _pairs("anchor", "positive")
    files = {"train.jsonl": records, "test.jsonl": records[:1]}
    prepared, store = _prepare(tmp_path, files)
    assert (len(store), prepared.merged) == (3, 1)
    [query] = QuerySet.open(tmp_path / "data", "c", "notes", "test")
    assert store[query.positives[0]].text == TEXTS[0]


@pytest.mark.parametrize(
    ("topics_file", "qrels_file"),
    [
        ("topics.txt", "qrels.txt"),
        ("topics.301-450", "qrels.trec8.adhoc"),
        ("topics.trec", "cran.qrels"),
    ],
)
def test_trecs_topics_and_judgements_are_test_queries(tmp_path, topics_file, qrels_file):
    topics = "".join(
        f"<top>\n<num> Number: {n}\n<title> {text}\n\n<desc> Description:\nmore\n</top>\n\n"
        for n, text in enumerate(QUESTIONS)
    )
    files = {
        topics_file: topics,
        qrels_file: "0 0 a 1\n1 0 b 2\n2 0 c 0\n9 0 a 1\n",
        "docs.csv": _table_of_passages(","),
    }
    prepared, _ = _prepare(tmp_path, files)
    assert list_tasks(tmp_path / "data", "c") == {"notes": ["test"]}
    queries = list(QuerySet.open(tmp_path / "data", "c", "notes", "test"))
    assert [(q.id, q.text, q.positives, q.relevance) for q in queries] == [
        ("0", QUESTIONS[0], (0,), ()),
        ("1", QUESTIONS[1], (1,), (2,)),
        ("2", QUESTIONS[2], (), ()),
    ]
    assert prepared.splits[0].left_out[MISSING_QUERIES] == 1
    with pytest.raises(DataError, match=r":4, field 'query-id': the query '9' is not in"):
        _prepare(tmp_path, {}, strict=True)


def test_titles_longer_than_their_texts_are_refused(tmp_path):
    rows = [list(row) for row in zip("abc", TITLES, TEXTS, strict=True)]
    with pytest.raises(DataError, match=r"third column, the title, is longer(.|\n)*a first line"):
        _prepare(tmp_path, {"passages.tsv": _table(rows, "\t")})


def test_html_as_people_write_it(tmp_path):
    """Without end tags, with a bare "<", and with cells and lines that are no words of one."""
    page = "<HEAD><TITLE>T</TITLE><style>p {}</style><BODY><p>if 3 < 5 and 7 > 2<p>one<br>two"
    files = {
        "page.html": f"{page}<table><tr><td>Bern<td>Aare</table>",
        "open.html": "<h1>head</h1>" + "<h2>open " * 20_000,
    }
    _, store = _prepare(tmp_path, files, passage_words=100_000)
    texts = {passage.page_id: (passage.title, passage.text) for passage in store}
    assert texts["page.html"] == ("T", "if 3 < 5 and 7 > 2 one two Bern Aare")
    assert texts["open.html"] == ("head", " ".join(["open"] * 20_000))


def test_what_a_retriever_adds_skips_empty_and_repeated_passages_of_files(tmp_path, caplog):
    rows = "id\ttext\n1\tone\n2\t\n1\tone\n"
    path = write_all(tmp_path, {"notes.tsv": rows}) / "notes.tsv"
    with caplog.at_level(logging.WARNING, logger="taser"):
        assert [(passage.id, passage.text) for passage in given_passages(path)] == [("1", "one")]
    assert "notes.tsv: 1 empty passages are left out" in caplog.text
    assert "notes.tsv: 1 repeated passages are left out" in caplog.text


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="found no file of text"):
        _prepare(tmp_path, {"picture.png": "x"})


@pytest.mark.parametrize("one", [{"id": "1", "text": "body"}, Passage("1", "body")])
def test_one_passage_is_not_taken_for_several(one):
    assert [passage.text for passage in given_passages([one])] == ["body"]
    with pytest.raises(DataError, match=r"passages: found one (dict|Passage)(.|\n)*\[passage\]"):
        list(given_passages(one))
