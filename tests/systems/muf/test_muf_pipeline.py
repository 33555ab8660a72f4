"""`taser pipeline muf`: its tables, what a rerun reuses, and a specialist that joins later."""

import csv
import itertools
import json
import shutil

import numpy as np
import pytest
from small_world import gin, refused, succeed
from tiny_training import training_config

from taser_jax.commands.pipelines.retrieval_stages import System
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.evaluation.results import per_query_path, read_per_query, read_results
from taser_jax.models.bert_dual_encoder import DualEncoderConfig
from taser_jax.storage.errors import ConfigError
from taser_jax.systems.muf.pipeline import without_each

pytestmark = pytest.mark.slow

SYSTEMS = "{'Summary': @summary/System(), 'Code': @code/System()}"
THREE = "{'Summary': @summary/System(), 'Code': @code/System(), 'Both': @both/System()}"
SINGLES = ["Summary", "Code"]
MODELS = ["Joint"]
ORACLES = ["Oracle indicator", "Oracle Bayesian"]
FUSED = ["MUF", "MUF without the domain", "Equal weights"]


def arguments(world, output_dir, *bindings):
    """Four steps of a tiny model for each system; small ensembles of three."""
    return [
        *("pipeline", "muf", "--gin_file=runs/pipeline_muf.gin"),
        *gin(DATA_DIR=world.data_dir, TOKEN_STORE=world.token_store, OUTPUT_DIR=output_dir),
        *gin("BertConfig", embed_dim=16, num_layers=1, num_heads=2, head_dim=8, mlp_dim=32),
        *gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0),
        *gin(TRAIN_STEPS=4, WARMUP_STEPS=1, BATCH_SIZE=16, TASKS=["summary", "code"]),
        *gin("EvaluationConfig", measures=["R@1", "R@20"]),
        *gin("ValidationConfig", num_batches=1, pool=None),
        *gin("CheckpointConfig", selection="nll"),
        *gin("joint/System", tasks=["summary", "code"], train_steps=8),
        f"--gin.pipeline_muf.specialists={SYSTEMS}",
        "--gin.pipeline_muf.joint={'Joint': @joint/System()}",
        *gin("Fusion", left_out=None, sizes=(2,), oracle="@BayesianConfig()"),
        *gin("FusionConfig", depth=60, k=60),
        *gin("Weighing", k=30),
        *gin("HybridConfig", depth=60, alphas=(0.5, 1.0)),
        *gin("EnsembleConfig", members=3, hidden_dims=(8,)),
        *gin("EnsembleTraining", epochs=2, evaluations=1),
        *gin("ensemble/BatchingConfig", batch_size=16),
        *gin("BayesianConfig", evaluations=6, initial=3),
        *gin("MixedConfig", sets=2, queries=20),
        *bindings,
    ]


@pytest.fixture(scope="module")
def finished(small_world, tmp_path_factory):
    """A finished run; tests read it, or work on a copy."""
    directory = tmp_path_factory.mktemp("muf") / "out"
    succeed(*arguments(small_world, directory))
    return directory


def rows(directory, name):
    with open(directory / f"{name}.csv", newline="") as file:
        return list(dict.fromkeys(line["system"] for line in csv.DictReader(file)))


def values(directory, system, task, measure="R@20"):
    return read_per_query(per_query_path(directory, system, task, "test")).values[measure]


def test_the_papers_tables(finished):
    combined = ["Single, own domain", "Single, best other", "Single, worst"]
    assert rows(finished, "domains") == [*SINGLES, *combined, *MODELS, *FUSED]
    assert rows(finished, "bm25") == [
        "BM25",
        *(f"{name} + BM25" for name in ("Single, own domain", *MODELS, "MUF")),
    ]
    assert rows(finished, "mixed") == [*SINGLES, *MODELS, *FUSED, *ORACLES]
    assert rows(finished, "sizes") == ["MUF, 2 members", "MUF"]


