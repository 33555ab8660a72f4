"""`taser prepare` and `taser evaluate` by KILT's pages, on files made by hand."""

import json
import pathlib

import pytest
from small_world import figures, gin, refused, succeed
from written_files import write_all, write_run

from taser_jax.data.collections.store import QuerySet
from taser_jax.data.prepare.collection import gold_path

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


def _evaluate(root: pathlib.Path, **options: object) -> list[str]:
    places = gin(DATA_DIR=root / "data", COLLECTION="k", SYSTEM="hand")
    places += gin(RUNS_DIR=root / "runs", EVAL_OUTPUT_DIR=root / "out")
    return ["evaluate", *places, *gin("EvaluationConfig", **options)]


def test_pages_and_passages_in_one_table_and_a_task_judged_by_pages_alone(prepared):
    measures = ["PageRprec", "PageRecall@1", "PageRecall@2", "Rprec", "MRR@10"]
    succeed(*_evaluate(prepared, judge="kilt", measures=measures, page_only_tasks=["aida"]))
    tasks = json.loads((prepared / "out" / "results" / "hand.json").read_text())["tasks"]
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


def test_refusals(prepared, capsys):
    told = refused(capsys, *_evaluate(prepared, page_only_tasks=["fever"]))
    assert "judge by 'kilt' and add PageRprec" in told
    pages = {"judge": "kilt", "measures": ["PageRprec"]}
    told = refused(capsys, *_evaluate(prepared, **pages, page_only_tasks=["nq"]))
    assert "no task nq" in told
    gold = gold_path(QuerySet.open(prepared / "data", "k", "fever", "test"))
    gold.unlink()
    # Recorded, it would be named as missing.
    (gold.parent / "checksums.txt").unlink()
    told = refused(capsys, *_evaluate(prepared, **pages))
    assert "task 'fever' was not prepared from KILT's files" in told
