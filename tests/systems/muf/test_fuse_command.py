"""`taser fuse` on real docstrings and made-up embeddings: what it computes, keeps and refuses."""

import dataclasses
import json
import shutil
import types

import numpy as np
import pytest
from tiny_specialist import write_specialist

from taser_jax.commands.inputs import read_task_run
from taser_jax.data.batches.stream import BatchingConfig
from taser_jax.data.collections.store import PassageStore, QuerySet, write_queries
from taser_jax.data.token_store.store import TokenStore
from taser_jax.optim.optimizers import OptimizerConfig
from taser_jax.retrieval.embeddings import Embeddings, QueryEmbeddings
from taser_jax.retrieval.exact import ExactSearcher
from taser_jax.retrieval.fusion import FusionConfig, HybridConfig, Weighting, fuse_runs, weights_of
from taser_jax.retrieval.index import FaissConfig, IndexConfig, IndexKind, build_index
from taser_jax.retrieval.runs import FUSED_LISTS, LISTS, QueryArrays, Run, top_k
from taser_jax.storage.artifacts import split_path
from taser_jax.storage.errors import ConfigError, FingerprintError
from taser_jax.systems.muf.confidence import query_confidence
from taser_jax.systems.muf.ensemble import ensemble
from taser_jax.systems.muf.ensemble_files import Ensemble, EnsembleConfig, EnsembleTraining
from taser_jax.systems.muf.fuse import AddedBm25, Domain, fuse, join
from taser_jax.systems.muf.specialists import Weighing

DEPTH, K, TEMPERATURES = 30, 20, (0.1, 1.0, 10.0)
TRAINING = EnsembleTraining(
    model=EnsembleConfig(3, (8,)),
    batching=BatchingConfig(batch_size=8, num_negatives=0),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    epochs=1,
    evaluations=1,
)


@pytest.fixture(scope="module")
def specialists(small_world, tmp_path_factory):
    """One for each of the two tasks."""
    store, by_task = TokenStore.open(small_world.token_store), {}
    for seed, task in enumerate(("summary", "code")):
        root = tmp_path_factory.mktemp(task)
        embeddings_dir = write_specialist(root, store, seed=seed, dim=6 + 2 * seed)
        places = {"embeddings_dir": str(embeddings_dir), "output_dir": str(root / "ensemble")}
        ensemble(**places, token_store=str(store.directory), tasks=[task], training=TRAINING)
        by_task[task] = str(root)
    return by_task


def put_together(directory, folder, **others):
    """A specialist's folder with some parts of others' folders; None leaves a part out."""
    directory.mkdir()
    for part in ("embeddings", "index", "ensemble"):
        source = others.get(part, folder)
        if source is not None:
            (directory / part).symlink_to(f"{source}/{part}")
    return str(directory)


FUSION = FusionConfig(depth=DEPTH, k=DEPTH)
WEIGHING = Weighing(FUSION, K, TEMPERATURES)
EQUAL = Weighing(dataclasses.replace(FUSION, weighting=Weighting.EQUAL), K, TEMPERATURES)


@pytest.fixture(scope="module")
def start(small_world, specialists):
    """Fuses the two specialists, or with other arguments, into a directory."""
    about = {"data_dir": str(small_world.data_dir), "collection": "small", "weighing": WEIGHING}

    def run(output_dir, **changes):
        given = {"specialists": specialists, "k": 5} | about | changes
        return fuse(output_dir=str(output_dir), **given)

    return run


