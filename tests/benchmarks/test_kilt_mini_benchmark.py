"""The command behind the tables of seven tasks: what it runs, and what it makes of it."""

import csv
import json
import pathlib
from typing import Any

import pytest
import recipes
from bert_checkpoints import write_with_vocabulary
from script_calls import RESULTS, run_script, value
from small_world import SmallWorld, figures, gin, succeed

from taser_jax.optim.multitask import Combiner
from taser_jax.optim.task_gradients import Reduction
from taser_jax.retrieval.mining import AnswerContaining, Excluded

pytestmark = pytest.mark.slow

TASKS = ("squad", "nq_qed", "selqa", "fm2", "climate_fever", "fewrel", "cmu_dog")
# In place of `taser`: values of what is evaluated depend on its name and seed.
TASER = (
    f"{RESULTS}\nTASKS = {TASKS!r}"
    + """
BATCHES = dict.fromkeys(TASKS, 32) | dict(selqa=24)

def measures(*values):
    # Four queries: of the last one the row finds nothing.
    return {"PageRprec": [*values, 0.0], "Rprec": [*(v / 2 for v in values), 0.0]}

if sys.argv[1:3] == ["pipeline", "ance"]:
    out, name, seed = flag("OUTPUT_DIR"), flag("pipeline_ance.name"), int(flag("RANDOM_SEED"))
    tasks = re.findall(r"'(\\w+)'", flags.get("--gin.TASKS", str(TASKS)))
    labels = ["episode-2"]
    if "--gin.pipeline_ance.branch_after" not in flags:
        write(out, "BM25", "test", tasks, measures(0.2, 0.2, 0.2))
        labels = ["warm-up", "episode-1", "episode-2"]
    ahead = (0.1 + 0.01 * seed) * ("t-sage" in name)
    row = measures(0.4 + ahead + 0.1 * seed, 0.4 + ahead, 0.4)
    for label in labels:
        write(out, name + " (" + label + ")", "test", tasks, row)
        os.makedirs(out + "/" + label + "/model", exist_ok=True)
        with open(out + "/" + label + "/model/run.json", "w") as file:
            json.dump({"batch_sizes": BATCHES}, file)
elif sys.argv[1] == "evaluate":
    system = flag("SYSTEM")
    row = measures(*[0.9 - float(system[7:])] * 3)
    write(flag("EVAL_OUTPUT_DIR"), system, "validation", TASKS, row)
"""
)


def run(folder: pathlib.Path, **environment: str) -> list[str]:
    """Runs the benchmark with a stand-in for `taser`; the commands it gave."""
    calls, _ = run_script(
        *("benchmarks/kilt_mini/run.sh", "source", folder / "out", "minilm"),
        folder=folder,
        body=TASER,
        **environment,
    )
    return calls


def table(folder: pathlib.Path, name: str) -> dict[tuple[str, str], list[str]]:
    """(system, seed) -> the row."""
    with open(folder / "out" / f"{name}.csv") as file:
        return {(line[0], line[1]): line[2:] for line in csv.reader(file)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[str]]:
    folder = tmp_path_factory.mktemp("kilt_mini")
    return folder, run(folder, SEEDS="0 2", ROWS="t-sage-2.0 t-sage-0.5 per-task pcgrad")


def test_which_commands_it_gives(ran: tuple[pathlib.Path, list[str]]):
    folder, calls = ran
    names = [call.split()[0] for call in calls]
    assert names[:4] == ["prepare", "tokenize", "tokenize", "tokenize"]
    pipelines = [call for call in calls if call.startswith("pipeline ance")]
    rows = [(value(call, "RANDOM_SEED"), value(call, "pipeline_ance.name")) for call in pipelines]
    per_task = [f"per-task-{task}" for task in TASKS]
    assert rows == [
        *(("0", row) for row in ("naive", "t-sage-2.0", "t-sage-0.5", *per_task, "pcgrad")),
        # The other seed: the rows of the claims, with the temperature of the first one's choice.
        *(("2", row) for row in ("naive", "t-sage-0.5", *per_task)),
    ]
    for call, (seed, name) in zip(pipelines, rows, strict=True):
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
    assert [value(call, "SYSTEM") for call in calls if call.startswith("evaluate")] == [
        "t-sage-2.0",
        "t-sage-0.5",
    ]
    assert calls[-1].startswith("analyze")
    assert "t-sage-0.5/episode-2/model" in calls[-1]


def test_the_tables_have_every_finished_row_and_its_seed(ran: tuple[pathlib.Path, list[str]]):
    folder, _ = ran
    rows = table(folder, "pages")
    assert rows.pop(("system", "seed")) == [*TASKS, "average"]
    naive = {"0": "0.300000", "2": "0.350000"}
    assert {key: row[-1] for key, row in rows.items()} == {
        **{("BM25", seed): "0.150000" for seed in naive},
        **{("Warm-up (BM25 negatives)", seed): mean for seed, mean in naive.items()},
        **{("Naive, first episode", seed): mean for seed, mean in naive.items()},
        **{("Naive multi-task", seed): mean for seed, mean in naive.items()},
        **{("Per-task models", seed): mean for seed, mean in naive.items()},
        ("PCGrad", "0"): "0.300000",
        ("TACO-DR: T-SAGE, temperature 2.0", "0"): "0.350000",
        ("TACO-DR: T-SAGE, temperature 0.5", "0"): "0.350000",
        ("TACO-DR: T-SAGE, temperature 0.5", "2"): "0.410000",
    }
    text = (folder / "out" / "pages.md").read_text()
    # Of 0.30 and 0.35: mean 0.325, standard deviation 0.0354.
    assert "| 32.5 ± 3.5 | 2 |" in text
    assert table(folder, "passages")["BM25", "0"][-1] == "0.075000"
    assert (folder / "out" / "passages.png").read_bytes().startswith(b"\x89PNG")


