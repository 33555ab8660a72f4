"""The commands behind the tables of kilt_mini and of pydocs_tasks: what they run and make of it."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import recipes
from bert_checkpoints import write_with_vocabulary
from script_calls import RESULTS, load_script, run_script, value
from small_world import gin, succeed

from taser_jax.optim.multitask import Combiner
from taser_jax.optim.task_gradients import Reduction
from taser_jax.retrieval.mining import AnswerContaining, Excluded

pytestmark = pytest.mark.slow

KILT_MINI = ("squad", "nq_qed", "selqa", "fm2", "climate_fever", "fewrel", "cmu_dog")
BRANCHES = ("tsage", "pcgrad", "cgd", "gradnorm")
PYDOCS = ("summary", "parameter", "example", "code", "see_also", "lookup")
# In place of `taser`: rows whose names say how good they are; of the last of four queries a row
# finds nothing. Every seed is better by a tenth.
TASER = (
    RESULTS
    + """
VALUES = {"t-sage-2.0": 0.4, "t-sage-0.5": 0.6, "t-sage-0.25": 0.3, "name": 0.7,
          "taser-3-pydocs": 0.6, "taser-3-muf_mini": 0.8}
BATCHES = dict.fromkeys(TASKS, 32) | dict(selqa=24)

def measures(name, seed):
    value = VALUES.get(name, 0.5) + 0.1 * seed
    return dict.fromkeys(("PageRprec", "Rprec", "nDCG@10", "R@1", "R@20"), [value] * 3 + [0.0])

if sys.argv[1:3] == ["pipeline", "ance"]:
    out, name, seed = flag("OUTPUT_DIR"), flag("pipeline_ance.name"), int(flag("RANDOM_SEED"))
    tasks = re.findall(r"'(\\w+)'", flags.get("--gin.TASKS", str(TASKS)))
    labels = ["warm-up", "episode-1", "episode-2"]
    if "--gin.pipeline_ance.branch_after" in flags:
        labels = labels[2:]
    else:
        write(out, "BM25", "test", tasks, measures("", -3))
    for label in labels:
        write(out, name + " (" + label + ")", "test", tasks, measures(name, seed))
        os.makedirs(out + "/" + label + "/model", exist_ok=True)
        with open(out + "/" + label + "/model/run.json", "w") as file:
            json.dump({"batch_sizes": BATCHES}, file)
elif sys.argv[1] == "evaluate":
    write(flag("EVAL_OUTPUT_DIR"), flag("SYSTEM"), "validation", TASKS, measures(flag("SYSTEM"), 0))
