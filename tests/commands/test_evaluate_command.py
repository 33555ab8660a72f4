"""`taser evaluate` and `taser hybrid` on runs written and scored by hand."""

import csv
import functools
import json
import math
import pathlib

import pytest
from small_world import figures, gin, refused, succeed
from written_files import run_of, write_all, write_run

from taser_jax.commands.evaluate import EvaluationConfig, Judge, evaluate
from taser_jax.commands.search import hybrid
from taser_jax.data.collections.store import QuerySet, write_collection, write_queries
from taser_jax.data.prepare.collection import gold_path
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


PASSAGES = """\
id\ttext\ttitle\twikipedia_id\tparagraph_id
p0\tBern is a city.\tBern\t7\t0
p1\tIt lies on the Aare.\tBern\t7\t1
p2\tA river.\tAare\t8\t0
p3\tA bear.\tBear\t9\t0
"""
QUERIES = [
    # Both pages are needed.
    ("q0", [[("7", 1), ("8", 0)]]),
    # Either page will do.
    ("q1", [[("8", 0)], [("9", 0)]]),
    ("q2", [[("9", 0)]]),
]
RUN = {"q0": {"p0": 9, "p1": 8, "p3": 7, "p2": 6}, "q1": {"p3": 9, "p0": 8}}


def _record(id: str, outputs: list[list[tuple[str, int]]]) -> dict:
    def evidence(page: str, paragraph: int) -> dict:
        return {"wikipedia_id": page, "title": "T", "start_paragraph_id": paragraph}

    provenances = [[evidence(*place) for place in places] for places in outputs]
    output = [{"answer": "x", "provenance": provenance} for provenance in provenances]
    return {"id": id, "input": f"{id}?", "output": output}


@pytest.fixture
def prepared(tmp_path) -> pathlib.Path:
    """Two tasks of the same questions; "aida" has pages alone."""
    write_all(tmp_path, {"p.tsv": PASSAGES, "q.jsonl": [_record(*query) for query in QUERIES]})
    places = gin(DATA_DIR=tmp_path / "data", COLLECTION="k", PASSAGES="p.tsv", SOURCE_DIR=tmp_path)
    queries = gin(QUERIES={task: {"test": "q.jsonl"} for task in ("fever", "aida")})
    succeed("prepare", *places, *queries, *gin("PrepareOptions", page_gold_tasks=["aida"]))
    for task in ("fever", "aida"):
        write_run(tmp_path / "runs" / f"{task}.test.trec", RUN)
    return tmp_path


def _by_pages(root: pathlib.Path, **options: object) -> list[str]:
    places = gin(DATA_DIR=root / "data", COLLECTION="k", SYSTEM="hand")
    places += gin(RUNS_DIR=root / "runs", EVAL_OUTPUT_DIR=root / "out")
    return ["evaluate", *places, *gin("EvaluationConfig", **options)]


def test_pages_and_passages_in_one_table_and_a_task_judged_by_pages_alone(prepared):
    measures = ["PageRprec", "PageRecall@1", "PageRecall@2", "Rprec", "MRR@10"]
    succeed(*_by_pages(prepared, judge="kilt", measures=measures, page_only_tasks=["aida"]))
    tasks = _result(prepared / "out", "hand")["tasks"]
    # Pages of q0: 7, 9, 8: half of its set in the first 2; complete at place 2, behind 9. q1: 9, 7:
    # a whole set at once, half of the distinct ones. q2 found nothing.
    pages = {
        "PageRprec": pytest.approx((0.5 + 1.0) / 3),
        "PageRecall@1": pytest.approx((0.0 + 0.5) / 3),
        "PageRecall@2": pytest.approx((1.0 + 0.5) / 3),
    }
    # Passages: q0 wants p1 and p2, has p1 among the first 2; q1 wants p2 and p3, has p3 first.
    rprec = (0.5 + 0.5) / 3
    passages = {"Rprec": pytest.approx(rprec), "MRR@10": pytest.approx((0.5 + 1.0) / 3)}
    assert tasks["fever"] == {"metrics": pages | passages, "num_queries": 3}
    assert tasks["aida"] == {"metrics": pages, "num_queries": 3}
    [average] = [row for row in figures(prepared / "out") if row["task"] == "average"]
    assert float(average["Rprec"]) == pytest.approx(rprec, abs=1e-6), "over fever alone"
    assert float(average["PageRprec"]) == pytest.approx(0.5, abs=1e-6), "over both"
    [path] = (prepared / "out" / "kilt").glob("*fever*.jsonl")
    page_ids = {
        record["id"]: [evidence["wikipedia_id"] for evidence in record["output"][0]["provenance"]]
        for record in map(json.loads, path.read_text().splitlines())
    }
    assert page_ids == {"q0": ["7", "9", "8"], "q1": ["9", "7"], "q2": []}


def test_what_cannot_be_evaluated_by_pages(prepared, capsys):
    told = refused(capsys, *_by_pages(prepared, page_only_tasks=["fever"]))
    assert "judge by 'kilt' and add PageRprec" in told
    pages = {"judge": "kilt", "measures": ["PageRprec"]}
    told = refused(capsys, *_by_pages(prepared, **pages, page_only_tasks=["nq"]))
    assert "no task nq" in told
    gold = gold_path(QuerySet.open(prepared / "data", "k", "fever", "test"))
    gold.unlink()
    # Recorded, it would be named as missing.
    (gold.parent / "checksums.txt").unlink()
    told = refused(capsys, *_by_pages(prepared, **pages))
    assert "task 'fever' was not prepared from KILT's files" in told
