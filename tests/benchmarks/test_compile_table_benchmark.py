"""benchmarks/compile_table.py: which rows are kept, and what the table shows of them."""

import json
import pathlib
import subprocess

import pytest
from script_calls import load_script

pytestmark = pytest.mark.slow


@pytest.fixture
def benchmark():
    return load_script("compile_table.py")


def command(status: int, *, fits: bool | None, told: str = ""):
    """Stands for `taser compile`: ends with a status and leaves a report, or none."""

    def run(arguments, **_):
        output = next(
            each for each in arguments if each.startswith("--gin.compile_recipe.output_dir=")
        )
        if fits is not None:
            path = pathlib.Path(output.partition("=")[2]) / "report.json"
            path.write_text(json.dumps({"fits": fits}))
        return subprocess.CompletedProcess(arguments, status, "", told)

    return run


@pytest.mark.parametrize(
    ("status", "fits", "told", "attempts"),
    [(0, True, "", 1), (2, False, "TrainingConfig.num_chunks=8", 3)],
)
def test_a_step_that_fits_and_one_that_does_not(
    benchmark, tmp_path, monkeypatch, status, fits, told, attempts
):
    row = benchmark.ROWS[0]
    monkeypatch.setattr(benchmark.subprocess, "run", command(status, fits=fits, told=told))
    benchmark.compile_row(row, tmp_path, effort="quick", padding="full")
    made = json.loads((tmp_path / row.name / "row.json").read_text())["attempts"]
    assert [attempt["fits"] for attempt in made] == [fits] * attempts
    assert fits or made[-1]["num_chunks"] == 8


@pytest.mark.parametrize(
    ("status", "fits"),
    [
        # Such as a missing libtpu, or a setting that cannot be: no report is written.
        (2, None),
        (2, True),
        (-6, None),
    ],
)
def test_any_other_end_leaves_no_row(benchmark, tmp_path, monkeypatch, status, fits):
    row = benchmark.ROWS[0]
    (tmp_path / row.name).mkdir()
    # Of an earlier run, and not of this one.
    (tmp_path / row.name / "report.json").write_text('{"fits": false}')
    monkeypatch.setattr(benchmark.subprocess, "run", command(status, fits=fits, told="why"))
    with pytest.raises(SystemExit, match="why"):
        benchmark.compile_row(row, tmp_path, effort="quick", padding="full")
    assert not (tmp_path / row.name / "row.json").exists()


def test_a_row_of_the_table(benchmark, tmp_path):
    row = benchmark.Row("taser", 256, "v5e:2x4")
    directory = tmp_path / row.name
    directory.mkdir()
    attempt = {"num_chunks": 2, "fits": True, "seconds": 60.0}
    (directory / "row.json").write_text(json.dumps({"attempts": [attempt]}))
    report = {
        "memory": {"peak": 8 * 2**30, "hbm": 16 * 2**30},
        "flops": {"model": 10e12, "matrix_products": 15e12, "loop_factor": 2.0},
        "bytes_accessed": 50 * 2**30,
        "collectives": [{"sent": 3.0 * 2**20}, {"sent": 4.0 * 2**20}],
        "roofline": {
            **{"compute": 0.05, "hbm": 0.131, "ici": 0.0143, "bound": "HBM", "mfu": 0.388},
            "mfu_of_real_tokens": 0.352,
        },
        "padding": 0.101,
    }
    (directory / "report.json").write_text(json.dumps(report))
    cells = benchmark.markdown(tmp_path).splitlines()[-1].strip("| ").split(" | ")
    expected = "taser 256 v5e:2x4 2 8.00 50% 15.00 1.50 100 7 50.0 131.0 14.3 HBM 39% 35% 10%"
    assert cells == expected.split()
