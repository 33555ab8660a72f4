"""The command behind claims 7, 8 and 10 on the built-in collection."""

import json
import pathlib

import numpy as np
import pytest
import recipes
from script_calls import RESULTS, load_script, run_script, value

from taser_jax.optim.multitask import Combiner

pytestmark = pytest.mark.slow

TASKS = ("summary", "parameter", "example", "code", "see_also", "lookup")
# In place of `taser`: rows whose names say how good they are, with four queries a task.
TASER = (
    f"{RESULTS}\nTASKS = {TASKS!r}"
    + """
VALUES = {"naive": 0.5, "t-sage-2.0": 0.4, "t-sage-0.5": 0.6, "t-sage-0.25": 0.3, "name": 0.7,
          "taser-3-pydocs": 0.6, "taser-3-muf_mini": 0.8}

def measures(value):
    return dict.fromkeys(("nDCG@10", "R@1", "R@20"), [value, value, value, 0.0])

if sys.argv[1:3] == ["pipeline", "ance"]:
    out, name = flag("OUTPUT_DIR"), flag("pipeline_ance.name")
    tasks = re.findall(r"'(\\w+)'", flags.get("--gin.TASKS", str(TASKS)))
    write(out, "BM25", "test", tasks, measures(0.2))
    labels = ["warm-up"]
    if flags.get("--gin.pipeline_ance.episodes") != "[]":
        labels.append("episode-2")
    for label in labels:
        row = measures(VALUES.get(name, 0.5))
        write(out, name + " (" + label + ")", "test", tasks, row)
elif sys.argv[1] == "evaluate":
    system = flag("SYSTEM")
    row = measures(VALUES.get(system, 0.5))
    write(flag("EVAL_OUTPUT_DIR"), system, "validation", ["code"], row)
"""
)


def run(folder: pathlib.Path, **environment: str) -> list[str]:
    """Runs the benchmark with a stand-in for `taser`; the commands it gave."""
    calls, _ = run_script(
        *("benchmarks/pydocs_tasks/run.sh", "shared", folder / "out", "minilm"),
        folder=folder,
        body=TASER,
        **environment,
    )
    return calls


def names(calls: list[str]) -> list[tuple[str, str]]:
    """Seed and row of each pipeline."""
    pipelines = [call for call in calls if call.startswith("pipeline ance")]
    return [(value(call, "RANDOM_SEED"), value(call, "pipeline_ance.name")) for call in pipelines]


def headline(folder: pathlib.Path, part: str, number: int, measure: str) -> dict:
    findings = json.loads((folder / "out" / part / "claims.json").read_text())
    [line] = [
        finding
        for finding in findings
        if finding["number"] == number and finding["measure"] == measure
    ]
    return line


@pytest.mark.release
def test_prompts(tmp_path: pathlib.Path):
    calls = run(tmp_path, PARTS="prompts", SEEDS="0 1")
    kinds = ("none", "marker", "name", "sentence")
    assert names(calls) == [(seed, kind) for seed in "01" for kind in kinds]
    claim = headline(tmp_path, "prompts", 7, "nDCG@10")
    # Three of four queries gain 0.2 in every task.
    assert claim["effect"] == pytest.approx(15.0)
    assert (claim["seeds"], claim["rows"]) == (2, "name over none")


@pytest.mark.release
def test_the_first_seed_chooses_t_sages_temperature(tmp_path: pathlib.Path):
    calls = run(tmp_path, PARTS="tsage", SEEDS="0 3")
    per_task = [f"per-task-{task}" for task in TASKS]
    others = ("pcgrad", "cgd", "gradnorm")
    assert names(calls) == [
        *(("0", row) for row in ("naive", "t-sage-2.0", "t-sage-0.5", "t-sage-0.25")),
        *(("0", row) for row in (*per_task, *others)),
        *(("3", row) for row in ("naive", "t-sage-0.5", *per_task)),
    ]
    branch = next(call for call in calls if "pipeline_ance.name=t-sage-0.5" in call)
    assert value(branch, "pipeline_ance.warm_up_dir").endswith("tsage/seed-0/naive")
    claim = headline(tmp_path, "tsage", 8, "nDCG@10")
    assert (claim["rows"], claim["seeds"]) == ("t-sage-0.5 over naive", 2)
    assert claim["effect"] == pytest.approx(7.5)


@pytest.mark.release
def test_experts_of_two_collections_count_together(tmp_path: pathlib.Path):
    calls = run(tmp_path, PARTS="experts", SEEDS="0 1")
    rows = names(calls)
    assert ("0", "taser-1-pydocs") in rows
    assert ("1", "taser-1-pydocs") not in rows
    claim = headline(tmp_path, "experts", 10, "R@20")
    assert (claim["rows"], claim["seeds"]) == ("taser-3 over shared", 2)
    # 0.1 on three tasks and 0.3 on the fourth, for three of four queries.
    assert claim["effect"] == pytest.approx(100 * 0.75 * (3 * 0.1 + 0.3) / 4)
    assert claim["tasks"] == pytest.approx(
        {"code": 7.5, "example": 7.5, "see_also": 7.5, "cmu_dog": 22.5}
    )


def test_cosines_of_gradients():
    halves = np.array([[[1.0, 0], [0, 2], [-3, 0]], [[1, 0], [0, -1], [-1, 0]]])
    between, of_halves = load_script("pydocs_tasks/gate.py").cosines(halves)
    np.testing.assert_allclose(between, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(of_halves, [1, -1, 1])


@pytest.mark.parametrize("optimizer", ["tsage", "pcgrad", "cgd", "gradnorm"])
def test_what_comes_before_the_branch_is_the_naive_sum(optimizer: str):
    files = ("runs/pydocs_ance.gin", f"optim/{optimizer}.gin")
    assert recipes.value(
        "pipeline ance", "setting", *files
    ).training.multitask.combiner.combiner is (Combiner.NAIVE)
    first, branch = recipes.value("pipeline ance", "episodes", *files)
    assert first.training.multitask.combiner.combiner is Combiner.NAIVE
    assert branch.training.multitask.combiner.combiner is Combiner(optimizer)
    assert (first.training.loop.train_steps, branch.training.loop.train_steps) == (300, 600)
    assert branch.training.optimizer.clip_norm is None


def test_rows_of_several_trainings():
    table = load_script("pydocs_tasks/table.py")
    assert table.row_of("taser-3-muf_mini") == "taser-3"
    assert table.row_of("per-task-see_also") == "per-task"
