"""Questions and judgements as rows of one collection: DPR's contexts, qrels, and what they lack."""

import re

import pytest
from written_files import beir, write_all

from taser_jax.data.collections.store import PassageStore, list_tasks
from taser_jax.data.prepare.collection import left_out_directory, prepare
from taser_jax.data.prepare.mapping import (
    CONTRADICTING,
    MISSING_NEGATIVES,
    MISSING_POSITIVES,
    WITHOUT_POSITIVE,
)
from taser_jax.data.prepare.splits import QuestionFiles
from taser_jax.storage.errors import ConfigError, DataError, StorageError


def _context(text, title="", **more):
    return {"title": title, "text": text, **more}


TRAIN = [
    {
        "question": "by id?",
        "answers": ["x"],
        "positive_ctxs": [_context("cleaned", "A", passage_id="2"), _context("first", "A")],
        "hard_negative_ctxs": [_context("third"), _context("first", "A"), _context("unknown")],
        "negative_ctxs": [_context("second", "B")],
    },
    {"question": "none?", "answers": ["y"], "positive_ctxs": [], "qid": "q7"},
    {
        "question": "by content?",
        "answers": [],
        "positive_ctxs": [_context(" third ")],
        "negative_ctxs": [_context("second", "B")],
    },
]
GONE = {**TRAIN[2], "positive_ctxs": [_context("gone", "T", passage_id="9")]}


@pytest.fixture(autouse=True)
def files(tmp_path):
    contents = {
        "p.tsv": "id\ttext\ttitle\n1\tfirst\tA\n2\tsecond\tB\n3\tthird\t\n",
        "other.tsv": "id\ttext\ttitle\n1\tsecond\tB\n2\tnew\tN\n",
        "t.jsonl": TRAIN,
        "gone.jsonl": [TRAIN[0], GONE],
        "twice.jsonl": [{**TRAIN[0], "qid": "q"}, {**TRAIN[2], "qid": "q"}],
        "bare.jsonl": [{"question": "q", "answers": ["a"]}],
        "dev.qa.csv": "who?\t['Ada']\nwhen?\t['1815', \"'15\"]\nwhy?\t['so']\n",
        "q.tsv": "x\tquery\n",
        "merged.tsv": "x 0 2 1\n",
        "twice.tsv": "x 0 1 1\nx 0 2 0\nx 0 1 2\nx 0 1 2\nx 0 2 1\n",
        "foreign.tsv": "b1 0 1 1\n",
        "absent.tsv": "x 0 77 1\n",
    }
    return write_all(tmp_path, contents)


def test_dpr_training_rows_become_rows_of_the_collection(tmp_path, prepare_here, queries_of):
    prepared = prepare_here("p.tsv", {"nq": {"train": "t.jsonl"}})
    first, last = queries_of("nq", "train")
    assert (first.id, first.text, first.task, first.answers) == ("train-0", "by id?", "nq", ("x",))
    assert first.positives == (1, 0)
    assert first.hard_negatives == (2,)  # Without the positive and the unknown one.
    assert (last.id, last.positives) == ("train-2", (2,))
    assert last.hard_negatives == (1,)  # DPR's fallback to the other negatives.
    (split,) = prepared.splits
    assert (split.queries, split.left_out) == (2, {MISSING_NEGATIVES: 1, WITHOUT_POSITIVE: 1})
    assert (prepared.passages, prepared.merged) == (3, 0)
    assert prepared.fingerprint == PassageStore.open(tmp_path / "data", "c").fingerprint


def test_evaluation_questions_have_answers_and_positives(tmp_path, prepare_here, queries_of):
    asked = {"a1": ("who?", ["Ada"]), "a2": ("when?", ["1815", "'15"]), "a3": ("why?", ["so"])}
    dev = [{"id": id, "question": text, "answers": said} for id, (text, said) in asked.items()]
    qrels = "a1\t0\t3\t1\na2\t0\t1\t1\na2\t0\t2\t2\na1\t0\t1\t0\n"
    write_all(tmp_path, {"dev.jsonl": dev, "qrels.tsv": qrels})
    judged = QuestionFiles("dev.jsonl", qrels="qrels.tsv")
    tasks = {"nq": {"validation": judged, "test": "t.jsonl"}, "qa": {"test": "dev.qa.csv"}}
    prepared = prepare_here("p.tsv", tasks)
    found = queries_of("nq", "validation")
    assert [(query.id, query.positives, query.relevance, query.answers) for query in found] == [
        ("a1", (2,), (), ("Ada",)),
        ("a2", (1, 0), (2, 1), ("1815", "'15")),
        ("a3", (), (), ("so",)),
    ]
    # Kept without a positive: its answers can still be looked for.
    assert [q.id for q in queries_of("nq", "test")] == ["test-0", "q7", "test-2"]
    unnamed = queries_of("qa", "test")[0]
    assert (unnamed.id, unnamed.positives, unnamed.answers) == ("test-0", (), ("Ada",))
    assert [split.left_out[WITHOUT_POSITIVE] for split in prepared.splits] == [1, 1, 3]
    assert list_tasks(tmp_path / "data", "c") == {"nq": ["validation", "test"], "qa": ["test"]}


def test_an_id_of_several_files_is_that_of_the_labelled_one(prepare_here, queries_of):
    labelled = {"t": {"test": QuestionFiles("q.tsv", qrels="merged.tsv", passages="other")}}
    prepare_here(["p.tsv", "other.tsv"], labelled)
    assert queries_of("t", "test")[0].positives == (3,)
    with pytest.raises(ConfigError, match="no passage file is labelled 'other'"):
        prepare_here({"x": "p.tsv", "y": "other.tsv"}, labelled)