def test_the_claims_have_effects_with_intervals(ran: tuple[pathlib.Path, list[str]]):
    folder, _ = ran
    text = (folder / "out" / "pages.md").read_text()
    lines = text.split("| claim |")[1].splitlines()[2:]
    claims = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    # Under seed 0 two of four queries gain 0.1, under seed 2 two gain 0.12: 5.5 points on average.
    effect = claims["8. T-SAGE is ahead of the naive sum"].split(" | ")
    assert (effect[1], effect[-1]) == ("+5.5", "2 |")
    low, high = (float(end) for end in effect[2].strip("[]").split(", "))
    # Seven tasks of four queries, of which half gain 0.11: standard error 0.055 / 28 ** 0.5.
    assert (low, high) == pytest.approx((5.5 - 2.04, 5.5 + 2.04), abs=0.3)
    # Differences of 5 and 6 points: t = 11 at one degree of freedom.
    assert effect[5] == "0.058"
    assert claims["PCGrad over naive"].split(" | ")[4:6] == ["-", "-"]
    assert not any("prompts" in claim for claim in claims)
    findings = json.loads((folder / "out" / "claims.json").read_text())
    assert {finding["measure"] for finding in findings} == {"PageRprec", "Rprec"}
    [headline] = [finding for finding in findings if finding["headline"]]
    assert (headline["number"], headline["measure"]) == (8, "PageRprec")
    assert headline["rows"] == "T-SAGE, temperature 0.5, over naive"
    # Zero lies between the ends over two seeds: 5.5 - 12.71 * 0.5 to 5.5 + 12.71 * 0.5.
    assert headline["verdict"] == "undecided"
    assert headline["over_seeds"]["low"] == pytest.approx(5.5 - 12.7062 * 0.5, abs=1e-3)
    assert headline["tasks"] == pytest.approx(dict.fromkeys(TASKS, 5.5))


@pytest.mark.release
def test_its_recipes_start_from_the_pretrained_weights_and_branch(
    small_world: SmallWorld, tmp_path: pathlib.Path
):
    vocabulary = small_world.root / "vocabulary"
    # The recipe takes two of its blocks.
    checkpoint = write_with_vocabulary(tmp_path / "minilm", vocabulary, num_layers=2)

    def run(name: str, *flags: str) -> pathlib.Path:
        succeed(
            *("pipeline", "ance", "--gin_file=runs/kilt_mini_ance.gin", *flags),
            *gin(DATA_DIR=small_world.data_dir, TOKEN_STORE=small_world.token_store),
            *gin("pipeline_ance", name=name),
            *gin(OUTPUT_DIR=tmp_path / name, PRETRAINED=checkpoint),
            *gin("EvaluationConfig", judge="qrels", measures=["R@1"]),
            *gin(WARM_UP_STEPS=1, TRAIN_STEPS=1, WARMUP_STEPS=0),
            *gin("ValidationConfig", num_batches=0),
            *gin("TaskBatchingConfig", total=16),
            # Within the few positions of its model.
            *gin("TrainingConfig", length_buckets=(16,)),
        )
        return tmp_path / name

    def facts(root: pathlib.Path, label: str) -> dict[str, Any]:
        return json.loads((root / label / "model" / "run.json").read_text())

    naive = run("naive")
    assert facts(naive, "warm-up")["pretrained"] == str(checkpoint)
    branch = run(
        "t-sage",
        *("--gin_file=optim/tsage.gin", "--gin_file=runs/kilt_mini_tsage.gin"),
        *gin("pipeline_ance", warm_up_dir=naive, branch_after=1),
        *gin("Episodes", count=1),
    )
    last, branched = facts(naive, "episode-2"), facts(branch, "episode-2")
    assert (last["combiner"], branched["combiner"]) == ("naive", "tsage")
    assert branched["batch_sizes"] == last["batch_sizes"] == {"summary": 8, "code": 8}
    assert [row["system"] for row in figures(branch)] == ["t-sage (episode-2)"] * 3


TSAGE = ("runs/kilt_mini_ance.gin", "optim/tsage.gin", "runs/kilt_mini_tsage.gin")


@pytest.mark.parametrize(
    "recipe", [TSAGE, ("runs/kilt_mini_ance.gin", "optim/pcgrad.gin"), ("runs/taco_dr_kilt.gin",)]
)
def test_every_warm_up_is_the_plain_sum_on_negatives_without_an_answer(recipe: tuple[str, ...]):
    """A run that warms up itself does so as TACO-DR does, not with its episodes' optimiser."""
    setting = recipes.value("pipeline ance", "setting", *recipe)
    # "BM25 negatives (Karpukhin et al.)": no answer in them. Episodes leave out positives alone.
    assert setting.first_mining.answer_containing is AnswerContaining.DROP
    assert setting.second_mining.answer_containing is AnswerContaining.KEEP
    assert setting.second_mining.excluded is Excluded.POSITIVES
    assert setting.second_mining.count == setting.first_mining.count
    warm_up = setting.training
    assert warm_up.multitask.combiner.combiner is Combiner.NAIVE
    assert warm_up.multitask.combiner.reduction is Reduction.SUM
    episodes = recipes.value("pipeline ance", "episodes", *recipe)
    assert episodes[-1].training.multitask.combiner.combiner is not Combiner.NAIVE
