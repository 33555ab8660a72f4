import json

import pytest

from taser_jax.data.collections.store import PassageStore, QuerySet, list_tasks
from taser_jax.data.prepare import formats as prepare
from taser_jax.data.prepare.formats import prepare_beir, prepare_dpr, prepare_tsv
from taser_jax.data.prepare.questions import (
    MissingPassages,
    NoPositive,
    PrepareOptions,
    QuestionFiles,
)
from taser_jax.storage.errors import ConfigError, DataError, StorageError
from taser_jax.storage.records import EmptyPassages

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
    """Writes files by name and returns their paths."""

    def write(**contents):
        paths = {}
        for name, content in contents.items():
            base, _, suffix = name.partition("__")
            path = tmp_path / f"{base}.{suffix.replace('_', '.')}"
            if not isinstance(content, str):
                content = "".join(json.dumps(row) + "\n" for row in content)
            path.write_text(content)
            paths[name] = path
        return paths

    return write


def _queries(tmp_path, task, split):
    return list(QuerySet.open(tmp_path / "data", "c", task, split))


def _dpr(tmp_path, passages, tasks, **options):
    return prepare_dpr(
        data_dir=tmp_path / "data",
        collection="c",
        passages=passages,
        tasks=tasks,
        options=PrepareOptions(**options),
    )


def test_dpr_training_rows_become_rows_of_the_collection(tmp_path, files):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    prepared = _dpr(tmp_path, paths["p__tsv"], {"nq": {"train": paths["t__jsonl"]}})
    first, last = _queries(tmp_path, "nq", "train")
    assert (first.id, first.text, first.task, first.answers) == ("train-0", "by id?", "nq", ("x",))
    assert first.positives == (1, 0)
    assert first.hard_negatives == (2,)  # Without the positive and the unknown one.
    assert (last.id, last.positives) == ("train-2", (2,))
    assert last.hard_negatives == (1,)  # DPR's fallback to the other negatives.
    (split,) = prepared.splits
    assert (split.queries, split.without_positive, split.missing_hard_negatives) == (2, 1, 1)
    assert (prepared.passages, prepared.merged, prepared.reused) == (3, 0, False)
    assert prepared.fingerprint == PassageStore.open(tmp_path / "data", "c").fingerprint


def test_evaluation_questions_have_answers_and_positives(tmp_path, files):
    paths = files(
        p__tsv=PASSAGES,
        dev__qa_csv="who?\t['Ada']\nwhen?\t['1815', \"'15\"]\nwhy?\t['so']\n",
        ids__tsv="a1\twho?\na2\twhen?\na3\twhy?\n",
        qrels__tsv="a1\t0\t3\t1\na2\t0\t1\t1\na2\t0\t2\t2\na1\t0\t1\t0\n",
        t__jsonl=TRAIN,
    )
    dev = QuestionFiles(paths["dev__qa_csv"], ids=paths["ids__tsv"], qrels=paths["qrels__tsv"])
    tasks = {"nq": {"validation": dev, "test": paths["t__jsonl"]}, "qa": {"test": dev.questions}}
    prepared = _dpr(tmp_path, paths["p__tsv"], tasks)
    found = _queries(tmp_path, "nq", "validation")
    assert [(q.id, q.positives, q.relevance, q.answers) for q in found] == [
        ("a1", (2,), (), ("Ada",)),
        ("a2", (1, 0), (2, 1), ("1815", "'15")),
        ("a3", (), (), ("so",)),
    ]
    # Kept without a positive: its answers can still be looked for.
    assert [q.id for q in _queries(tmp_path, "nq", "test")] == ["test-0", "q7", "test-2"]
    unnamed = _queries(tmp_path, "qa", "test")[0]
    assert (unnamed.id, unnamed.positives, unnamed.answers) == ("test-0", (), ("Ada",))
    assert [split.without_positive for split in prepared.splits] == [1, 1, 3]
    assert list_tasks(tmp_path / "data", "c") == {"nq": ["validation", "test"], "qa": ["test"]}


