"""`commands.train.train` on the tiny store and eight devices: what it leaves and refuses."""

import dataclasses
import functools
import json
import shutil
from unittest import mock

import numpy as np
import pytest
import tiny_training
from tiny_models import assert_close, one_block
from written_files import contents, write

from taser_jax.assembly.data import TrainingData
from taser_jax.assembly.model_directory import load_model
from taser_jax.assembly.plans import MultitaskTraining
from taser_jax.assembly.program import training_job
from taser_jax.commands.ask import _served
from taser_jax.data.batches.every_task import TaskBatchingConfig
from taser_jax.data.text.wordpiece import WordPieceVocabulary
from taser_jax.devices.mesh import MeshConfig
from taser_jax.models.batch import Role
from taser_jax.models.dual_encoder import DualEncoder, Towers
from taser_jax.models.parameters import abstract_params, parameter_count
from taser_jax.models.routing import ExpertConfig, GateSharing, Routing
from taser_jax.models.t5_dual_encoder import T5DualEncoderConfig
from taser_jax.optim.optimizers import OptimizerConfig, Update
from taser_jax.storage.artifacts import write_json
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError, StorageError
from taser_jax.training.loop import LoopConfig
from taser_jax.training.objective import ObjectiveConfig

TRAINING = tiny_training.training_config(train_steps=40, evaluation_period=20)
UNEVEN = tiny_training.training_config(train_steps=1, batch_size=12)
changed = functools.partial(dataclasses.replace, TRAINING)
validating = functools.partial(dataclasses.replace, TRAINING.validation)
UNEVEN_VALIDATION = changed(validation=validating(batch_size=12))
AT_THE_END = changed(loop=LoopConfig(train_steps=4, patience=2))
UNVALIDATED = changed(loop=LoopConfig(train_steps=4, validates_first=True), validation=None)
TOO_WIDE = changed(objective=ObjectiveConfig(matryoshka_dims=(8, 32)))
FROZEN = changed(train_from_block=1)
ALL_TRAIN = dataclasses.replace(FROZEN, optimizer=OptimizerConfig(updates=((".*", Update.TRAIN),)))
TWO_BLOCKS = tiny_training.model_config().with_transformer(num_layers=2)
GATE = {"routing": Routing.TOKEN, "gate_sharing": GateSharing.SHARED}
SHARED = dataclasses.replace(TWO_BLOCKS, experts=ExpertConfig(2, blocks=(1, 2), **GATE))
# The checkpoint of the least loss is asked for.
RANKS_ALONE = changed(validation=validating(num_batches=0))


def start(model_dir, store_dir, *, training=TRAINING, **options):
    return tiny_training.start(model_dir, store_dir, training, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_store_dir):
    model_dir = tmp_path_factory.mktemp("trained") / "model"
    summary = start(model_dir, tiny_store_dir, config_text="TRAIN_STEPS = 40")
    return model_dir, summary


def test_it_learns_and_says_what_it_was(trained):
    model_dir, summary = trained
    lines = [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] / 2
    assert summary.validation["nll"] == lines[-1]["validation/nll"] < lines[19]["validation/nll"]
    assert {"nll", "average_rank", "mrr", "mrr/first", "mrr/second"} == summary.validation.keys()
    shapes = abstract_params(DualEncoder(tiny_training.model_config()))
    assert summary.parameters == parameter_count(shapes)
    facts = json.loads((model_dir / "run.json").read_text())
    negatives = "15 = 8 queries x 2 passages - 1, over 8 devices"
    assert facts["negatives_per_query"].startswith(negatives)
    assert (facts["false_negatives"], facts["collection"]) == ("mask", "tiny")
    assert facts["parameters"] == f"{summary.parameters:,}"
    assert (model_dir / "config.gin").read_text() == "TRAIN_STEPS = 40"
    assert f"{summary.parameters:,}" in (model_dir / "model-info.txt").read_text()
    assert (model_dir / "vocabulary" / "vocabulary.json").exists()
    best = load_model(model_dir)
    assert (best.step, best.model.config) == (40, tiny_training.model_config())


def test_another_configuration_is_refused_and_nothing_is_overwritten(
    trained, tiny_store_dir, tmp_path
):
    model_dir, _ = trained
    before = contents(model_dir)
    tiny_training.write_token_store(tmp_path / "other", seed=1)
    fewer = tiny_training.training_config(train_steps=30)
    for dry_run in (True, False):
        options = {"config_text": "", "dry_run": dry_run}
        with pytest.raises(FingerprintError, match=r"data\.queries\.first: was \w+, now \w+"):
            start(model_dir, tmp_path / "other", **options)
        with pytest.raises(ConfigError, match="newest checkpoint is of step 40"):
            start(model_dir, tiny_store_dir, training=fewer, **options)
        with pytest.raises(FingerprintError, match="initial_checkpoint: was False, now True"):
            start(model_dir, tiny_store_dir, initial_checkpoint="m/checkpoint_1", **options)
    assert contents(model_dir) == before