def test_a_positive_outside_the_collection(tmp_path, prepare_here):
    tasks = {"nq": {"train": "gone.jsonl"}}
    absent = "gone.jsonl:2, positive 0: the positive (id '9', title 'T') is not in the"
    with pytest.raises(DataError, match=rf"{re.escape(absent)}(.|\n)*fix: .*leave out --strict"):
        prepare_here("p.tsv", tasks, strict=True)
    assert list_tasks(tmp_path / "data", "c") == {}
    (split,) = prepare_here("p.tsv", tasks).splits
    counts = {MISSING_NEGATIVES: 1, MISSING_POSITIVES: 1, WITHOUT_POSITIVE: 1}
    assert (split.queries, split.left_out) == (1, counts)
    listed = (left_out_directory(tmp_path / "data", "c") / "nq.train.txt").read_text()
    assert absent in listed
    assert "gone.jsonl:2, question 'by content?': without a positive" in listed
    with pytest.raises(DataError, match=r"there are no queries(.|\n)*BM25_POSITIVES"):
        prepare_here("p.tsv", {"nq": {"train": "bare.jsonl"}})


def test_contradicting_judgements_count_once_with_the_highest_grade(prepare_here, queries_of):
    tasks = {"t": {"test": QuestionFiles("q.tsv", qrels="twice.tsv")}}
    (split,) = prepare_here("p.tsv", tasks).splits
    [query] = queries_of("t", "test")
    assert (query.positives, query.relevance) == ((0, 1), (2, 1))
    assert split.left_out == {CONTRADICTING: 2}
    with pytest.raises(DataError, match=r"twice\.tsv:1: the grade 1, where another line has 2"):
        prepare_here("p.tsv", tasks, strict=True)


@pytest.mark.parametrize(
    ("questions", "qrels", "message"),
    [
        ("twice.jsonl", None, r"jsonl:2, field 'id': the id 'q' was already used at .*jsonl:1"),
        ("q.tsv", "foreign.tsv", r"foreign\.tsv: not one of its 1"),
        ("q.tsv", "absent.tsv", r"absent\.tsv: not one of its 1 passages is in the .*\n.*'77'"),
        ("none.jsonl", None, r"none\.jsonl: cannot be read"),
    ],
)
def test_bad_question_files_are_named(tmp_path, prepare_here, questions, qrels, message):
    with pytest.raises(DataError, match=message):
        prepare_here("p.tsv", {"nq": {"test": QuestionFiles(questions, qrels=qrels)}})
    # A file that is missing is reported before anything is built.
    assert (tmp_path / "data").exists() == (questions != "none.jsonl")


def test_a_name_or_folder_that_cannot_be(tmp_path, prepare_here):
    with pytest.raises(ConfigError, match="task name 'my questions'"):
        prepare_here("p.tsv", {"my questions": {"train": "p.tsv"}})
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").write_text("")
    with pytest.raises(StorageError):
        prepare_here("p.tsv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": {"t": {"dev": "q.tsv"}}}, "splits dev"),
        ({"queries": {"t": {"train+train": "q.tsv"}}}, r"splits train\+train"),
        ({"queries": {"t": {"train": "q.tsv", "train+test": "q.tsv"}}}, "splits train, train"),
        ({"passages": None}, "neither a folder nor a file of passages is given"),
        ({"entity_tasks": ("aida",)}, "entity_tasks: it names 'aida'; the tasks are t"),
        ({"split_by_page": ("sett",)}, "split_by_page: it names 'sett'; the tasks are t"),
        ({"task_shares": {"t": {"train": 1.0}}}, "shares {'train': 1.0}"),
        ({"distractors": 2.0}, "1 or less"),
        ({"validation_last": 5, "split_groups": {"t": "^."}}, "validation_last, whose questions"),
        ({"validation_last": -1}, "validation_last is -1"),
    ],
)
def test_settings_that_cannot_be(prepare_here, arguments, message):
    with pytest.raises(ConfigError, match=message):
        prepare_here(**{"passages": "p.tsv", "queries": {"t": "q.tsv"}, **arguments})


def _beir(folder, prefix, documents):
    queries = {f"{prefix}{n}": f"{n}?" for n in range(3)}
    judged = [f"{prefix}0 1 1", f"{prefix}1 2 0"]
    return beir(folder, corpus=documents, queries=queries, test=judged)


def test_tasks_and_labels_of_one_name_are_named_with_their_folders(tmp_path):
    first = _beir(tmp_path / "a" / "faq", "a", {"1": "x"})
    second = _beir(tmp_path / "b" / "faq", "b", {"1": "y"})
    arguments = {"data_dir": tmp_path / "data", "collection": "c"}
    with pytest.raises(ConfigError, match=r"directories: two have the same name: .*b/faq"):
        prepare(**arguments, directories=[first, second])
    tasks = {"faq": {"test": first / "queries.jsonl"}}
    with pytest.raises(ConfigError, match=r"b/faq: faq is a task or name of another(.|\n)*rename"):
        prepare(**arguments, passages=first / "corpus.jsonl", queries=tasks, directories=second)
    splits = prepare(**arguments, directories={"first": first, "second": second}).splits
    assert [(split.task, split.queries) for split in splits] == [("first", 2), ("second", 2)]
