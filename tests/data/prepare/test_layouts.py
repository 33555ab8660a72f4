"""Data as people have it: the same documents in many layouts become the same collection."""

import csv
import io
import logging
from collections.abc import Iterable, Sequence

import pyarrow.parquet
import pytest
from written_files import write_all

from taser_jax.data.collections.store import list_tasks
from taser_jax.data.prepare.detection import given_passages
from taser_jax.data.prepare.mapping import EMPTY_QUESTIONS, MISSING_QUERIES
from taser_jax.data.prepare.splits import FEWEST
from taser_jax.storage.errors import DataError
from taser_jax.storage.records import Passage

TITLES = ["Bern", "Aare", "Bears"]
TEXTS = ["A city, on a river.", 'A "river" in Bern; it is long.', "They live in the city."]
QUESTIONS = ["which city", "which river", "which animals"]


def _table(rows: list[list[str]], delimiter: str = ",") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _arrow(*, parquet: bool = True, **columns: list[str]) -> bytes:
    table, file = pyarrow.table(columns), io.BytesIO()
    if parquet:
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return file.getvalue()


def _records(rows: Iterable[Sequence[str]], *names: str) -> list[dict]:
    return [dict(zip(names, row, strict=False)) for row in rows]


ROWS = [list(row) for row in zip(TITLES, TEXTS, "abc", strict=True)]
TABLE = _table([["Title", "Content", "doc-id"], *ROWS])
PASSAGES = {
    "passages.csv": TABLE,
    "export.csv": _table([["Title", "Content", "doc-id"], *ROWS], ";"),
    "excel.csv": "sep=;\n" + _table([["Title", "Content", "doc-id"], *ROWS], ";"),
    "judged.tsv": _table([["Title", "Content", "passage_id"], *ROWS], "\t"),
    "docs.jsonl": _records(ROWS, "title", "contents", "docid"),
    "chunks.ndjson": _records(ROWS, "title", "page_content", "chunk_id"),
    "docs.sgml": "\n"
    + "".join(
        f"<DOC>\n<DOCNO> {id} </DOCNO>\n<TITLE>{title}</TITLE>\n<TEXT>\n{text}\n</TEXT>\n</DOC>\n"
        for title, text, id in ROWS
    ),
    "docs.trec": "".join(
        f"<doc><docno>{id}</docno><HEAD>{title}</HEAD>\n<TEXT>{text}</TEXT></doc>"
        for title, text, id in ROWS
    ),
    "docs.parquet": _arrow(doc_id=list("abc"), heading=TITLES, body=TEXTS),
}


@pytest.mark.parametrize("name", PASSAGES)
def test_passages_alone_by_the_names_of_their_fields(prepare_notes, name):
    prepared, store = prepare_notes({name: PASSAGES[name]})
    assert [[passage.title, passage.text, passage.id] for passage in store] == ROWS
    assert prepared.splits == ()


@pytest.mark.parametrize("saved", [True, False], ids=["save_to_disk", "cloned"])
def test_a_hugging_face_dataset(tmp_path, saved, prepare_notes, queries_of):
    files = {"dataset_dict.json" if saved else "README.md": "{}"}
    shards = ("train", "00000-of-00002"), ("train", "00001-of-00002"), ("test", "00000-of-00001")
    for (split, shard), question, text in zip(shards, QUESTIONS, TEXTS, strict=True):
        name = f"{split}/data-{shard}.arrow" if saved else f"data/{split}-{shard}.parquet"
        files[name] = _arrow(parquet=not saved, anchor=[question], positive=[text])
        files[f"{split}/cache-0f.arrow" if saved else ".lock"] = files[name]
    _, store = prepare_notes(files)
    assert sorted(passage.text for passage in store) == sorted(TEXTS)
    assert list_tasks(tmp_path / "data", "c") == {"notes": ["train", "test"]}
    (query,) = queries_of("notes", "test")
    assert (query.text, store[query.positives[0]].text) == (QUESTIONS[2], TEXTS[2])
    with pytest.raises(DataError, match=rf"{name}: no rows of Arrow"):
        prepare_notes({name: "no rows"})
    (tmp_path / "notes" / next(file for file in files if "00001-of-00002" in file)).unlink()
    with pytest.raises(DataError, match=r"train.*-of-00002.*: 1 of these shards are there"):
        prepare_notes({name: files[name]})