def test_several_passage_files_are_merged(tmp_path, files):
    paths = files(
        a__tsv=PASSAGES,
        b__tsv="id\ttext\ttitle\n1\tsecond\tB\n2\tnew\tN\n",
        t__jsonl=[
            {
                "question": "q",
                "answers": [],
                "positive_ctxs": [_context("second", "B", passage_id="1")],
            }
        ],
        q__tsv="x\tquery\n",
        qrels__tsv="x 0 2 1\n",
    )
    labelled = QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"], passages="b")
    tasks = {"t": {"train": paths["t__jsonl"], "test": labelled}}
    prepared = _dpr(tmp_path, [paths["a__tsv"], paths["b__tsv"]], tasks)
    assert (prepared.passages, prepared.merged, prepared.renamed) == (4, 1, 1)
    assert _queries(tmp_path, "t", "train")[0].positives == (1,)
    assert _queries(tmp_path, "t", "test")[0].positives == (3,)
    store = PassageStore.open(tmp_path / "data", "c")
    assert (store[3].id, store.row_of("b:1")) == ("b:2", 1)

    unlabelled = QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"])
    with pytest.raises(DataError, match=r"qrels\.tsv:1: the passage id '2' means different"):
        _dpr(tmp_path, [paths["a__tsv"], paths["b__tsv"]], {"t": {"test": unlabelled}})
    with pytest.raises(ConfigError, match="no passage file is labelled 'b'"):
        _dpr(tmp_path, {"x": paths["a__tsv"], "y": paths["b__tsv"]}, {"t": {"test": labelled}})
    with pytest.raises(ConfigError, match="two passage files have the same name"):
        _dpr(tmp_path, [paths["a__tsv"], paths["a__tsv"]], {})


def test_running_again_does_nothing_until_an_input_or_output_changes(tmp_path, files, monkeypatch):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    tasks = {"nq": {"train": paths["t__jsonl"]}}
    first = _dpr(tmp_path, paths["p__tsv"], tasks)
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "write_collection", None)
        again = _dpr(tmp_path, paths["p__tsv"], tasks)
    assert again.reused
    assert (again.splits, again.fingerprint) == (first.splits, first.fingerprint)

    strict = {"train_without_positive": NoPositive.KEEP}
    assert _dpr(tmp_path, paths["p__tsv"], tasks, **strict).splits[0].queries == 3
    paths["t__jsonl"].write_text(json.dumps(TRAIN[0]) + "\n")
    changed = _dpr(tmp_path, paths["p__tsv"], tasks)
    assert (changed.splits[0].queries, changed.fingerprint) == (1, first.fingerprint)
    (tmp_path / "data/c/queries/nq/train/metadata.json").unlink()
    rebuilt = _dpr(tmp_path, paths["p__tsv"], tasks)
    assert (rebuilt.splits, rebuilt.reused) == (changed.splits, False)


def test_a_positive_outside_the_collection(tmp_path, files):
    rows = [TRAIN[0], {**TRAIN[2], "positive_ctxs": [_context("gone", "T", passage_id="9")]}]
    paths = files(p__tsv=PASSAGES, t__jsonl=rows)
    tasks = {"nq": {"train": paths["t__jsonl"]}}
    with pytest.raises(
        DataError,
        match=r"t\.jsonl:2, positive_ctxs\[0\]: the positive \(id '9', title 'T'\) is not in the"
        r"(.|\n)*fix: .*missing_positives = 'drop'",
    ):
        _dpr(tmp_path, paths["p__tsv"], tasks)
    assert list_tasks(tmp_path / "data", "c") == {}
    (split,) = _dpr(tmp_path, paths["p__tsv"], tasks, missing_positives=MissingPassages.DROP).splits
    assert (split.queries, split.missing_positives, split.without_positive) == (1, 1, 1)


def test_a_question_without_positive_is_an_error_where_required(tmp_path, files):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    for split, option in [
        ("train", {"train_without_positive": NoPositive.ERROR}),
        ("test", {"evaluation_without_positive": NoPositive.ERROR}),
    ]:
        message = r"t\.jsonl:2, question 'none\?': the question has no positive"
        with pytest.raises(DataError, match=message):
            _dpr(tmp_path, paths["p__tsv"], {"nq": {split: paths["t__jsonl"]}}, **option)


def test_bad_question_files_name_the_line(tmp_path, files):
    paths = files(
        p__tsv=PASSAGES,
        twice__jsonl=[{**TRAIN[0], "qid": "q"}, {**TRAIN[2], "qid": "q"}],
        dev__qa_csv="who?\t['Ada']\nwhen?\t['1815']\n",
        other__tsv="a1\twho?\na2\twhere?\n",
        short__tsv="a1\twho?\n",
        long__tsv="a1\twho?\na2\twhen?\na3\twhy?\n",
        ids__tsv="a1\twho?\na2\twhen?\n",
        foreign__tsv="b1 0 1 1\n",
        gone__tsv="a1 0 1 1\na2 0 99 1\n",
    )
    dev = paths["dev__qa_csv"]

    def fails(match, split="test", **given):
        with pytest.raises(DataError, match=match):
            _dpr(tmp_path, paths["p__tsv"], {"nq": {split: QuestionFiles(**given)}})

    fails(
        r"twice\.jsonl:2, field 'id': the id 'q' was already used at .*twice\.jsonl:1",
        questions=paths["twice__jsonl"],
    )
    fails(r"other\.tsv:2: found 'where\?'", questions=dev, ids=paths["other__tsv"])
    fails(r"short\.tsv: found 'the end of the file'", questions=dev, ids=paths["short__tsv"])
    fails(r"long\.tsv:3: found 'why\?'", questions=dev, ids=paths["long__tsv"])
    ids = paths["ids__tsv"]
    fails(r"foreign\.tsv: not one of its 1", questions=dev, ids=ids, qrels=paths["foreign__tsv"])
    fails(
        r"gone\.tsv:2: the positive \(id '99'\)", questions=dev, ids=ids, qrels=paths["gone__tsv"]
    )


