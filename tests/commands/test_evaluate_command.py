"""`taser evaluate` and `taser hybrid` on runs written and scored by hand."""

import csv
import functools
import json
import math
import pathlib

import pytest
from small_world import gin, refused, succeed
from written_files import run_of, write_run

from taser_jax.commands.evaluate import EvaluationConfig, Judge, evaluate
from taser_jax.commands.search import hybrid
from taser_jax.data.collections.store import write_collection, write_queries
from taser_jax.retrieval.fusion import ChosenFor, HybridConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.storage.records import Passage, Query


def _result(output: pathlib.Path, system: str) -> dict:
    return json.loads((output / "results" / f"{system}.json").read_text())


@pytest.fixture
def runs_dir(capitals, tmp_path) -> pathlib.Path:
    """Answers at ranks 1 and 2 and nowhere; rivers: p0 before p1, and a query without results."""
    runs = {
        "bern": {"p6": 3.0, "p0": 1.0},
        "tiber": {"p5": 2.0, "p3": 1.0, "p7": 0.5},
        "wheel": {"p7": 1.0},
    }
    write_run(tmp_path / "runs" / "capital.test.trec", runs)
    write_run(tmp_path / "runs" / "rivers.test.trec", {"r0": {"p7": 3, "p0": 2, "p1": 1}})
    return tmp_path / "runs"


def _evaluate(capitals, runs_dir, *, system: str = "hand", task: str = "rivers") -> list[str]:
    where = gin(RUNS_DIR=runs_dir, EVAL_OUTPUT_DIR=runs_dir.parent / "out")
    return ["evaluate", *capitals.where, *where, *gin(SYSTEM=system, TASKS=[task])]


def test_a_name_like_anothers_leaves_its_values_by_query(capitals, runs_dir, tmp_path, capsys):
    succeed(*_evaluate(capitals, runs_dir, system="by hand"))
    (path,) = (tmp_path / "out" / "per_query").glob("*.csv")
    before = path.read_text()
    write_run(runs_dir / "rivers.test.trec", {"r0": {"p1": 1.0}, "r1": {"p1": 1.0}})
    message = refused(capsys, *_evaluate(capitals, runs_dir, system="by_hand"))
    assert "it has the result of system 'by hand', not of 'by_hand'" in message
    assert path.read_text() == before


def test_queries_without_results_are_counted_and_most_of_them_refused(capitals, runs_dir, capsys):
    succeed(*_evaluate(capitals, runs_dir))
    told = "rivers.test.trec: 1 of 2 queries have no result and count as zero"
    assert told in capsys.readouterr().err
    write_run(runs_dir / "capital.test.trec", {"bern": {"p6": 3.0}})
    message = refused(capsys, *_evaluate(capitals, runs_dir, task="capital"))
    assert "capital.test.trec: 2 of 3 queries have no result" in message
    assert "results for at least 50% of them" in message


def test_queries_without_a_positive_are_told(runs_dir, tmp_path, caplog):
    write_collection(tmp_path / "data", "c", [Passage(id="p0", text="Aare")])
    queries = [Query("r0", "Bern's river?", "rivers", (0,)), Query("r1", "Rome's?", "rivers")]
    write_queries(tmp_path / "data", "c", "rivers", "test", queries)
    write_run(runs_dir / "rivers.test.trec", {"r0": {"p0": 1}, "r1": {"p0": 1}})
    where = {"runs_dir": str(runs_dir), "data_dir": str(tmp_path / "data"), "collection": "c"}
    result = evaluate(**where, output_dir=str(tmp_path / "out"), system="hand", tasks=["rivers"])
    assert result.tasks["rivers"].num_queries == 1
    assert "rivers test: 1 of 2 queries have no positive and are left out" in caplog.text


def test_by_answers(capitals, runs_dir, tmp_path):
    succeed(
        *_evaluate(capitals, runs_dir, task="capital"),
        *gin("EvaluationConfig", judge="answers", measures=["R@1", "R@2"]),
        *gin("evaluate", parameters=123, details={"wall time": "1 s"}),
    )
    result = _result(tmp_path / "out", "hand")
    # "Bern" is in p6. "Tiber" is in p5, since the body names it, and in p3.
    metrics = dict.fromkeys(("R@1", "R@2"), pytest.approx(2 / 3))
    assert result["tasks"] == {"capital": {"metrics": metrics, "num_queries": 3}}
    assert (result["parameters"], result["details"]) == (123, {"wall time": "1 s"})


def test_by_qrels_a_missing_query_counts_as_zero(capitals, runs_dir, tmp_path):
    succeed(*_evaluate(capitals, runs_dir))
    # r0 finds p0 (grade 1) at rank 2 and p1 (grade 2) at rank 3; r1 finds nothing.
    gain = 1 / math.log2(3) + 2 / math.log2(4)
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    metrics = _result(tmp_path / "out", "hand")["tasks"]["rivers"]["metrics"]
    expected = {"R@1": 0.0, "R@5": 0.5, "R@20": 0.5, "MRR@10": 0.25, "nDCG@10": gain / ideal / 2}
    assert metrics == pytest.approx(expected)
    with open(tmp_path / "out" / "per_query" / "hand.rivers.test.csv") as file:
        per_query = {line["query_id"]: float(line["nDCG@10"]) for line in csv.DictReader(file)}
    assert per_query == {"r0": pytest.approx(gain / ideal), "r1": 0.0}