def test_a_data_set_of_mteb(prepare_notes, queries_of, caplog):
    ends = "00000-of-00001.parquet"
    files = {
        f"corpus/corpus-{ends}": _arrow(_id=list("abc"), title=TITLES, text=TEXTS),
        f"queries/queries-{ends}": _arrow(_id=list("xyz"), text=QUESTIONS),
        f"data/test-{ends}": _arrow(**{"query-id": ["y"], "corpus-id": ["b"], "score": ["1.0"]}),
        f"data/train-{ends}": _arrow(**{"query-id": ["x"], "corpus-id": ["a"], "score": ["1"]}),
        "README.md": "card",
        "more.xlsx": "",
    }
    _, store = prepare_notes(files)
    assert list(store.ids) == list("abc")
    for split, asked in {"train": ("x", (0,)), "test": ("y", (1,))}.items():
        assert [(query.id, query.positives) for query in queries_of("notes", split)] == [asked]
    assert "2 other files are left out, such as " in caplog.text
    assert "notes/more.xlsx: the passages are those of " in caplog.text


@pytest.mark.parametrize("name", ["test-00000-of-00001.parquet", "test.jsonl"])
def test_passages_of_ms_marco_by_their_marks(prepare_notes, queries_of, name):
    """The second question has no passage that answers it, and no answer is a passage."""
    marked = {"is_selected": [0, 1, 0], "passage_text": TEXTS, "url": list("xyz")}
    unmarked = {"is_selected": [0], "passage_text": ["No city."], "url": ["z"]}
    answers = [["Aare"], ["No Answer Present."]]
    columns = {"query": QUESTIONS[:2], "answers": answers, "query_id": [7, 8]}
    content = _arrow(**columns, passages=[marked, unmarked])
    if name.endswith("jsonl"):
        lists = [_records(zip(*of.values(), strict=True), *of) for of in (marked, unmarked)]
        fields = zip(*columns.values(), lists, strict=True)
        content = _records(fields, *columns, "passages")
    _, store = prepare_notes({name: content})
    assert sorted(passage.text for passage in store) == sorted([*TEXTS, "No city."])
    first, second = queries_of("notes", "test")
    assert (first.id, first.answers, second.answers) == ("7", ("Aare",), ())
    assert [store[row].text for row in first.positives] == [TEXTS[1]]
    assert {store[row].text for row in first.hard_negatives} == {TEXTS[0], TEXTS[2]}
    assert second.positives == ()


def test_questions_of_lotte_name_their_passages(prepare_notes, queries_of):
    asked = [{"qid": 0, "query": QUESTIONS[1], "url": "x", "answer_pids": [1, 2]}]
    collection = "".join(f"{number}\t{text}\n" for number, text in enumerate(TEXTS))
    prepare_notes({"collection.tsv": collection, "qas.search.test.jsonl": asked})
    (query,) = queries_of("qas-search", "test")
    assert (query.text, query.positives) == (QUESTIONS[1], (1, 2))


@pytest.mark.parametrize("name", ["doc_id", "chunk_id"])
def test_questions_name_their_passages_in_a_column(prepare_notes, queries_of, name):
    asked = _table([["question", "answer", name], ["q1", "a", "b"], ["q2", "a", "b"]])
    prepare_notes({"docs.csv": TABLE, "faq.test.csv": asked})
    found = [(query.text, query.positives) for query in queries_of("faq", "test")]
    assert found == [("q1", (1,)), ("q2", (1,))]


def test_rows_without_ids_are_numbered(prepare_notes):
    _, store = prepare_notes({"passages.csv": "title,text\nBern,A city\nAare,A river\nX,x\n"})
    assert list(store.ids) == ["0", "1", "2"]
    # Of a table by its name one known column is enough.
    _, store = prepare_notes({"passages.csv": "url,text\nx,A city\ny,A river\n"})
    assert [passage.text for passage in store] == ["A city", "A river"]
    records = [{"text": "a"}, {"id": "b", "text": "b"}]
    _, store = prepare_notes({"passages.csv": "", "corpus.jsonl": records})
    assert list(store.ids) == ["0", "b"]


def _pairs(*names: str) -> list[dict]:
    negatives = TEXTS[1:] + TEXTS[:1]
    return _records(zip(QUESTIONS, TEXTS, negatives, strict=True), *names)