def test_a_dry_run_says_what_a_run_that_resumes_changes(trained, tiny_store_dir, tmp_path, caplog):
    longer = tiny_training.training_config(train_steps=50, evaluation_period=20)
    shutil.copytree(trained[0], tmp_path / "model")
    facts = json.loads((trained[0] / "run.json").read_text())
    facts["settings"]["initial_checkpoint"] = True
    write_json(tmp_path / "model" / "run.json", facts)
    # Where the run resumes, it is not read, and may have moved.
    options = {"initial_checkpoint": "moved/checkpoint_1", "dry_run": True}
    with caplog.at_level("INFO", logger="taser"):
        start(tmp_path / "model", tiny_store_dir, training=longer, **options)
    assert "after step 40:\n    training.loop.train_steps: was 40, now 50" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": {"tasks": ["frist"]}}, "did you mean first"),
        ({"data": {"feature_lengths": {"query": 9, "passage": 16}}}, "query length is 8"),
        ({"training": UNEVEN}, "multiple of 8"),
        ({"initial_checkpoint": "nowhere/checkpoint_1"}, "no checkpoint here"),
        ({"training": TOO_WIDE}, "of a model with 16 dimensions"),
        ({"training": RANKS_ALONE}, "by nll, and validation measures average_rank, mrr"),
        ({"data": {"tasks": []}}, "TASKS: a list without a task"),
        ({"training": changed(states_dir="states")}, "(?s)0 frozen blocks.*directory for states"),
        ({"training": FROZEN}, "1 frozen blocks of 1 leave none"),
        ({"training": changed(train_from_block=-1)}, "-1 frozen blocks"),
        ({"training": ALL_TRAIN, "model": TWO_BLOCKS}, "and OptimizerConfig.updates others"),
        ({"training": FROZEN, "model": SHARED}, "blocks 1 are frozen; their router serves all"),
        ({"training": UNEVEN_VALIDATION}, "12 queries in a batch cannot be split evenly over 8"),
        ({"training": AT_THE_END}, "patience is 2, and nothing is validated before the end"),
        ({"training": UNVALIDATED}, "validates_first is True, and nothing is validated"),
    ],
)
def test_what_cannot_be_trained_is_reported_first(tmp_path, tiny_store_dir, options, words):
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=words):
            start(tmp_path / "model", tiny_store_dir, dry_run=dry_run, **options)


@pytest.mark.parametrize(
    ("of_first", "named", "validated"),
    [
        (("train", "validation"), (), ["first"]),
        (("train", "validation"), ("other",), ["first", "other"]),
        (("train",), (), ["other"]),
    ],
)
def test_tasks_that_are_held_out_choose_no_checkpoint(tmp_path, of_first, named, validated):
    writer = tiny_training.store_writer(tmp_path / "tokens")
    writer.write_passages([[2, 5, 3]] * 9, count=9)
    texts = {"query_ids": ["q"] * 8, "tokens": [[2, 5, 3]] * 8, "positives": [[0]] * 8}
    for task, split in [("other", "validation"), *(("first", split) for split in of_first)]:
        writer.write_queries(task, split, **texts)
    store = writer.finish()
    training = changed(validation=validating(tasks=named))
    data = TrainingData(str(tmp_path / "tokens"))
    job = training_job(tiny_training.model_config(), training, data, store=store)
    assert sorted(job.validation_queries) == validated


def test_every_tasks_batch_stays_as_large_on_another_mesh(tmp_path, tiny_store_dir):
    """24 queries are 12 of each task on four devices and on two; eight devices share 16 and 8."""
    batching = TaskBatchingConfig(total=24, num_negatives=1)
    training = tiny_training.training_config(train_steps=2, validates=False)
    training = dataclasses.replace(training, multitask=MultitaskTraining(batching))

    def run(model_axis):
        mesh = MeshConfig(model=model_axis)
        start(tmp_path, tiny_store_dir, training=dataclasses.replace(training, mesh=mesh))

    run(2)
    run(4)
    sizes = r"batch_sizes.first: was 12, now 16\n +batch_sizes.second: was 12, now 8\n.*"
    with pytest.raises(FingerprintError, match=f"(?s){sizes}a mesh or chunks that cannot share"):
        run(1)


def test_a_dry_run_names_a_damaged_checkpoint(trained, tiny_store_dir, tmp_path):
    shutil.copytree(trained[0], tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "checkpoint_40" / "about")
    with pytest.raises(DataError, match=r"checkpoint_40/about.*: damaged"):
        start(tmp_path / "model", tiny_store_dir, dry_run=True)