def test_rows_put_together_have_the_values_of_the_rows_they_name(finished):
    for task, single in (("summary", "Summary"), ("code", "Code")):
        own = values(finished, "Single, own domain", task)
        np.testing.assert_array_equal(own, values(finished, single, task))
        # Of two specialists, the best other is the other one.
        [other] = set(SINGLES) - {single}
        best = values(finished, "Single, best other", task)
        np.testing.assert_array_equal(best, values(finished, other, task))
        means = [values(finished, name, task).mean() for name in SINGLES]
        assert values(finished, "Single, worst", task).mean() == min(means)


def test_a_joint_model_without_a_domain_sees_as_many_queries_as_the_others_together():
    model, training = DualEncoderConfig(), training_config(train_steps=9)
    steps = {"a": 1, "b": None, "c": 3}
    systems = {name: System(model, tasks=[name], train_steps=n) for name, n in steps.items()}
    without = without_each(systems, {"Joint": System(model, tasks=["a", "b", "c"])}, training)
    assert {name: (system.tasks, system.train_steps) for name, system in without.items()} == {
        "Joint without a": (["b", "c"], 12),
        "Joint without b": (["a", "c"], 4),
        "Joint without c": (["a", "b"], 10),
    }


@pytest.mark.release
def test_a_domain_is_judged_by_the_joint_model_that_never_saw_it(finished, small_world, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(finished, copy)
    succeed(*arguments(small_world, copy, "--gin.pipeline_muf.leave_one_out=each"))
    for task, single in (("summary", "Summary"), ("code", "Code")):
        for suffix in ("", " + BM25"):
            unseen = values(copy, f"Joint without the domain{suffix}", task)
            of_model = values(copy, f"Joint without {single}{suffix}", task)
            np.testing.assert_array_equal(unseen, of_model)


def test_parameters_count_the_members_that_weigh(finished):
    count = {result.system: result.parameters for result in read_results(finished / "results")}
    # Linear layers from 16 to 8 to 16 numbers.
    member = 16 * 8 + 8 + 8 * 16 + 16
    assert count["Equal weights"] == count["Summary"] + count["Code"]
    assert count["MUF"] == count["Equal weights"] + 2 * 3 * member
    assert count["MUF, 2 members"] == count["Equal weights"] + 2 * 2 * member


def test_the_bayesian_oracle_is_nowhere_behind_the_indicator_that_it_starts_from(finished):
    for mixed, measure in itertools.product(("mix 1", "mix 2"), ("R@1", "R@20")):
        indicator, bayesian = (values(finished / "mixed", name, mixed, measure) for name in ORACLES)
        assert (bayesian >= indicator).all()
    assert not (finished / "per_query" / "Oracle_Bayesian_BM25.code.test.csv").exists()


def test_every_specialist_trains_on_its_own_task(finished):
    trained = {"summary": ["summary"], "code": ["code"], "joint": ["code", "summary"]}
    for name, tasks in trained.items():
        run = json.loads((finished / name / "model" / "run.json").read_text())
        assert sorted(run["batches_per_epoch"]) == tasks
    assert json.loads((finished / "joint" / "model" / "run.json").read_text())["train_steps"] == 8
    assert not (finished / "joint" / "ensemble").exists()


@pytest.mark.release
def test_a_specialist_joins_a_finished_run(finished, small_world, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(finished, copy)
    before = Stages(copy).finished()
    changed = [f"--gin.pipeline_muf.specialists={THREE}", "--gin.Fusion.left_out=Both"]
    changed.append("--gin.both/System.tasks=['summary', 'code']")
    succeed(*arguments(small_world, copy, *changed))
    new = Stages(copy).finished() - before
    assert {name.rsplit("-", 1)[0] for name in new if not name.endswith("-fuse")} == {"both"}
    fused = {name.rsplit("-", 2)[0] for name in new if name.endswith("-fuse")}
    # Without the newcomer it is the fusion there was.
    without = {"muf-without-the-domain", "muf-without-both"}
    ever = {"both", "muf", "equal-weights", "muf-2-members", "oracle-bayesian"}
    assert fused == ever | without
    without = values(copy, "MUF without Both", "code")
    np.testing.assert_array_equal(without, values(finished, "MUF", "code"))
    # Back without it, the tables are the former ones.
    succeed(*arguments(small_world, copy))
    assert (copy / "domains.csv").read_bytes() == (finished / "domains.csv").read_bytes()


@pytest.mark.parametrize(
    ("binding", "words"),
    [
        ("pipeline_muf.specialists={'Code': @code/System()}", "two specialists at least"),
        ("pipeline_muf.specialists={'MUF': @a/System(), 'Code': @code/System()}", "that differ"),
        ("code/System.tasks=None", "specialist 'Code' has no tasks"),
        ("code/System.tasks=['cod']", "System.tasks of 'Code': no task cod"),
        ("Fusion.sizes=(2, 5)", "5 members of an ensemble of 3"),
        ("Fusion.left_out=Nobody", "without 'Nobody' the specialists are Summary, Code"),
        ("Fusion.left_out=Code", "without 'Code' the specialists are Summary"),
        ("EvaluationConfig.measures=['nDCG@10']", "set Setting.hybrid_measure to one of nDCG@10"),
        ("MixedConfig.queries=4000", "2 mixes of 4000 queries; there are of "),
    ],
)
def test_what_cannot_work_is_refused_before_it_runs(binding, words, small_world, tmp_path, capsys):
    directory = tmp_path / "out"
    assert words in refused(capsys, *arguments(small_world, directory, f"--gin.{binding}"))
    assert not (directory / "stages").exists()


def test_joint_models_without_a_domain_need_one_to_train_again():
    model = DualEncoderConfig()
    specialists = {name: System(model, tasks=[name.lower()]) for name in SINGLES}
    with pytest.raises(ConfigError, match="0 joint models, and specialists of summary, code"):
        without_each(specialists, {}, training_config(train_steps=1))
    same = {name: System(model, tasks=["summary"]) for name in SINGLES}
    with pytest.raises(ConfigError, match="1 joint models, and specialists of summary, summary"):
        without_each(same, {"Joint": System(model)}, training_config(train_steps=1))


def test_typed_questions_are_answered_by_all_with_how_sure_each_is(finished, capsys):
    [fusion] = (finished / "fusions").glob("muf-??????")
    questions = ["how to read a file", "mean of numbers"]
    succeed("ask", *gin(FUSION_DIR=fusion, QUESTIONS=questions), "--gin.ask.k=2")
    printed = capsys.readouterr().out
    assert printed.count("? ") == 2
    told = [line for line in printed.splitlines() if line.startswith("   w: ")]
    assert len(told) == 2
    for line in told:
        weights = dict(part.split() for part in line.removeprefix("   w: ").split(", "))
        assert weights.keys() == {"Summary", "Code"}
        assert all(0 <= float(w) <= 1 for w in weights.values())
    assert printed.count("  1. ") == printed.count("  2. ") == 2


def test_a_moved_run_answers_with_its_own_specialists(finished, tmp_path, monkeypatch, capsys):
    moved = shutil.copytree(finished, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    [fusion] = moved.glob("fusions/muf-??????")
    asked = gin(FUSION_DIR=fusion.relative_to(tmp_path), QUESTIONS=["mean of numbers"])
    succeed("ask", *asked)
    shutil.rmtree(moved / "summary" / "model")
    assert "specialist 'Summary' has no model" in refused(capsys, "ask", *asked)


def test_asking_needs_a_model_or_a_fusion(capsys, tmp_path):
    assert "or FUSION_DIR" in refused(capsys, "ask", *gin(QUESTIONS=["a"]))
    asked = gin(QUESTIONS=["a"], FUSION_DIR=tmp_path)
    assert "run `taser fuse` first" in refused(capsys, "ask", *asked)