ASKED = [list(row) for row in zip(QUESTIONS, TEXTS, strict=True)]
PAIRS = [
    {"train.csv": _table([["anchor", "positive"], *ASKED])},
    {"train.jsonl": _pairs("query", "pos")},
    {"faq.train.csv": _table([["Question", "Answer"], *ASKED])},
    {"judged.train.jsonl": [each | {"response": "no"} for each in _pairs("question", "answer")]},
    {"plural.train.csv": _table([["Questions", "Answers"], *ASKED])},
    {"plain.train.csv": _table([["question", "answers"], *ASKED])},
    {"listed.train.csv": _table([["query", "answers"], *([q, str([text])] for q, text in ASKED)])},
    {"qa.train.jsonl": _pairs("question", "context")},
    {"triplets.train.jsonl": _pairs("anchor", "positive", "negative_1")},
    {"triplets.train.json": _pairs("query", "positive_passages", "negative_passages")},
    # Pandas numbers rows in a column without a name: these are no grades.
    {"pandas.train.csv": _table([["", "question", "answer"], *([n, *ASKED[n]] for n in range(3))])},
    # A topic of several questions is no id.
    {"qa.train.csv": _table([["question", "answer", "topic"], *([*row, "Bern"] for row in ASKED)])},
]


@pytest.mark.parametrize("files", PAIRS, ids=lambda files: next(iter(files)))
def test_pairs_are_passages_and_queries(tmp_path, files, prepare_notes, queries_of):
    # Answers and pairs come without ids; a repeated passage is one.
    prepared, store = prepare_notes(files)
    assert sorted(passage.text for passage in store) == sorted(TEXTS)
    [task] = list_tasks(tmp_path / "data", "c")
    queries = queries_of(task, "train")
    assert sorted([q.text, store[q.positives[0]].text] for q in queries) == sorted(ASKED)
    negatives = {q.text: [store[row].text for row in q.hard_negatives] for q in queries}
    has_negatives = "triplets" in next(iter(files))
    assert negatives[QUESTIONS[0]] == ([TEXTS[1]] if has_negatives else [])
    assert prepared.left_out == {}


def test_pairs_of_several_splits_share_their_passages(prepare_notes, queries_of):
    records = _pairs("anchor", "positive")
    prepared, store = prepare_notes({"train.jsonl": records, "test.jsonl": records[:1]})
    assert (len(store), prepared.merged) == (3, 1)
    [query] = queries_of("notes", "test")
    assert store[query.positives[0]].text == TEXTS[0]


@pytest.mark.parametrize("columns", [["anchor", "positive"], ["anchor", "positive", "id"]])
def test_rows_that_ask_the_same_are_in_one_split(columns, prepare_notes, queries_of):
    rows = [[f"q{n // 3}", f"text {n}", str(n)][: len(columns)] for n in range(300)]
    prepare_notes({"pairs.csv": _table([columns, *rows])})
    of_split = {split: queries_of("pairs", split) for split in ("train", "validation", "test")}
    asked = [{query.text for query in queries} for queries in of_split.values()]
    assert sum(map(len, asked)) == len(set.union(*asked)) == 100
    # With ids of their own they remain queries of their own.
    rows_of = {len(query.positives) for queries in of_split.values() for query in queries}
    assert rows_of == ({1} if "id" in columns else {3})


def test_no_task_trains_on_what_another_is_tested_on(prepare_notes, queries_of):
    def table(answer: str) -> str:
        return _table([["question", "answer"], *([f"q{n}", f"{answer} {n}"] for n in range(100))])

    prepare_notes({"short.csv": table("short"), "long.csv": table("long")})
    for split in ("train", "validation", "test"):
        short, long = ([q.text for q in queries_of(task, split)] for task in ("short", "long"))
        assert short == long


def test_few_questions_are_all_of_the_test(prepare_notes, caplog):
    def splits(count: int, **options) -> dict[str, int]:
        rows = [[f"q{n}", f"text {n}"] for n in range(count)]
        prepared, _ = prepare_notes({"faq.csv": _table([["anchor", "positive"], *rows])}, **options)
        return {split.split: split.queries for split in prepared.splits}

    with caplog.at_level(logging.INFO, logger="taser"):
        assert splits(5) == {"test": 5}
    assert "fewer than 60 questions are not divided, all are for the test: faq" in caplog.text
    assert splits(FEWEST - 1) == {"test": FEWEST - 1}
    assert set(splits(FEWEST)) == {"train", "validation", "test"}
    # Unless somebody says how.
    shares = {"faq": {"train": 0.5, "validation": 0.2, "test": 0.3}}
    assert set(splits(30, task_shares=shares)) == {"train", "validation", "test"}


