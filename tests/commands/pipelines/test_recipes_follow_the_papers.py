"""What the packaged recipes set, held to what the papers state."""

import json

import pytest
import recipes
from small_world import gin, succeed
from written_files import write_all

from taser_jax.assembly.plans import TrainingConfig
from taser_jax.assembly.validator import PoolConfig
from taser_jax.cli.command_table import COMMANDS
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.batches.stream import BatchingConfig, FalseNegatives, PositiveChoice
from taser_jax.data.collections.store import QuerySet, list_tasks
from taser_jax.models.dual_encoder import DualEncoder
from taser_jax.models.parameters import abstract_params, parameter_count
from taser_jax.retrieval.bm25 import Possessives
from taser_jax.retrieval.mining import AnswerContaining, Excluded
from taser_jax.storage.records import DevelopmentSets
from taser_jax.storage.typed_files import parts_of
from taser_jax.tasks.odqa import ENTITY_TASKS, RELATIONS, TASKS
from taser_jax.training.checkpoints import Selection


def test_tasers_second_negatives_are_the_top_hundred_without_the_gold():
    """TASER, appendix B: "top-100 ranked passages for each question excluding the gold passage"."""
    setting = recipes.value("pipeline taser", "setting", "runs/odqa.gin")
    second = setting.second_mining
    assert (second.depth, second.count) == (100, 100)
    assert (second.excluded, second.answer_containing) == (Excluded.GOLD, AnswerContaining.KEEP)
    # P1 is DPR's: BM25's best without an answer.
    assert setting.first_mining.answer_containing is AnswerContaining.DROP


def batchings(value: object) -> list[BatchingConfig | TaskBatchingConfig]:
    """All that a command's argument says about how batches are drawn."""
    if isinstance(value, BatchingConfig | TaskBatchingConfig):
        return [value]
    if isinstance(value, TrainingConfig) and value.multitask is not None:
        # Training reads this one in place of the other.
        return [value.multitask.batching]
    parts = value if isinstance(value, list | tuple) else (parts_of(value) or {}).values()
    return [each for part in parts for each in batchings(part)]


@pytest.mark.parametrize(
    ("command", "parameters", "recipe"),
    [
        ("train", ["training"], "taser_base"),
        ("train", ["training"], "dpr_base"),
        ("pipeline taser", ["setting"], "odqa"),
        ("pipeline muf", ["setting", "fusion"], "muf_wiki"),
        ("pipeline ance", ["setting", "episodes"], "taco_dr_kilt"),
    ],
)
def test_papers_keep_false_negatives_and_train_on_first_positives(command, parameters, recipe):
    """None of their codes masks a passage of the batch; all train on the first positive."""
    for parameter in parameters:
        configs = batchings(recipes.value(command, parameter, f"runs/{recipe}.gin"))
        assert configs
        choices = {(config.false_negatives, config.positives) for config in configs}
        assert choices == {(FalseNegatives.KEEP, PositiveChoice.FIRST)}


@pytest.mark.parametrize(
    "command", ["compare", *(f"pipeline {name}" for name in ("taser", "ance", "moma", "muf"))]
)
def test_what_a_user_labelled_is_no_negative_unless_a_recipe_is_a_papers(command):
    recipe = COMMANDS[command].gin_file
    # `compare` decides the steps.
    steps = "None" if command == "compare" else "1"
    setting = recipes.value(command, "setting", recipe, TRAIN_STEPS=steps)
    for mining in (setting.first_mining, setting.second_mining):
        assert mining.excluded is Excluded.POSITIVES
    choices = {(config.false_negatives, config.positives) for config in batchings(setting)}
    assert choices == {(FalseNegatives.MASK, PositiveChoice.SAMPLE)}


def test_the_rate_of_the_paper_does_not_stand_beside_the_decay_of_the_code():
    """TASER, appendix C: a rate of 3e-5 or 5e-5 and no decay; its code: 2e-5 and 0.8."""
    training = recipes.value("train", "training", "runs/taser_base.gin")
    assert training.optimizer.learning_rate in (3e-5, 5e-5)
    assert training.optimizer.layer_decay is None


def test_bm25_takes_words_as_lucene_does():
    setting = recipes.value("pipeline taser", "setting", "runs/pipeline_taser.gin")
    assert setting.bm25.possessives is Possessives.STRIP


