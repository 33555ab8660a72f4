"""benchmarks/compile_table.py: which rows are kept, and what the table shows of them."""

import json
import pathlib
import subprocess

import pytest
from script_calls import load_script, value
from written_files import write

pytestmark = pytest.mark.slow


benchmark = load_script("compile_table.py")


@pytest.fixture
def compile_row(tmp_path, monkeypatch):
    """Compiles the first row, where `taser compile` ends with a status and may leave a report."""

    def compile_row(status, fits, told):
        def run(arguments, **_):
            output = value(" ".join(arguments), "compile_recipe.output_dir")
            if fits is not None:
                pathlib.Path(output, "report.json").write_text(json.dumps({"fits": fits}))
            return subprocess.CompletedProcess(arguments, status, "", told)

        monkeypatch.setattr(benchmark.subprocess, "run", run)
        benchmark.compile_row(benchmark.ROWS[0], tmp_path, effort="quick", padding="full")

    return compile_row


@pytest.mark.parametrize(
    ("status", "fits", "told", "attempts"),
    [(0, True, "", 1), (2, False, "TrainingConfig.num_chunks=8", 3)],
)
def test_a_step_that_fits_and_one_that_does_not(
    compile_row, tmp_path, status, fits, told, attempts
):
    compile_row(status, fits, told)
    row_file = tmp_path / benchmark.ROWS[0].name / "row.json"
    made = json.loads(row_file.read_text())["attempts"]
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
def test_any_other_end_leaves_no_row(compile_row, tmp_path, status, fits):
    # Of an earlier run, and not of this one.
    report = write(tmp_path / benchmark.ROWS[0].name / "report.json", '{"fits": false}')
    with pytest.raises(SystemExit, match="why"):
        compile_row(status, fits, "why")
    assert not report.with_name("row.json").exists()


def test_a_row_of_the_table(tmp_path):
    row = benchmark.Row("taser", 256, "v5e:2x4")
    attempt = {"num_chunks": 2, "fits": True, "seconds": 60.0}
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
    for name, content in {"row": {"attempts": [attempt]}, "report": report}.items():
        write(tmp_path / row.name / f"{name}.json", json.dumps(content))
    cells = benchmark.markdown(tmp_path).splitlines()[-1].strip("| ").split(" | ")
    expected = "taser 256 v5e:2x4 2 8.00 50% 15.00 1.50 100 7 50.0 131.0 14.3 HBM 39% 35% 10%"
    assert cells == expected.split()