# Some of TREC's files begin with an empty line.
SGML = "\n" + "".join(
    f"<top>\n<num> Number: {n}\n<title> {text}\n\n<desc> Description:\nmore\n</top>\n\n"
    for n, text in enumerate(QUESTIONS)
)
TOPICS = [f'<topic number="{n}"><query>{text}</query></topic>' for n, text in enumerate(QUESTIONS)]
XML = "\n".join(['<?xml version="1.0"?>', '<topics task="COVIDSearch">', *TOPICS, "</topics>"])
QRELS = "0 0 a 1\n1 0 b 2\n2 0 c 0\n9 0 a 1\n"
TREC = [
    {"topics.txt": SGML, "qrels.txt": QRELS},
    {"topics.301-450": SGML, "qrels.trec8.adhoc": QRELS},
    {"topics.trec": SGML, "cran.qrels": QRELS},
    {"topics.xml": XML, "qrels.txt": QRELS},
]


@pytest.mark.parametrize("files", TREC, ids=lambda files: next(iter(files)))
def test_trecs_topics_and_judgements_are_test_queries(tmp_path, files, prepare_notes, queries_of):
    prepared, _ = prepare_notes({"docs.csv": TABLE, **files})
    assert list_tasks(tmp_path / "data", "c") == {"notes": ["test"]}
    assert [(q.id, q.text, q.positives, q.relevance) for q in queries_of("notes", "test")] == [
        ("0", QUESTIONS[0], (0,), ()),
        ("1", QUESTIONS[1], (1,), (2,)),
        ("2", QUESTIONS[2], (), ()),
    ]
    assert prepared.splits[0].left_out[MISSING_QUERIES] == 1
    with pytest.raises(DataError, match=r":4, field 'query-id': the query '9' is not in"):
        prepare_notes({}, strict=True)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("notes.test.queries.csv", "id,question\n0,who?\n1, \n"),
        ("notes.test.queries.tsv", "0\twho?\n1\t \n"),
        ("notes.test.queries.jsonl", '{"_id": "0", "text": "who?"}\n{"_id": "1", "text": ""}\n'),
    ],
)
def test_empty_questions_are_left_out(file, content, prepare_notes, queries_of):
    qrels = {"notes.test.qrels.tsv": "0 0 a 1\n1 0 b 1\n"}
    prepared, _ = prepare_notes({file: content, "docs.csv": TABLE, **qrels})
    (split,) = prepared.splits
    assert [query.text for query in queries_of("notes", "test")] == ["who?"]
    assert split.left_out[EMPTY_QUESTIONS] == 1
    with pytest.raises(DataError, match=r":[23]: the question is empty"):
        prepare_notes({}, strict=True)


def test_what_a_retriever_adds_skips_empty_and_repeated_passages_of_files(tmp_path, caplog):
    rows = "id\ttext\n1\tone\n2\t\n1\tone\n"
    path = write_all(tmp_path, {"notes.tsv": rows}) / "notes.tsv"
    assert [(passage.id, passage.text) for passage in given_passages(path)] == [("1", "one")]
    assert "notes.tsv: 1 empty passages are left out" in caplog.text
    assert "notes.tsv: 1 repeated passages are left out" in caplog.text
    page = write_all(tmp_path, {"page.md": "# Bern\n\nA city.\n"}) / "page.md"
    assert list(given_passages(page)) == [Passage("page.md#0", "A city.", "Bern", "page.md")]


@pytest.mark.parametrize("one", [{"id": "1", "text": "body"}, Passage("1", "body")])
def test_one_passage_is_not_taken_for_several(one):
    assert [passage.text for passage in given_passages([one])] == ["body"]
    with pytest.raises(DataError, match=r"passages: found one (dict|Passage)(.|\n)*\[passage\]"):
        list(given_passages(one))


def test_an_id_that_cannot_be_saved_is_not_taken():
    with pytest.raises(DataError, match="passage 1: the id 'a b' has a space"):
        list(given_passages([Passage("a", "body"), Passage("a b", "body")]))
