"""`taser pipeline taser` from pretrained weights, with a row for them as they come."""

import pathlib

import pytest
from bert_checkpoints import write_with_vocabulary
from small_world import SmallWorld, gin, refused, succeed
from stage_calls import without_work

from taser_jax.commands.pipelines import taser
from taser_jax.commands.pipelines.stages import Stages


@pytest.fixture
def checkpoint(small_world, tmp_path) -> pathlib.Path:
    """A tiny BERT that knows the small world's words."""
    vocabulary = small_world.root / "vocabulary"
    return write_with_vocabulary(tmp_path / "bert", vocabulary, num_layers=1)


def arguments(world: SmallWorld, output: pathlib.Path, *bindings: str) -> list[str]:
    """SQuAD + NQ's recipe on other data, cut to one system."""
    return [
        *("pipeline", "taser", "--gin_file=runs/open_qa_pretrained.gin"),
        *gin(DATA_DIR=world.data_dir, TOKEN_STORE=world.token_store, OUTPUT_DIR=output),
        *gin(TRAIN_STEPS=3, BATCH_SIZE=16, WARMUP_STEPS=1, TASKS=["code"]),
        "--gin.pipeline_taser.systems={'Shared': @shared/System()}",
        "--gin.pipeline_taser.hybrid_systems=[]",
        "--gin.pipeline_taser.rounds=1",
        *bindings,
    ]


def test_the_untrained_row_stands_beside_the_trained_one_and_gives_it_negatives(
    small_world, checkpoint, tmp_path, monkeypatch
):
    rows: list[str] = []
    monkeypatch.setattr(taser, "print_table", lambda _, names, **__: rows.extend(names))
    without_work(monkeypatch)
    both = gin("pipeline_taser", first_negatives=["BM25", "Pretrained, untrained"])
    succeed(*arguments(small_world, tmp_path, f"--gin.PRETRAINED={checkpoint}", *both))
    trained = "Shared (negatives of BM25 and Pretrained, untrained)"
    assert rows == ["BM25", "Pretrained, untrained", trained]
    stages = Stages(tmp_path)
    inputs = stages.record("shared-1-train").inputs
    negatives = [inputs[f"data.negatives_dirs.{place}"] for place in (0, 1)]
    assert negatives == ["bm25/negatives", "pretrained-untrained/negatives"]
    imported = stages.record("pretrained-untrained-import").inputs
    assert imported["pretrained.source"] == str(checkpoint)


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
            "no system bm25",
        ),
    ):
        assert words in refused(capsys, *given, *bindings)
    assert not (tmp_path / "out").exists()