"""
)


def run(
    benchmark: str, folder: pathlib.Path, tasks: tuple[str, ...], **environment: str
) -> list[str]:
    """Runs a benchmark with the stand-in for `taser`; the commands it gave."""
    words = (f"benchmarks/{benchmark}/run.sh", "source", folder / "out", "minilm")
    return run_script(*words, folder=folder, body=f"TASKS = {tasks!r}\n{TASER}", **environment)[0]


def pipelines(calls: list[str]) -> dict[tuple[str, str], str]:
    """Seed and row of each pipeline -> its command."""
    return {
        (value(call, "RANDOM_SEED"), value(call, "pipeline_ance.name")): call
        for call in calls
        if call.startswith("pipeline ance")
    }


def headline(directory: pathlib.Path, number: int, measure: str) -> dict[str, Any]:
    findings = json.loads((directory / "claims.json").read_text())
    [line] = (each for each in findings if (each["number"], each["measure"]) == (number, measure))
    return line


@pytest.fixture(scope="module")
def kilt_mini(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    folder = tmp_path_factory.mktemp("kilt_mini")
    rows = "t-sage-2.0 t-sage-0.5 per-task pcgrad"
    return folder, run("kilt_mini", folder, KILT_MINI, SEEDS="0 2", ROWS=rows)


def test_which_commands_kilt_mini_gives(kilt_mini):
    folder, calls = kilt_mini
    names = [call.split()[0] for call in calls]
    assert names[:4] == ["prepare", "tokenize", "tokenize", "tokenize"]
    per_task = [f"per-task-{task}" for task in KILT_MINI]
    given = pipelines(calls)
    assert list(given) == [
        *(("0", row) for row in ("naive", "t-sage-2.0", "t-sage-0.5", *per_task, "pcgrad")),
        # The other seed: the rows of the claims, with the temperature of the first one's choice.
        *(("2", row) for row in ("naive", "t-sage-0.5", *per_task)),
    ]
    for (seed, name), call in given.items():
        assert "--gin_file=runs/kilt_mini_ance.gin" in call
        # Prompts from the warm-up on.
        assert value(call, "TOKEN_STORE").endswith("tokens/kilt_mini_name")
        if name != "naive":
            # The same checkpoint, negatives and batches as the last episode of naive.
            naive = f"{folder}/out/seed-{seed}/naive"
            assert value(call, "pipeline_ance.warm_up_dir") == naive
            assert value(call, "pipeline_ance.branch_after") == "1"
            assert value(call, "Episodes.count") == "1"
        if name.startswith("per-task"):
            # As many queries per step as the task has beside the others.
            queries = "24" if name.endswith("selqa") else "32"
            assert value(call, "TaskBatchingConfig.total") == queries
    evaluated = [value(call, "SYSTEM") for call in calls if call.startswith("evaluate")]
    assert evaluated == ["t-sage-2.0", "t-sage-0.5"]
    assert calls[-1].startswith("analyze")
    assert "t-sage-0.5/episode-2/model" in calls[-1]


def test_the_tables_of_kilt_mini(kilt_mini):
    """Every finished row, and claims with their effects; three of four queries have the value."""
    output = kilt_mini[0] / "out"
    table, claims = (output / "pages.md").read_text().split("\n\n")
    header, _, *lines = table.splitlines()
    assert header == f"| system | {' | '.join(KILT_MINI)} | mean |"
    means = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1] for line in lines}
    # Of 0.375 and 0.525: mean 0.45, standard deviation 0.106.
    naive = "45.0 ± 10.6 |"
    assert means == {
        **{"BM25": "15.0 ± 0.0 |", "Warm-up (BM25 negatives)": naive, "PCGrad": "37.5 |"},
        **{"Naive, first episode": naive, "Naive multi-task": naive, "Per-task models": naive},
        "TACO-DR: T-SAGE, temperature 2.0": "30.0 |",
        "TACO-DR: T-SAGE, temperature 0.5": "52.5 ± 10.6 |",
    }
    assert "| BM25 | 15.0 ± 0.0 |" in (output / "passages.md").read_text()
    assert "| 8. T-SAGE is ahead of the naive sum | +7.5 |" in claims
    assert "| PCGrad over naive | +0.0 |" in claims
    assert "prompts" not in claims
    finding = headline(output, 8, "PageRprec")
    assert (finding["headline"], finding["rows"]) == (True, "T-SAGE, temperature 0.5, over naive")
    assert finding["tasks"] == pytest.approx(dict.fromkeys(KILT_MINI, 7.5))


@pytest.mark.release
@pytest.mark.parametrize(
    ("part", "number", "measure", "rows", "effect"),
    [
        # Three of four queries gain 0.2 in every task.
        ("prompts", 7, "nDCG@10", "name over none", 15.0),
        ("tsage", 8, "nDCG@10", "t-sage-0.5 over naive", 7.5),
        # 0.1 on three tasks and 0.3 on the fourth.
        ("experts", 10, "R@20", "taser-3 over shared", 75 * (3 * 0.1 + 0.3) / 4),
    ],
)
def test_parts_of_pydocs_tasks(tmp_path, part, number, measure, rows, effect):
    """The first seed chooses T-SAGE's temperature and the experts' rate for the other."""
    given = pipelines(run("pydocs_tasks", tmp_path, PYDOCS, PARTS=part, SEEDS="0 3"))
    first = {"tsage": ["t-sage-2.0", "pcgrad"], "experts": ["taser-1-pydocs"]}
    for row in first.get(part, []):
        assert ("0", row) in given
        assert ("3", row) not in given
    if part == "tsage":
        warm_up = value(given["3", "t-sage-0.5"], "pipeline_ance.warm_up_dir")
        assert warm_up.endswith("tsage/seed-3/naive")
    claim = headline(tmp_path / "out" / part, number, measure)
    assert (claim["rows"], claim["seeds"]) == (rows, 2)
    assert claim["effect"] == pytest.approx(effect)
    assert len(claim["tasks"]) == (4 if part == "experts" else 6)


def test_cosines_of_gradients():
    halves = np.array([[[1.0, 0], [0, 2], [-3, 0]], [[1, 0], [0, -1], [-1, 0]]])
    between, of_halves = load_script("pydocs_tasks/gate.py").cosines(halves)
    np.testing.assert_allclose(between, [[1, 0, -1], [0, 1, 0], [-1, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(of_halves, [1, -1, 1])


@pytest.mark.release
def test_the_recipe_of_kilt_mini_starts_from_the_pretrained_weights(small_world, tmp_path):
    vocabulary = small_world.root / "vocabulary"
    checkpoint = write_with_vocabulary(tmp_path / "minilm", vocabulary, num_layers=2)
    succeed(
        *("pipeline", "ance", "--gin_file=runs/kilt_mini_ance.gin"),
        *gin(DATA_DIR=small_world.data_dir, TOKEN_STORE=small_world.token_store),
        *gin(OUTPUT_DIR=tmp_path, STATES_DIR=tmp_path / "states", PRETRAINED=checkpoint),
        *gin("EvaluationConfig", judge="qrels", measures=["R@1"]),
        *gin(WARM_UP_STEPS=1, TRAIN_STEPS=1, WARMUP_STEPS=0),
        *gin("ValidationConfig", num_batches=0),
        *gin("TaskBatchingConfig", total=16),
        # Of its two blocks, and within its few positions.
        *gin("TrainingConfig", train_from_block=1, length_buckets=(16,)),
    )
    first, last = (
        json.loads((tmp_path / label / "model" / "run.json").read_text())
        for label in ("warm-up", "episode-2")
    )
    assert first["pretrained"] == str(checkpoint)
    assert any((tmp_path / "states").iterdir())
    assert (last["combiner"], last["batch_sizes"]) == ("naive", {"summary": 8, "code": 8})


@pytest.mark.parametrize(
    ("recipe", "combiner"),
    [
        (("kilt_mini_ance", "optim/tsage", "kilt_mini_tsage"), Combiner.TSAGE),
        (("kilt_mini_ance", "optim/pcgrad"), Combiner.PCGRAD),
        (("taco_dr_kilt",), Combiner.TSAGE),
        *((("pydocs_ance", f"optim/{combiner}"), Combiner(combiner)) for combiner in BRANCHES),
    ],
)
def test_what_comes_before_the_last_episode_is_the_plain_sum(recipe, combiner):
    """A run that warms up itself does so as TACO-DR does, not with its last episode's optimiser."""
    files = [f"{name}.gin" if "/" in name else f"runs/{name}.gin" for name in recipe]
    setting = recipes.value("pipeline ance", "setting", *files)
    episodes = recipes.value("pipeline ance", "episodes", *files)
    assert setting.training.multitask.combiner.combiner is Combiner.NAIVE
    assert episodes[-1].training.multitask.combiner.combiner is combiner
    if recipe[0] == "pydocs_ance":
        first, branch = (episode.training for episode in episodes)
        assert first.multitask.combiner.combiner is Combiner.NAIVE
        assert (first.loop.train_steps, branch.loop.train_steps) == (300, 600)
        assert branch.optimizer.clip_norm is None
    else:
        assert setting.training.multitask.combiner.reduction is Reduction.SUM
        # "BM25 negatives (Karpukhin et al.)": no answer in them. Episodes drop positives alone.
        first, second = setting.first_mining, setting.second_mining
        assert first.answer_containing is AnswerContaining.DROP
        assert second.answer_containing is AnswerContaining.KEEP
        assert second.excluded is Excluded.POSITIVES
        assert second.count == first.count