def test_inputs_are_checked_before_anything_is_built(tmp_path, files):
    paths = files(p__tsv=PASSAGES, t__jsonl=TRAIN)
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        _dpr(tmp_path, paths["p__tsv"], {"nq": {"train": tmp_path / "gone.jsonl"}})
    with pytest.raises(ConfigError, match="unknown split 'dev'"):
        _dpr(tmp_path, paths["p__tsv"], {"nq": {"dev": paths["t__jsonl"]}})
    with pytest.raises(ConfigError, match="no passage file"):
        _dpr(tmp_path, [], {})
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        prepare_dpr(data_dir=tmp_path / "file", collection="c", passages=paths["p__tsv"], tasks={})


def test_empty_passages_skip(tmp_path, files):
    paths = files(p__tsv=PASSAGES + "4\t\tEmpty\n")
    with pytest.raises(DataError, match=r"p\.tsv:5, field 'text': the passage is empty"):
        _dpr(tmp_path, paths["p__tsv"], {})
    assert _dpr(tmp_path, paths["p__tsv"], {}, empty=EmptyPassages.SKIP).passages == 3
    assert _dpr(tmp_path, paths["p__tsv"], {}, empty=EmptyPassages.KEEP).passages == 4


def test_tsv(tmp_path, files):
    paths = files(
        p__tsv='d1\t"first"\nd2\tsecond\tB\n',
        q__tsv="q1\tone?\nq2\ttwo?\nq3\tunjudged?\n",
        qrels__tsv="q1 0 d2 1\nq2 0 d1 3\nq9 0 d9 1\n",
    )
    files_of = QuestionFiles(paths["q__tsv"], qrels=paths["qrels__tsv"])
    prepared = prepare_tsv(
        data_dir=tmp_path / "data",
        collection="c",
        passages=paths["p__tsv"],
        tasks={"m": {"train": files_of}},
    )
    assert [(q.id, q.positives, q.relevance) for q in _queries(tmp_path, "m", "train")] == [
        ("q1", (1,), ()),
        ("q2", (0,), (3,)),
    ]
    assert prepared.splits[0].without_positive == 1


def _beir(folder, prefix, documents):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"{n}", "text": text}) + "\n" for n, text in documents.items())
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"{prefix}{n}", "text": f"{n}?"}) + "\n" for n in range(3))
    )
    (folder / "qrels/test.tsv").write_text(
        f"query-id\tcorpus-id\tscore\n{prefix}0\t1\t1\n{prefix}1\t2\t0\n"
    )
    return folder


def test_beir_folders_share_a_collection(tmp_path):
    one = _beir(tmp_path / "one", "a", {1: "x", 2: "y"})
    two = _beir(tmp_path / "two", "b", {1: "y", 2: "z"})
    prepared = prepare_beir(
        data_dir=tmp_path / "data", collection="c", directories={"one": one, "two": two}
    )
    assert (prepared.passages, prepared.merged, prepared.renamed) == (3, 1, 1)
    # Only judged queries; a grade of 0 is no positive.
    assert [(q.id, q.positives) for q in _queries(tmp_path, "one", "test")] == [
        ("a0", (0,)),
        ("a1", ()),
    ]
    assert [(q.id, q.positives) for q in _queries(tmp_path, "two", "test")] == [
        ("b0", (1,)),
        ("b1", ()),
    ]
    (one / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nzz\t1\t1\n")
    with pytest.raises(DataError, match=r"test\.tsv:2, field 'query-id': the query 'zz' is not in"):
        prepare_beir(data_dir=tmp_path / "data", collection="c", directories={"one": one})
    (one / "qrels/test.tsv").unlink()
    with pytest.raises(DataError, match="there are no qrels"):
        prepare_beir(data_dir=tmp_path / "data", collection="c", directories={"one": one})


def test_options_take_values_for_members():
    options = PrepareOptions(empty="skip", train_without_positive="error")
    assert options == PrepareOptions(
        empty=EmptyPassages.SKIP, train_without_positive=NoPositive.ERROR
    )
    with pytest.raises(ConfigError, match=r"PrepareOptions\.missing_positives: found 'none'"):
        PrepareOptions(missing_positives="none")
