import json
import re

import pytest
from written_files import beir, write

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare import collection
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.mapping import (
    CONTRADICTING,
    MISSING_NEGATIVES,
    MISSING_POSITIVES,
    WITHOUT_POSITIVE,
)
from taser_jax.data.prepare.receipts import left_out_directory
from taser_jax.data.prepare.splits import PrepareOptions, QuestionFiles
from taser_jax.storage.errors import ConfigError, DataError, StorageError

PASSAGES = "id\ttext\ttitle\n1\tfirst\tA\n2\tsecond\tB\n3\tthird\t\n"


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


@pytest.fixture
def files(tmp_path):
    """Writes files by name, `a__qa_csv` for a.qa.csv, and returns their paths."""

    def write_named(**contents):
        return {
            name: write(tmp_path / name.replace("__", ".").replace("_", "."), content)
            for name, content in contents.items()
        }

    return write_named


def _queries(tmp_path, task, split):
    return list(QuerySet.open(tmp_path / "data", "c", task, split))


def _prepare(tmp_path, passages, queries, **options):
    return prepare(
        data_dir=tmp_path / "data",
        collection="c",
        passages=passages,
        queries=queries,
        options=PrepareOptions(**options),
    )


def test_dpr_training_rows_become_rows_of_the_collection(tmp_path, files):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    prepared = _prepare(tmp_path, paths["p__tsv"], {"nq": {"train": paths["t__jsonl"]}})
    first, last = _queries(tmp_path, "nq", "train")
    assert (first.id, first.text, first.task, first.answers) == ("train-0", "by id?", "nq", ("x",))
    assert first.positives == (1, 0)
    assert first.hard_negatives == (2,)  # Without the positive and the unknown one.
    assert (last.id, last.positives) == ("train-2", (2,))
    assert last.hard_negatives == (1,)  # DPR's fallback to the other negatives.
    (split,) = prepared.splits
    assert (split.queries, split.left_out) == (2, {MISSING_NEGATIVES: 1, WITHOUT_POSITIVE: 1})
    assert (prepared.passages, prepared.merged, prepared.reused) == (3, 0, False)
    assert prepared.fingerprint == PassageStore.open(tmp_path / "data", "c").fingerprint


def test_evaluation_questions_have_answers_and_positives(tmp_path, files):
    paths = files(
        p__tsv=PASSAGES,
        dev__jsonl=[
            {"id": id, "question": text, "answers": answers}
            for id, text, answers in (
                ("a1", "who?", ["Ada"]),
                ("a2", "when?", ["1815", "'15"]),
                ("a3", "why?", ["so"]),
            )
        ],
        dev__qa_csv="who?\t['Ada']\nwhen?\t['1815', \"'15\"]\nwhy?\t['so']\n",
        qrels__tsv="a1\t0\t3\t1\na2\t0\t1\t1\na2\t0\t2\t2\na1\t0\t1\t0\n",
        t__jsonl=TRAIN,
    )
    dev = QuestionFiles(paths["dev__jsonl"], qrels=paths["qrels__tsv"])
    tasks = {"nq": {"validation": dev, "test": paths["t__jsonl"]}}
    tasks["qa"] = {"test": paths["dev__qa_csv"]}
    prepared = _prepare(tmp_path, paths["p__tsv"], tasks)
    queries = _queries(tmp_path, "nq", "validation")
    assert [(q.id, q.positives, q.relevance, q.answers) for q in queries] == [
        ("a1", (2,), (), ("Ada",)),
        ("a2", (1, 0), (2, 1), ("1815", "'15")),
        ("a3", (), (), ("so",)),
    ]
    # Kept without a positive: its answers can still be looked for.
    assert [q.id for q in _queries(tmp_path, "nq", "test")] == ["test-0", "q7", "test-2"]
    unnamed = _queries(tmp_path, "qa", "test")[0]
    assert (unnamed.id, unnamed.positives, unnamed.answers) == ("test-0", (), ("Ada",))
    assert [split.left_out[WITHOUT_POSITIVE] for split in prepared.splits] == [1, 1, 3]
    assert list_tasks(tmp_path / "data", "c") == {"nq": ["validation", "test"], "qa": ["test"]}


def test_an_id_of_several_files_needs_a_label(tmp_path, files):
    paths = files(
        a__tsv=PASSAGES,
        b__tsv="id\ttext\ttitle\n1\tsecond\tB\n2\tnew\tN\n",
        q__tsv="x\tquery\n",
        qrels__tsv="x 0 2 1\n",
    )
    labelled = QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"], passages="b")
    _prepare(tmp_path, [paths["a__tsv"], paths["b__tsv"]], {"t": {"test": labelled}})
    assert _queries(tmp_path, "t", "test")[0].positives == (3,)
    unlabelled = QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"])
    with pytest.raises(DataError, match=r"qrels\.tsv:1: the passage id '2' means different"):
        _prepare(tmp_path, [paths["a__tsv"], paths["b__tsv"]], {"t": {"test": unlabelled}})
    with pytest.raises(ConfigError, match="no passage file is labelled 'b'"):
        _prepare(tmp_path, {"x": paths["a__tsv"], "y": paths["b__tsv"]}, {"t": {"test": labelled}})