def test_hybrid_takes_alpha_from_development_data(capitals, tmp_path):
    # Bern's passage leads only where BM25's margin of 1 outweighs the dense margin of 1.25.
    bern = {"dense": {"p0": 2.25, "p6": 1.0}, "sparse": {"p6": 3.0, "p0": 2.0}}
    for kind, scores in bern.items():
        run = {"bern": scores, "tiber": {"p5": 1.0}, "wheel": {"p7": 1.0}}
        for split in ("validation", "test"):
            write_run(tmp_path / kind / f"capital.{split}.trec", run)
    hybrid = ["hybrid", *capitals.where, *gin("EvaluationConfig", judge="answers")]
    hybrid += gin(RUNS_DIR=tmp_path / "dense", BM25_RUNS_DIR=tmp_path / "sparse")
    hybrid += gin(TASKS=["capital"], **{"hybrid.measure": "R@1"})
    succeed(*hybrid, *gin(HYBRID_RUNS_DIR=tmp_path / "joined"))
    joined = run_of(tmp_path / "joined" / "capital.test.trec")["bern"]
    assert list(joined) == ["p6", "p0"]
    # score(p6) - score(p0) = alpha - 1.25. Dense scores are 1.25 times as wide as sparse ones,
    # which is 1.3 in the two digits of a candidate.
    assert joined == pytest.approx({"p6": 1.0 + 1.3 * 3.0, "p0": 2.25 + 1.3 * 2.0}, abs=1e-5)

    succeed(*hybrid, *gin(HYBRID_RUNS_DIR=tmp_path / "given"), *gin("hybrid", alpha=0.5))
    given = run_of(tmp_path / "given" / "capital.test.trec")["bern"]
    assert list(given) == ["p0", "p6"]
    assert given["p0"] == pytest.approx(2.25 + 0.5 * 2.0, abs=1e-5)


def test_each_task_may_have_an_alpha_of_its_own(capitals, tmp_path, capsys):
    """Bern needs 1.25 to lead, as above; a river's passage leads without BM25."""
    margins = {"dense": (2.25, 1.0, 3.0, 2.0), "sparse": (2.0, 3.0, 8.5, 9.0)}
    for kind, (p0, p6, right, wrong) in margins.items():
        write_run(tmp_path / kind / "capital.test.trec", {"bern": {"p0": p0, "p6": p6}})
        write_run(tmp_path / kind / "rivers.test.trec", {"r0": {"p1": right, "p6": wrong}})

    join = functools.partial(
        hybrid,
        dense_dir=str(tmp_path / "dense"),
        sparse_dir=str(tmp_path / "sparse"),
        data_dir=str(capitals.root / "data"),
        collection="capitals",
        output_dir=str(tmp_path / "joined"),
        development_split="test",
        measure="R@1",
        evaluation=EvaluationConfig(judge=Judge.ANSWERS, qrels_tasks=("rivers",)),
    )
    each = join(config=HybridConfig(chosen_for=ChosenFor.EACH_TASK))
    # Both tasks' dense scores together are 1.5 times as wide as BM25's.
    assert each == {"capital": 1.5, "rivers": 0.15}
    # One for both: at 1.5 the first is won and the other kept, whose margin is 1 - 0.5 alpha.
    assert join(config=HybridConfig()) == {"capital": 1.5, "rivers": 1.5}
    runs = gin(RUNS_DIR=tmp_path / "dense", BM25_RUNS_DIR=tmp_path / "sparse", TASKS=["rivers"])
    settings = gin("HybridConfig", chosen_for="each_task") + gin("hybrid", measure="R@1")
    joined = gin(HYBRID_RUNS_DIR=tmp_path / "joined")
    assert "rivers" in refused(capsys, "hybrid", *capitals.where, *runs, *joined, *settings)
    with pytest.raises(ConfigError, match="tasks nq choose for all"):
        HybridConfig(tasks=("nq",), chosen_for=ChosenFor.EACH_TASK)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"RUNS_DIR": "nothing"}, ("nothing/rivers.test.trec", "taser bm25")),
        ({"TASKS": ["lakes"]}, ("no task lakes", "some of capital, rivers")),
        ({"SPLIT": "validation"}, ("one of train, test",)),
        ({"EvaluationConfig.judge": "answers"}, ("no query of task 'rivers' has answers",)),
        ({"EvaluationConfig.measures": ["Recal@5"]}, ("Recal@5",)),
        ({"EvaluationConfig.measures": []}, ("EvaluationConfig.measures: no measure",)),
        ({"RUNS_DIR": "foreign"}, ("rivers.test.trec:1: passage 'p99' is not in this collection",)),
    ],
)
def test_what_cannot_be_evaluated(capitals, runs_dir, capsys, monkeypatch, settings, words):
    monkeypatch.chdir(runs_dir.parent)
    write_run(runs_dir.parent / "foreign" / "rivers.test.trec", {"r0": {"p99": 1.0}})
    given = {"RUNS_DIR": "runs", "EVAL_OUTPUT_DIR": "out", "SYSTEM": "hand", "TASKS": ["rivers"]}
    message = refused(capsys, "evaluate", *capitals.where, *gin(**given | settings))
    assert all(each in message for each in words)