def test_five_sets_as_the_paper_trains_on_them():
    """TASER, section 4.1 and appendix D."""
    setting = recipes.value("pipeline taser", "setting", "runs/odqa.gin")
    assert tuple(setting.tasks) == TASKS
    # "We combine NQ and TriviaQA development sets for model selection", and for α.
    for chosen in (setting.training.validation, setting.hybrid):
        assert (chosen.tasks, chosen.sets) == (("nq", "trivia"), DevelopmentSets.COMBINED)
    assert setting.training.validation.pool == PoolConfig(10_000, 30, 30)
    assert setting.training.checkpoints.selection is Selection.AVERAGE_RANK
    assert (min(setting.hybrid.alphas), max(setting.hybrid.alphas)) == (0.5, 2.0)
    assert (setting.hybrid.depth, setting.k) == (100, 100)
    assert setting.evaluation.regex_tasks == ("trec",)
    assert setting.training.optimizer.learning_rate in (3e-5, 5e-5)
    questions = sum((58_880, 60_413, 2_474, 1_125, 70_096))
    epochs = setting.training.loop.train_steps * setting.training.batching.batch_size / questions
    assert 39.5 < epochs < 40.5


def test_entity_questions_are_averaged_over_relations():
    assert tuple(recipes.value("evaluate", "tasks", "runs/entity_questions.gin")) == ENTITY_TASKS


def test_selection_of_taco_dr_is_by_the_sum_of_the_tasks_losses():
    setting = recipes.value("pipeline ance", "setting", "runs/taco_dr_kilt.gin")
    assert setting.training.validation.sets is DevelopmentSets.APART
    assert setting.training.checkpoints.selection is Selection.NLL


@pytest.mark.parametrize(
    ("recipe", "total"), [("taser_base", 127_787_520), ("dpr_base", 217_783_296)]
)
def test_recipes_of_papers_have_their_parameter_counts(recipe, total):
    model = DualEncoder(recipes.value("train", "model", f"runs/{recipe}.gin"))
    assert parameter_count(abstract_params(model)) == total


FILES = {"nq": "nq", "trivia": "trivia", "webq": "webq", "trec": "curatedtrec", "squad": "squad1"}


def _passage(number: int) -> dict[str, str]:
    return {"psg_id": str(number), "text": f"It lies on stream{number}.", "title": f"town{number}"}


def _question(number: int) -> dict[str, object]:
    return {"question": f"on which river lies town{number}", "answers": [f"stream{number}"]}


def test_the_collection_has_all_sets_and_relations(tmp_path):
    """Files as DPR's downloader and EntityQuestions leave them, eight questions a training set."""
    rows = ["\t".join(_passage(number).values()) for number in range(40)]
    files = {"wikipedia_split/psgs_w100.tsv": "\n".join(["id\ttext\ttitle", *rows, ""])}
    for name in FILES.values():
        for split, numbers in (("train", range(8)), ("dev", range(8, 16))):
            records = [_question(n) | {"positive_ctxs": [_passage(n)]} for n in numbers]
            files[f"retriever/{name}-{split}.json"] = json.dumps(records)
        lines = ["{question}\t{answers}\n".format(**_question(n)) for n in range(30, 34)]
        files[f"retriever/qas/{name}-test.csv"] = "".join(lines)
    for place, relation in enumerate(RELATIONS):
        files[f"entity_questions/test/P{relation}.test.json"] = json.dumps([_question(place)])
    source, data_dir = write_all(tmp_path / "source", files), tmp_path / "data"
    recipe = "--gin_file=runs/odqa_prepare.gin"
    succeed("prepare", recipe, *gin(DATA_DIR=data_dir, SOURCE_DIR=source))
    tasks = list_tasks(data_dir, "odqa")
    assert set(tasks) == {*TASKS, *ENTITY_TASKS}
    assert len(ENTITY_TASKS) == 24
    for task in TASKS:
        assert set(tasks[task]) == {"train", "validation", "test"}
        assert len(QuerySet.open(data_dir, "odqa", task, "train")) == 8
    assert all(tasks[task] == ["test"] for task in ENTITY_TASKS)
