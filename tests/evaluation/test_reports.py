"""Tables as text, Markdown, CSV and plot, rebuilt from the files of single systems."""

import csv
import dataclasses
import io
import json

import numpy as np
import pytest

from taser_jax.evaluation.metrics import Evaluation
from taser_jax.evaluation.reports import LEGEND, ResultsTable
from taser_jax.evaluation.results import (
    SystemResult,
    TaskResult,
    read_per_query,
    read_results,
    result_path,
    write_per_query,
    write_result,
)
from taser_jax.evaluation.significance import AVERAGE, Comparisons, bootstrap_over_tasks
from taser_jax.storage.errors import ConfigError, DataError

BM25 = SystemResult(
    "BM25",
    {"squad": TaskResult({"R@1": 0.5, "MRR@10": 0.6}, 10), "nq": TaskResult({"R@1": 0.25}, 1234)},
)
TASER = SystemResult(
    "TASER + BM25",
    {
        "squad": TaskResult({"R@1": 0.49961, "MRR@10": 0.7}, 10),
        "nq": TaskResult({"R@1": 0.75, "MRR@10": 1.0}, 1234),
    },
    parameters=127787520,
    fingerprint="abc",
    details={"wall time": "4 min"},
)
TABLE = ResultsTable([BM25, TASER], by_task="R@1")


def test_text_golden():
    assert TABLE.to_text().split("\n") == [
        "Average over 2 tasks",
        "",
        "system         parameters   R@1  MRR@10  wall time",
        "--------------------------------------------------",
        "BM25                    -  37.5       -          -",
        "TASER + BM25  127,787,520  62.5    85.0      4 min",
        "",
        "R@1 by task",
        "",
        "system        squad    nq  average",
        "----------------------------------",
        "BM25           50.0  25.0     37.5",
        "TASER + BM25   50.0  75.0     62.5",
        "",
        LEGEND,
    ]


def test_markdown_golden():
    # 50.0 and 49.961 read the same, so both are the best.
    assert TABLE.to_markdown().split("\n") == [
        "### Average over 2 tasks",
        "",
        "| system | parameters | R@1 | MRR@10 | wall time |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| BM25 | - | 37.5 | - | - |",
        "| TASER + BM25 | 127,787,520 | **62.5** | **85.0** | 4 min |",
        "",
        "### squad (10 queries)",
        "",
        "| system | R@1 | MRR@10 |",
        "| --- | ---: | ---: |",
        "| BM25 | **50.0** | 60.0 |",
        "| TASER + BM25 | **50.0** | **70.0** |",
        "",
        "### nq (1,234 queries)",
        "",
        "| system | R@1 | MRR@10 |",
        "| --- | ---: | ---: |",
        "| BM25 | 25.0 | - |",
        "| TASER + BM25 | **75.0** | **100.0** |",
        "",
        LEGEND,
        "",
    ]


def test_csv_golden():
    lines = list(csv.DictReader(io.StringIO(TABLE.to_csv())))
    assert [(line["system"], line["task"], line["queries"]) for line in lines] == [
        (system, task, queries)
        for system in ("BM25", "TASER + BM25")
        for task, queries in (("squad", "10"), ("nq", "1234"), ("average", ""))
    ]
    assert [line["R@1"] for line in lines[3:]] == ["0.499610", "0.750000", "0.624805"]
    assert lines[2]["MRR@10"] == lines[0]["parameters"] == lines[0]["wall time"] == ""
    assert lines[3]["parameters"] == "127787520"


def test_one_task_is_shown_once():
    squad = {"squad": TaskResult({"R@1": 0.5}, 10)}
    table = ResultsTable([SystemResult("BM25", squad), SystemResult("TASER", squad)])
    assert table.to_text().startswith("squad (10 queries)\n\nsystem")
    assert "by task" not in table.to_text()
    assert table.to_markdown().count("###") == 1


def test_files_are_written_and_names_format_nothing(tmp_path):
    path = TABLE.write(tmp_path / "tables")
    assert path.read_text() == TABLE.to_markdown()
    assert path.with_suffix(".csv").read_text() == TABLE.to_csv()
    tasks = dict.fromkeys(("a|b\n# c", "t"), TaskResult({"R@1": 0.5}, 10))
    lines = ResultsTable([SystemResult("<b>[z](u)", tasks)]).to_markdown().splitlines()
    assert "### a\\|b # c (10 queries)" in lines
    assert "| &lt;b>[z\\](u) | 50.0 |" in lines


