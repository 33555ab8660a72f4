"""`taser prepare` and `taser evaluate` by KILT's pages, on files made by hand."""

from __future__ import annotations

import json
import pathlib

import pytest
from small_world import figures, gin, refused, succeed

from taser_jax.data.collections.store import QuerySet
from taser_jax.data.prepare.receipts import gold_path

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
RUN = {"q0": ["p0", "p1", "p3", "p2"], "q1": ["p3", "p0"]}


def _record(id: str, outputs: list[list[tuple[str, int]]]) -> dict:
    return {
        "id": id,
        "input": f"{id}?",
        "output": [
            {
                "answer": "x",
                "provenance": [
                    {"wikipedia_id": page, "title": "T", "start_paragraph_id": paragraph}
                    for page, paragraph in provenance
                ],
            }
            for provenance in outputs
        ],
    }


@pytest.fixture
def prepared(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "p.tsv").write_text(PASSAGES)
    lines = (json.dumps(_record(id, outputs)) + "\n" for id, outputs in QUERIES)
    (tmp_path / "q.jsonl").write_text("".join(lines))
    succeed(
        *("prepare", *gin(DATA_DIR=tmp_path / "data", COLLECTION="k", PASSAGES="p.tsv")),
        *gin(QUERIES={"fever": {"test": "q.jsonl"}}, SOURCE_DIR=tmp_path),
    )
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs" / "fever.test.trec", "w") as file:
        for query, passages in RUN.items():
            for rank, passage in enumerate(passages, start=1):
                file.write(f"{query} Q0 {passage} {rank} {9 - rank} hand\n")
    return tmp_path


def test_pages_and_passages_in_one_table(prepared: pathlib.Path):
    succeed(
        *("evaluate", *gin(DATA_DIR=prepared / "data", COLLECTION="k", RUNS_DIR=prepared / "runs")),
        *gin(EVAL_OUTPUT_DIR=prepared / "out", SYSTEM="hand"),
        *gin("EvaluationConfig", judge="kilt"),
        *gin(
            "EvaluationConfig",
            measures=["PageRprec", "PageRecall@1", "PageRecall@2", "Rprec", "MRR@10"],
        ),
    )
    result = json.loads((prepared / "out" / "results" / "hand.json").read_text())
    # Pages of q0: 7, 9, 8: half of its set in the first 2; complete at place 2, behind 9. q1: 9, 7:
    # a whole set at once, half of the distinct ones. q2 found nothing.
    # Passages: q0 wants p1 and p2, has p1 among the first 2; q1 wants p2 and p3, has p3 first.
    assert result["tasks"]["fever"] == {
        "metrics": {
            "PageRprec": pytest.approx((0.5 + 1.0) / 3),
            "PageRecall@1": pytest.approx((0.0 + 0.5) / 3),
            "PageRecall@2": pytest.approx((1.0 + 0.5) / 3),
            "Rprec": pytest.approx((0.5 + 0.5) / 3),
            "MRR@10": pytest.approx((0.5 + 1.0) / 3),
        },
        "num_queries": 3,
    }
    [path] = (prepared / "out" / "kilt").glob("*.jsonl")
    gold = gold_path(QuerySet.open(prepared / "data", "k", "fever", "test"))
    ids = [json.loads(line)["id"] for line in gold.read_text().splitlines()]
    found = {
        record["id"]: [one["wikipedia_id"] for one in record["output"][0]["provenance"]]
        for record in map(json.loads, path.read_text().splitlines())
    }
    assert list(found) == ids
    assert found == {"q0": ["7", "9", "8"], "q1": ["9", "7"], "q2": []}


def test_a_task_judged_by_pages_alone(prepared: pathlib.Path):
    lines = (json.dumps(_record(id, outputs)) + "\n" for id, outputs in QUERIES)
    (prepared / "q2.jsonl").write_text("".join(lines))
    succeed(
        *("prepare", *gin(DATA_DIR=prepared / "d2", COLLECTION="k", PASSAGES="p.tsv")),
        *gin(QUERIES={"fever": {"test": "q.jsonl"}, "aida": {"test": "q2.jsonl"}}),
        *gin(SOURCE_DIR=prepared),
        *gin("PrepareOptions", page_gold_tasks=["aida"]),
    )
    run = (prepared / "runs" / "fever.test.trec").read_text()
    (prepared / "runs" / "aida.test.trec").write_text(run)
    out = prepared / "out2"
    succeed(
        *("evaluate", *gin(DATA_DIR=prepared / "d2", COLLECTION="k", RUNS_DIR=prepared / "runs")),
        *gin(EVAL_OUTPUT_DIR=out, SYSTEM="hand"),
        *gin("EvaluationConfig", judge="kilt", measures=["PageRprec", "Rprec"]),
        *gin("EvaluationConfig", page_only_tasks=["aida"]),
    )
    tasks = json.loads((out / "results" / "hand.json").read_text())["tasks"]
    assert tasks["aida"]["metrics"].keys() == {"PageRprec"}
    rprec = tasks["fever"]["metrics"]["Rprec"]
    [average] = [row for row in figures(out) if row["task"] == "average"]
    assert float(average["Rprec"]) == pytest.approx(rprec, abs=1e-6), "over fever alone"
    assert float(average["PageRprec"]) == pytest.approx(0.5, abs=1e-6), "over both"


def test_refusals(prepared: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    evaluate = [
        *("evaluate", *gin(DATA_DIR=prepared / "data", COLLECTION="k", SYSTEM="hand")),
        *gin(RUNS_DIR=prepared / "runs", EVAL_OUTPUT_DIR=prepared / "out"),
    ]
    message = refused(capsys, *evaluate, *gin("EvaluationConfig", page_only_tasks=["fever"]))
    assert "judge by 'kilt' and add PageRprec" in message
    pages = gin("EvaluationConfig", judge="kilt", measures=["PageRprec"])
    absent = gin("EvaluationConfig", page_only_tasks=["aida"])
    assert "no task aida" in refused(capsys, *evaluate, *pages, *absent)
    gold = gold_path(QuerySet.open(prepared / "data", "k", "fever", "test"))
    gold.unlink()
    # Recorded, it would be named as missing.
    (gold.parent / "checksums.txt").unlink()
    message = refused(capsys, *evaluate, *pages)
    assert "task 'fever' was not prepared from KILT's files" in message
