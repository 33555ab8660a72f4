"""`taser pipeline taser` from pretrained weights, with a row for them as they come."""

import json
import pathlib

import pytest
from bert_checkpoints import write_with_vocabulary
from small_world import SmallWorld, figures, gin, refused, succeed

from taser_jax.assembly.model_directory import load_model
from taser_jax.commands.pipelines.stages import Stages
from taser_jax.data.token_store.negatives import negatives_path
from taser_jax.models.parameters import parameter_count


@pytest.fixture
def checkpoint(small_world, tmp_path) -> pathlib.Path:
    """A tiny BERT that knows the small world's words."""
    vocabulary = small_world.root / "vocabulary"
    return write_with_vocabulary(tmp_path / "bert", vocabulary, num_layers=1)


def arguments(world: SmallWorld, output: pathlib.Path, *bindings: str) -> list[str]:
    """SQuAD + NQ's recipe on other data, cut to one system and three steps."""
    return [
        *("pipeline", "taser", "--gin_file=runs/open_qa_pretrained.gin"),
        *gin(DATA_DIR=world.data_dir, TOKEN_STORE=world.token_store, OUTPUT_DIR=output),
        *gin(TRAIN_STEPS=3, BATCH_SIZE=16, WARMUP_STEPS=1),
        *gin("ValidationConfig", num_batches=0),
        *gin("BertConfig", dropout_rate=0.0, attention_dropout_rate=0.0),
        *gin(EVAL_PERIOD=0, CHECKPOINT_PERIOD=100, TASKS=["code"]),
        *gin("EvaluationConfig", judge="qrels"),
        "--gin.pipeline_taser.systems={'Shared': @shared/System()}",
        "--gin.pipeline_taser.hybrid_systems=[]",
        "--gin.pipeline_taser.rounds=1",
        *bindings,
    ]


@pytest.mark.slow
def test_the_untrained_row_stands_beside_the_trained_one(small_world, checkpoint, tmp_path):
    output = tmp_path / "out"
    both = "--gin.pipeline_taser.first_negatives=['BM25', 'Pretrained, untrained']"
    succeed(*arguments(small_world, output, f"--gin.PRETRAINED={checkpoint}", both))
    rows = {line["system"]: line for line in figures(output) if line["task"] == "code"}
    trained = "Shared (negatives of BM25 and Pretrained, untrained)"
    assert list(rows) == ["BM25", "Pretrained, untrained", trained]
    pools = [
        negatives_path(output / label / "negatives", "code", "train").read_text()
        for label in ("bm25", "pretrained-untrained")
    ]
    assert pools[0] != pools[1]
    inputs = Stages(output).record("shared-1-train").inputs
    negatives = [inputs[f"data.negatives_dirs.{place}"] for place in (0, 1)]
    assert negatives == ["bm25/negatives", "pretrained-untrained/negatives"]
    lines = (output / "table.md").read_text().splitlines()
    assert "| none |" in next(line for line in lines if "untrained" in line)
    untrained = load_model(output / "pretrained-untrained" / "model")
    trained = load_model(output / "shared-1" / "model")
    assert (untrained.step, trained.step) == (0, 3)
    assert parameter_count(untrained.params) == parameter_count(trained.params)
    facts = json.loads((output / "shared-1" / "model" / "run.json").read_text())
    assert facts["pretrained"] == str(checkpoint)
    assert "pretrained-untrained-import" in Stages(output).finished()


def test_untrained_systems_need_pretrained_weights(small_world, checkpoint, tmp_path, capsys):
    message = refused(
        capsys,
        *("pipeline", "taser", *gin(DATA_DIR=small_world.data_dir, OUTPUT_DIR=tmp_path / "out")),
        f"--gin.TOKEN_STORE={small_world.token_store}",
        "--gin.pipeline_taser.untrained_systems={'untrained': @taser/System()}",
    )
    assert "no pretrained weights" in message
    given = arguments(small_world, tmp_path / "out", f"--gin.PRETRAINED={checkpoint}")
    for bindings, words in (
        (gin("TrainingConfig", pretrained=None), "PRETRAINED is set, but nothing loads it"),
        (
            gin("pipeline_taser", untrained_systems="{'shared': @untrained/System()}"),
            "give each row its own name",
        ),
        (
            gin("pipeline_taser", first_negatives=["bm25"]),
            "one or more of BM25, Pretrained, untrained",
        ),
    ):
        assert words in refused(capsys, *given, *bindings)
    assert not (tmp_path / "out").exists()