def test_running_again_does_nothing_until_an_input_or_output_changes(tmp_path, files, monkeypatch):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    tasks = {"nq": {"train": paths["t__jsonl"]}}
    first = _prepare(tmp_path, paths["p__tsv"], tasks)
    with monkeypatch.context() as patched:
        patched.setattr(collection, "write_collection", None)
        again = _prepare(tmp_path, paths["p__tsv"], tasks)
    assert again.reused
    assert (again.splits, again.fingerprint) == (first.splits, first.fingerprint)

    monkeypatch.setattr(collection, "_FORMAT_VERSION", 1)
    assert not _prepare(tmp_path, paths["p__tsv"], tasks).reused
    paths["t__jsonl"].write_text(json.dumps(TRAIN[0]) + "\n")
    changed = _prepare(tmp_path, paths["p__tsv"], tasks)
    assert (changed.splits[0].queries, changed.fingerprint) == (1, first.fingerprint)
    (tmp_path / "data/c/queries/nq/train/metadata.json").unlink()
    rebuilt = _prepare(tmp_path, paths["p__tsv"], tasks)
    assert (rebuilt.splits, rebuilt.reused) == (changed.splits, False)


def test_a_positive_outside_the_collection(tmp_path, files):
    rows = [TRAIN[0], {**TRAIN[2], "positive_ctxs": [_context("gone", "T", passage_id="9")]}]
    paths = files(p__tsv=PASSAGES, t__jsonl=rows)
    tasks = {"nq": {"train": paths["t__jsonl"]}}
    absent = "t.jsonl:2, positive 0: the positive (id '9', title 'T') is not in the"
    with pytest.raises(DataError, match=rf"{re.escape(absent)}(.|\n)*fix: .*leave out --strict"):
        _prepare(tmp_path, paths["p__tsv"], tasks, strict=True)
    assert list_tasks(tmp_path / "data", "c") == {}
    (split,) = _prepare(tmp_path, paths["p__tsv"], tasks).splits
    counts = {MISSING_NEGATIVES: 1, MISSING_POSITIVES: 1, WITHOUT_POSITIVE: 1}
    assert (split.queries, split.left_out) == (1, counts)
    listed = (left_out_directory(tmp_path / "data", "c") / "nq.train.txt").read_text()
    assert absent in listed
    assert "t.jsonl:2, question 'by content?': without a positive" in listed
    unanswered = {
        "nq": {"train": files(u__jsonl=[{"question": "q", "answers": ["a"]}])["u__jsonl"]}
    }
    with pytest.raises(DataError, match=r"there are no queries(.|\n)*BM25_POSITIVES"):
        _prepare(tmp_path, paths["p__tsv"], unanswered)


def test_contradicting_judgements_count_once_with_the_highest_grade(tmp_path, files):
    paths = files(
        p__tsv=PASSAGES, q__tsv="a\tq\n", qrels__tsv="a 0 1 1\na 0 2 0\na 0 1 2\na 0 1 2\na 0 2 1\n"
    )
    tasks = {"t": {"test": QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"])}}
    (split,) = _prepare(tmp_path, paths["p__tsv"], tasks).splits
    [query] = _queries(tmp_path, "t", "test")
    assert (query.positives, query.relevance) == ((0, 1), (2, 1))
    assert split.left_out == {CONTRADICTING: 2}
    with pytest.raises(DataError, match=r"qrels\.tsv:1: the grade 1, where another line has 2"):
        _prepare(tmp_path, paths["p__tsv"], tasks, strict=True)


def test_bad_question_files_name_the_line(tmp_path, files):
    paths = files(
        p__tsv=PASSAGES,
        twice__jsonl=[{**TRAIN[0], "qid": "q"}, {**TRAIN[2], "qid": "q"}],
        q__tsv="a1\twho?\na2\twhen?\n",
        foreign__tsv="b1 0 1 1\n",
    )

    def fails(match, split="test", **given):
        tasks = {"nq": {split: QuestionFiles(**given)}}
        with pytest.raises(DataError, match=match):
            _prepare(tmp_path, paths["p__tsv"], tasks, strict=True)

    fails(
        r"twice\.jsonl:2, field 'id': the id 'q' was already used at .*twice\.jsonl:1",
        questions=paths["twice__jsonl"],
    )
    dev = paths["q__tsv"]
    fails(r"foreign\.tsv: not one of its 1", questions=dev, qrels=paths["foreign__tsv"])


def test_inputs_are_checked_before_anything_is_built(tmp_path, files):
    paths = files(p__tsv=PASSAGES)
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        _prepare(tmp_path, paths["p__tsv"], {"nq": {"train": tmp_path / "gone.jsonl"}})
    with pytest.raises(ConfigError, match="task name 'my questions'"):
        _prepare(tmp_path, paths["p__tsv"], {"my questions": {"train": paths["p__tsv"]}})
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        prepare(data_dir=tmp_path / "file", collection="c", passages=paths["p__tsv"])


def _beir(folder, prefix, documents):
    return beir(
        folder,
        corpus=documents,
        queries={f"{prefix}{n}": f"{n}?" for n in range(3)},
        test=[f"{prefix}0 1 1", f"{prefix}1 2 0"],
    )


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
