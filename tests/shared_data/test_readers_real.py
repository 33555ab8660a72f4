import os

import pytest

from taser_jax.data.collections.store import PassageStore, QuerySet
from taser_jax.data.prepare.collection import prepare
from taser_jax.data.prepare.mapping import MISSING_POSITIVES
from taser_jax.data.prepare.splits import QuestionFiles
from taser_jax.data.readers.passages import read_passages
from taser_jax.data.readers.questions import read_questions
from taser_jax.storage.errors import DataError

pytestmark = pytest.mark.slow


def passages(path):
    return [located.passage for located in read_passages(path)]


@pytest.fixture(scope="module")
def merged(shared_data, tmp_path_factory):
    """SQuAD's, NQ's and kilt_mini's passages in one collection."""
    data_dir = tmp_path_factory.mktemp("data")
    questions = {}
    for task, stem, by_content, by_qrels in (
        ("squad", "squad/squad_split", "test", "validation"),
        ("nq", "nq_qed/nq_qed", "validation", "test"),
    ):
        dev = f"{stem}_dev"
        judged = QuestionFiles(f"{dev}.queries.tsv.gz", f"{dev}.qrels.tsv.gz", passages=task)
        questions[task] = {
            "train": f"{stem}_train.dpr.jsonl.gz",
            **{by_content: f"{dev}.dpr.jsonl.gz", by_qrels: judged},
        }
    prepared = prepare(
        data_dir=data_dir,
        collection="multi",
        passages={
            "squad": "squad/psgs_squad_dev.tsv.gz",
            "nq": "nq_qed/psgs_nq_qed.tsv.gz",
            "kilt": "kilt_mini/passages.tsv.gz",
        },
        queries=questions,
        directory=shared_data,
    )
    return data_dir, prepared


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("squad/squad_split_train.dpr.jsonl.gz", 8038),
        ("squad/squad_split_dev.qa.csv.gz", 1584),
        ("nq_qed/nq_qed_dev.dpr.jsonl.gz", 1359),
        ("qa/dpr_nq_dev.qa.csv.gz", 8757),
    ],
)
def test_question_counts(shared_data, path, count):
    questions = list(read_questions(shared_data / path))
    assert len(questions) == count
    assert all(question.answers for question in questions)


@pytest.mark.release
def test_merging_squad_nq_and_kilt_mini_gives_kilt_mini(merged, shared_data):
    data_dir, prepared = merged
    # kilt_mini holds all of SQuAD's and NQ's passages; NQ's first 2,067 ids clash with SQuAD's.
    assert (prepared.passages, prepared.merged, prepared.renamed) == (57937, 2067 + 9826, 2067)
    store = PassageStore.open(data_dir, "multi")
    rows = []
    for passage in passages(shared_data / "kilt_mini/passages.tsv.gz"):
        row = store.find(f"kilt:{passage.id}")
        rows.append(store.row_of(passage.id) if row is None else row)
    assert sorted(rows) == list(range(57937))
    assert [split.queries for split in prepared.splits] == [8038, 1584, 1584, 7131, 1359, 1359]
    assert all(MISSING_POSITIVES not in split.left_out for split in prepared.splits)


@pytest.mark.release
@pytest.mark.parametrize(
    ("task", "by_content", "by_qrels"),
    [("squad", "test", "validation"), ("nq", "validation", "test")],
)
def test_qrels_and_contexts_name_the_same_rows(merged, task, by_content, by_qrels):
    data_dir, _ = merged
    of_contexts = list(QuerySet.open(data_dir, "multi", task, by_content))
    of_qrels = list(QuerySet.open(data_dir, "multi", task, by_qrels))
    assert [(q.id, q.text, q.positives) for q in of_contexts] == [
        (q.id, q.text, q.positives) for q in of_qrels
    ]
    store = PassageStore.open(data_dir, "multi")
    golds = store.get_many([query.positives[0] for query in of_contexts])
    held = sum(
        any(answer in passage.text for answer in query.answers)
        for query, passage in zip(of_contexts, golds, strict=True)
    )
    assert held / len(of_contexts) > 0.9


def test_scifact(shared_data, tmp_path):
    prepared = prepare(
        data_dir=tmp_path,
        collection="scifact",
        directories={"scifact": os.fspath(shared_data / "beir/scifact")},
    )
    assert prepared.passages == 5183
    assert {split.split: split.queries for split in prepared.splits} == {"train": 809, "test": 300}
    test = QuerySet.open(tmp_path, "scifact", "scifact", "test")
    assert sum(len(query.positives) for query in test) == 339
    store = PassageStore.open(tmp_path, "scifact")
    first = next(iter(test))
    assert (first.id, store[first.positives[0]].id) == ("1", "31715818")


def test_the_sample_of_mesh(shared_data):
    first, *others = passages(shared_data / "thesaurus" / "mesh2006_sample.xml.gz")
    assert first.title == "Calcimycin"
    assert first.text.startswith("An ionophorous, polyether antibiotic")
    assert all(passage.text and passage.title for passage in others)


def test_the_defined_terms_of_two_ontologies(shared_data):
    terms = {
        name: passages(shared_data / "thesaurus" / f"{name}.jsonl.gz")
        for name in ("disease_ontology", "symptom_ontology")
    }
    assert sum(map(len, terms.values())) == 3052
    assert terms["disease_ontology"][0].title == "angiosarcoma"
    with pytest.raises(DataError, match=r"no passage in it(.|\n)*a definition"):
        passages(shared_data / "thesaurus" / "medquad_focus_terms.jsonl.gz")