def test_a_difference_that_rounding_leaves_outside_its_interval_is_drawn(tmp_path):
    first, second = (
        {"nq": Evaluation(tuple("abcdefghijkl"), {"MRR@10": np.full(12, value)})}
        for value in (0.5, 0.2)
    )
    compared = bootstrap_over_tasks(first, second, ["MRR@10"])[AVERAGE, "MRR@10"]
    assert compared.difference < compared.low
    comparisons = Comparisons("BM25", {("TASER + BM25", AVERAGE, "MRR@10"): compared})
    table = dataclasses.replace(TABLE, comparisons=[comparisons])
    assert table.write(tmp_path).with_suffix(".png").is_file()


def test_tables_of_nothing_are_refused():
    with pytest.raises(DataError, match="0 systems, 0 tasks, 0 measures"):
        ResultsTable([])
    with pytest.raises(DataError, match="by_task = 'P@1'"):
        ResultsTable([BM25], by_task="P@1")


def test_results_read_back_in_the_order_asked_for(tmp_path):
    for result in (TASER, BM25):
        value = json.loads(write_result(tmp_path, result).read_text())
        assert value["format_version"] == 1
        assert value["tasks"]["nq"]["num_queries"] == 1234
        assert value["tasks"]["nq"]["metrics"] == result.tasks["nq"].metrics
    assert result_path(tmp_path, "TASER + BM25").name == "taser-bm25.json"
    assert read_results(tmp_path, ["TASER + BM25", "DPR", "BM25"]) == [TASER, BM25]
    assert read_results(tmp_path) == [BM25, TASER]
    assert ResultsTable(read_results(tmp_path), by_task="R@1").to_csv() == TABLE.to_csv()


def test_a_system_never_takes_anothers_file(tmp_path):
    write_result(tmp_path, TASER)
    write_result(tmp_path, TASER)
    with pytest.raises(
        DataError, match=r"it has the result of system 'TASER \+ BM25'(.|\n)*fix: rename"
    ):
        write_result(tmp_path, SystemResult("TASER (BM25)", {}))
    assert read_results(tmp_path, ["TASER (BM25)", "TASER + BM25"]) == [TASER]
    with pytest.raises(DataError, match="system name"):
        result_path(tmp_path, "+")


def test_rows_of_one_table_are_of_one_split(tmp_path):
    write_result(tmp_path, dataclasses.replace(TASER, split="validation"))
    # Its own row may be evaluated anew, on another split too.
    write_result(tmp_path, TASER)
    of_validation = dataclasses.replace(BM25, split="validation")
    with pytest.raises(
        ConfigError, match=r"'validation', and the row 'TASER \+ BM25' is of 'test'"
    ):
        write_result(tmp_path, of_validation)


NO_NUMBER = '{"format_version": 1, "system": "a", "tasks": {"nq": {"metrics": {"R@1": "x"}}}}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bm25.json", "{}", "format version None"),
        ("bm25.json", '{"format_version": 2}', "format version 2"),
        ("bm25.json", '{"format_version": 1, "system": "BM25"}', "required field 'tasks'"),
        ("bm25.json", NO_NUMBER, r"field 'tasks.*metrics.*a number, got a string"),
        ("values.csv", "", r"not values by query \(header \[\]"),
        ("values.csv", "id,R@1\n", r"not values by query \(header \['id'"),
        ("values.csv", "query_id,R@1\na,1\nb\n", "not values by query"),
        ("values.csv", "query_id,R@1\na,x\n", "could not convert"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        read_per_query(path) if name == "values.csv" else read_results(tmp_path, ["BM25"])


def test_no_results_at_all(tmp_path):
    with pytest.raises(DataError, match="no evaluation result here"):
        read_results(tmp_path)


def test_per_query_values_read_back_exactly(tmp_path):
    values = {"R@1": np.array([1.0, 0.0]), "nDCG@10": np.array([1 / 3, 0.1])}
    evaluation = Evaluation(("a,b", 'c"d'), values)
    assert TaskResult.of(evaluation) == TaskResult(evaluation.averages(), 2)
    path = tmp_path / "per_query.csv"
    write_per_query(path, evaluation)
    read_back = read_per_query(path)
    assert read_back.query_ids == evaluation.query_ids
    np.testing.assert_equal([*read_back.values.items()], [*values.items()])