def test_an_imported_model_is_not_replaced(tmp_path, tiny_store_dir):
    tiny_training.write_untrained(tmp_path / "model", tiny_training.model_config(), tiny_store_dir)
    before = contents(tmp_path / "model")
    for dry_run in (True, False):
        with pytest.raises(ConfigError, match=r"new MODEL_DIR, with .*=\S+/model/checkpoint_0"):
            start(tmp_path / "model", tiny_store_dir, dry_run=dry_run)
    assert contents(tmp_path / "model") == before


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path, tiny_store_dir):
    write(tmp_path / "other" / "vocabulary" / "vocabulary.json", '{"fingerprint": "b"}')
    checkpoint = str(tmp_path / "other" / "checkpoint_1")
    with pytest.raises(FingerprintError, match="vocabulary"):
        start(tmp_path / "model", tiny_store_dir, initial_checkpoint=checkpoint)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"num_batches": -1}, {"num_negatives": -1}])
def test_impossible_validations_are_refused(change):
    with pytest.raises(ConfigError, match=f"ValidationConfig: {next(iter(change))} is"):
        validating(**change)


def test_a_full_disk_under_the_metrics_is_reported(tmp_path, tiny_store_dir, monkeypatch):
    full = mock.Mock(side_effect=OSError(28, "No space left on device", str(tmp_path / "model")))
    monkeypatch.setattr("taser_jax.commands.train.make_writers", full)
    with pytest.raises(StorageError, match=r"(?s)No space left on device.*free some space"):
        start(tmp_path / "model", tiny_store_dir)


TASKS = ("first", "second")
T5 = one_block(vocab_size=tiny_training.VOCABULARY_SIZE, dropout_rate=0.0)
TIED = {
    "bert": dataclasses.replace(tiny_training.model_config(), experts=ExpertConfig()),
    "t5": T5DualEncoderConfig(t5=T5),
}


def q_spec(config, tasks=TASKS):
    """With a query tower for each task."""
    return dataclasses.replace(config, towers=Towers.SEPARATE, query_tasks=tasks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", pytest.param("t5", marks=pytest.mark.release)])
def test_it_starts_as_the_tied_model_and_validates_every_task(tiny_store_dir, tmp_path, kind):
    tied_dir = tmp_path / "tied"
    start(
        tied_dir,
        tiny_store_dir,
        training=tiny_training.training_config(train_steps=2),
        model=TIED[kind],
    )
    still = tiny_training.training_config(train_steps=2, learning_rate=1e-12)
    begun = {"initial_checkpoint": str(tied_dir / "checkpoint_2"), "training": still}
    summary = start(tmp_path / "q_spec", tiny_store_dir, model=q_spec(TIED[kind]), **begun)
    tied, several = load_model(tied_dir), load_model(tmp_path / "q_spec")
    for tower in several.params.values():
        assert_close(tower, tied.params["encoder"], rtol=1e-7, atol=1e-7)
    validated = json.loads((tied_dir / "metrics.jsonl").read_text().splitlines()[-1])
    # Validation takes each task's tower: as copies they are judged as the tied one was.
    for name, value in summary.validation.items():
        assert value == pytest.approx(validated[f"validation/{name}"], rel=1e-4), name
    tokens = tiny_training.TokenStore.open(tiny_store_dir).passages.tokens(np.arange(8))
    for role, task in ((Role.QUERY, "first"), (Role.QUERY, "second"), (Role.PASSAGE, None)):
        np.testing.assert_allclose(
            several.encode_fn(role, task=task)(tokens), tied.encode_fn(role)(tokens), atol=1e-5
        )


def test_a_task_without_a_tower_is_reported_before_anything_is_computed(tiny_store_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)no query tower for second.*query_tasks: first"):
        start(tmp_path / "model", tiny_store_dir, model=q_spec(TIED["bert"], ("first",)))
    assert not (tmp_path / "model").exists()


def test_it_is_served_with_the_query_tower_of_the_task_asked_for(tiny_store_dir, tmp_path):
    model = q_spec(TIED["bert"]).with_transformer(max_length=64)
    tiny_training.write_untrained(tmp_path / "model", model, tiny_store_dir)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]
    WordPieceVocabulary(pieces).save(str(tmp_path / "model" / "vocabulary"))
    served = _served(tmp_path / "model")
    assert served.tasks == TASKS
    # A request may name none: it is the first's.
    for retriever in (served, served.for_task("second")):
        assert retriever.encode_queries(["a"]).shape == (1, model.embedding_dim)
    with pytest.raises(ConfigError, match=r"(?s)no task 'third'.*tasks: first, second"):
        served.for_task("third")