@pytest.fixture(scope="module")
def fused(start, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("fused") / "out"
    return output_dir, start(output_dir)


def list_of(output_dir, name, task):
    path = split_path(output_dir / "specialists" / name / "lists", task, "test")
    return QueryArrays.open(path, LISTS).run


def fused_lists(output_dir, task):
    return QueryArrays.open(split_path(output_dir / "lists", task, "test"), FUSED_LISTS)


def confidence_of(folder, task, run, temperature):
    """w, from the arrays on disk."""
    members, passages = Ensemble.open(f"{folder}/ensemble"), Embeddings(f"{folder}/embeddings")
    queries = QueryEmbeddings.of_split(f"{folder}/embeddings", task, "test")[:].astype(np.float32)
    given = members.embed, queries, passages.take, run.result
    return query_confidence(*given, temperatures=[temperature], k=K)[0]


def test_lists_are_weighed_by_each_specialists_confidence(fused, small_world, specialists):
    output_dir, summary = fused
    store = PassageStore.open(small_world.data_dir, "small")
    assert summary.temperatures.keys() == specialists.keys()
    for name, temperature in summary.temperatures.items():
        saved = json.loads((output_dir / "specialists" / name / "temperature.json").read_text())
        assert saved["errors"][TEMPERATURES.index(temperature)] == min(saved["errors"])
    for task in ("summary", "code"):
        arrays = fused_lists(output_dir, task)
        runs = [list_of(output_dir, name, task) for name in specialists]
        assert arrays.columns == tuple(specialists)
        for place, (name, folder) in enumerate(specialists.items()):
            expected = confidence_of(folder, task, runs[place], summary.temperatures[name])
            np.testing.assert_allclose(arrays.arrays["confidence"][:, place], expected, atol=1e-4)
        weights = weights_of(arrays.arrays["confidence"])
        [expected] = fuse_runs(runs, [weights], FUSION)
        np.testing.assert_array_equal(arrays.run.rows, expected.rows)
        queries = QuerySet.open(small_world.data_dir, "small", task, "test")
        written = read_task_run(output_dir / "runs", queries, store)
        best = top_k(expected.rows, expected.scores, 5)
        np.testing.assert_array_equal(written.rows, best.rows)


def test_a_second_fusion_searches_nothing_anew(fused, start, monkeypatch):
    output_dir, summary = fused
    monkeypatch.setattr(ExactSearcher, "search", lambda *_: pytest.fail("searched again"))
    assert start(output_dir) == summary
    lists_dir = str(output_dir / "specialists")
    other = start(output_dir.parent / "equal", lists_dir=lists_dir, weighing=EQUAL)
    assert other.temperatures == {}


def test_a_temperature_of_other_judgements_is_not_taken(fused, start, small_world, tmp_path):
    output_dir, data_dir = shutil.copytree(fused[0], tmp_path / "out"), tmp_path / "data"
    shutil.copytree(small_world.data_dir, data_dir)
    queries = list(QuerySet.open(data_dir, "small", "code", "validation"))
    changed = [dataclasses.replace(query, positives=(0,), relevance=()) for query in queries]
    write_queries(data_dir, "small", "code", "validation", changed)
    with pytest.raises(FingerprintError, match=r"temperature.json: made from queries"):
        start(output_dir, data_dir=str(data_dir))


def test_own_passages_make_other_results(start, specialists, tmp_path, monkeypatch):
    # Its queries are no passages.
    monkeypatch.setattr("taser_jax.systems.muf.fuse.check_own_passages", lambda *_: None)
    own = {"tasks": ["code"], "own_passage_tasks": ["code"]}
    start(tmp_path, tasks=["code"])
    with pytest.raises(FingerprintError, match=r"made from depth 30\n.*own passages left out"):
        start(tmp_path, **own)
    for name in specialists:
        shutil.rmtree(tmp_path / "specialists" / name / "lists")
        shutil.rmtree(tmp_path / "specialists" / name / "confidence")
    with pytest.raises(FingerprintError, match=r"temperature.json: made from judge qrels, k 20"):
        start(tmp_path, **own)


@pytest.mark.needs("faiss")
def test_results_of_another_index_are_not_taken(start, specialists, tmp_path):
    code = specialists["code"]
    folder = put_together(tmp_path / "code", code, index=None)
    alone = {"specialists": {"code": folder}}
    build_index(f"{code}/embeddings", f"{folder}/index")
    start(tmp_path / "out", **alone)
    shutil.rmtree(f"{folder}/index")
    lists = IndexConfig(IndexKind.FAISS, faiss=FaissConfig(lists=2, probes=1))
    build_index(f"{code}/embeddings", f"{folder}/index", config=lists)
    with pytest.raises(FingerprintError, match=r"depth 30\n.*faiss index.*'lists': 2.*\n.*delete"):
        start(tmp_path / "out", **alone)


def test_one_temperature_needs_no_validation_queries(start, specialists, tmp_path, monkeypatch):
    monkeypatch.setattr(PassageStore, "tasks", {task: ["train", "test"] for task in specialists})
    summary = start(tmp_path / "alone", weighing=Weighing(FUSION, K, (0.5,)))
    assert summary.temperatures == dict.fromkeys(specialists, 0.5)
    with pytest.raises(ConfigError, match="there are no validation queries of summary"):
        start(tmp_path / "several")


def test_one_specialist_is_its_own_list_and_needs_no_ensemble(start, specialists, tmp_path):
    joint = put_together(tmp_path / "joint", specialists["code"], ensemble=None)
    start(tmp_path, specialists={"joint": joint})
    arrays, own = fused_lists(tmp_path, "summary"), list_of(tmp_path, "joint", "summary")
    np.testing.assert_array_equal(arrays.run.rows, own.rows)
    np.testing.assert_allclose(arrays.run.scores, own.scores)


def test_without_the_domain_a_task_is_left_to_the_others(fused, start, tmp_path):
    output_dir, _ = fused
    start(tmp_path, lists_dir=str(output_dir / "specialists"), domain=Domain.LEFT_OUT)
    for task, other in (("summary", "code"), ("code", "summary")):
        arrays, own = fused_lists(tmp_path, task), list_of(output_dir, other, task)
        assert arrays.columns == (other,)
        np.testing.assert_array_equal(arrays.run.rows, own.rows)


def test_bm25_is_added_with_a_weight_for_each_task(fused, start, tmp_path):
    lists_dir = str(fused[0] / "specialists")
    for split in ("validation", "test"):
        # Runs that stand in for BM25's.
        start(tmp_path / "sparse", lists_dir=lists_dir, weighing=EQUAL, split=split)
    bm25 = HybridConfig(depth=5, alphas=(0.5, 50.0))
    added = AddedBm25(str(tmp_path / "sparse" / "runs"), bm25)
    summary = start(tmp_path / "out", lists_dir=lists_dir, bm25=added)
    assert summary.alphas.keys() == {"summary", "code"}
    assert set(summary.alphas.values()) <= {0.5, 50.0}
    assert (tmp_path / "out" / "runs_bm25" / "code.test.trec").exists()


def specialist_of(rows, score, confidence=None):
    """One that finds a passage for each query, with this score."""
    lists = np.array(rows, np.int32)[:, None], np.full((len(rows), 1), score, np.float32)
    run = Run([f"q{number}" for number in range(len(rows))], *lists)
    return types.SimpleNamespace(
        lists=lambda task, split: run,
        confidence=lambda task, split: np.array(confidence, np.float32),
        passages=types.SimpleNamespace(fingerprints={"model": "m", "collection": "c"}),
    )


def test_queries_without_any_confidence_are_counted(caplog):
    specialist = specialist_of([3, 4], 1.0, confidence=[0.0, 0.5])
    fused = join({"a": specialist, "b": specialist}, "nq", "test", FusionConfig(k=1))
    assert "confidence 0 in 1 queries" in caplog.text
    assert fused.run.rows.tolist() == [[3], [4]]


def test_weights_in_place_of_confidences_are_the_weights():
    """Whatever γ and the weighting of confidences are: .75·4 + .25·8."""
    specialists = {"a": specialist_of([3], 4.0), "b": specialist_of([3], 8.0)}
    for config in (FusionConfig(k=1, power=2.0), FusionConfig(k=1, weighting=Weighting.EQUAL)):
        fused = join(specialists, "nq", "test", config, weigh=lambda _: np.array([[0.75, 0.25]]))
        assert fused.run.scores.tolist() == [[5.0]]


def test_what_does_not_belong_together_is_refused(start, specialists, tmp_path):
    of_summary, of_code = specialists["summary"], specialists["code"]
    for part, message in (
        ("ensemble", "train an ensemble on this model's embeddings"),
        ("index", "search this model's embeddings"),
    ):
        mixed = put_together(tmp_path / part, of_summary, **{part: of_code})
        with pytest.raises(FingerprintError, match=message):
            start(tmp_path, specialists={"a": mixed, "b": of_code})
    lists = {"lists_dir": str(tmp_path / "lists"), "weighing": EQUAL}
    start(tmp_path / "1", specialists={"a": of_summary}, **lists)
    with pytest.raises(FingerprintError, match="name another directory"):
        start(tmp_path / "2", specialists={"a": of_code}, **lists)


WITH_BM25 = {"split": "validation", "weighing": EQUAL, "bm25": AddedBm25("bm25")}
LEFT_OUT = {"domain": Domain.LEFT_OUT, "weighing": EQUAL, "tasks": ["summary"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"specialists": {}}, "the specialists are none"),
        ({"specialists": ("NQ", "nq")}, "names that differ"),
        ({"split": "validation"}, "would choose what is then reported"),
        (WITH_BM25, "would choose what is then reported"),
        ({"tasks": ["nonsense"]}, "no task nonsense"),
        ({"lacks": "ensemble"}, "specialist 'summary' has no ensemble"),
        ({"members": 0}, "0 members of an ensemble of 3"),
        (LEFT_OUT | {"specialists": ("summary",)}, "every specialist was trained on 'summary'"),
        (LEFT_OUT | {"lacks": "ensemble"}, "specialist 'summary' has no ensemble"),
    ],
)
def test_bad_settings(change, words, start, specialists, tmp_path):
    options = {"specialists": specialists, "lacks": None} | change
    lacks, given = options.pop("lacks"), options.pop("specialists")
    given = dict(zip(given, specialists.values(), strict=False))
    if lacks:
        given["summary"] = put_together(tmp_path / "folder", given["summary"], **{lacks: None})
    with pytest.raises(ConfigError, match=words):
        start(tmp_path, specialists=given, **options)


@pytest.mark.parametrize("temperatures", [(), (0.1, -1.0)])
def test_temperatures_are_positive_and_one_at_least(temperatures):
    with pytest.raises(ConfigError, match="temperatures are one or more positive numbers"):
        Weighing(temperatures=temperatures)
