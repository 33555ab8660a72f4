"""Damaged checkpoints are named, set aside, and not resumed from."""

import logging
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
import toy_loop
from disks import flip

from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError, DataError
from taser_jax.training.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    check_whole,
    restore_params_from,
    set_aside_damaged,
)
from taser_jax.training.loop import LoopConfig


def test_damaged_checkpoints_are_named_with_the_one_before(tmp_path):
    toy_loop.run(tmp_path, LoopConfig(train_steps=3, checkpoint_period=1))
    assert checksums.verify(directory=str(tmp_path)) > 15
    for step, name in ((3, "state/manifest.ocdbt"), (2, "state/_METADATA")):
        (tmp_path / f"checkpoint_{step}" / name).unlink()
        with pytest.raises(DataError, match=rf"(?s){name}: .*missing.*checkpoint_{step - 1}"):
            restore_params_from(tmp_path / f"checkpoint_{step}", abstract_params={})
    # Also where nothing was recorded.
    (tmp_path / "checkpoint_3" / checksums.FILE).unlink()
    with pytest.raises(DataError, match=r"(?s)manifest\.ocdbt: missing.*checkpoint_2"):
        check_whole(tmp_path / "checkpoint_3")
    assert check_whole(tmp_path / "checkpoint_1") is None


def test_another_directory_is_no_damaged_checkpoint(tmp_path):
    toy_loop.run(tmp_path, LoopConfig(train_steps=2, checkpoint_period=1))
    fixes = {"": "one of this model's checkpoints, such as checkpoint_2", "a": "path"}
    for place, fix in fixes.items():
        (tmp_path / place).mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"(?s)no checkpoint here.*{fix}"):
            restore_params_from(tmp_path / place, abstract_params={})


def test_a_copy_may_have_any_name_beside_the_others(tmp_path):
    toy_loop.run(tmp_path, LoopConfig(train_steps=2, checkpoint_period=1))
    for name in ("checkpoint_best", "my_checkpoint", "checkpoint_2_kept"):
        shutil.copytree(tmp_path / "checkpoint_2", tmp_path / name)
        shapes = {"weight": jax.ShapeDtypeStruct((), jnp.float32)}
        saved = restore_params_from(tmp_path / name, abstract_params=shapes)
        assert saved == restore_params_from(tmp_path / "checkpoint_2", abstract_params=shapes)


@pytest.mark.parametrize("name", ["state/manifest.ocdbt", "state/_METADATA", "about/metadata"])
def test_training_goes_on_from_the_last_whole_checkpoint(tmp_path, name, caplog):
    config = LoopConfig(train_steps=6, checkpoint_period=2)
    undisturbed = toy_loop.run(tmp_path / "a", config)
    toy_loop.run(tmp_path / "b", LoopConfig(train_steps=4, checkpoint_period=2))
    flip(tmp_path / "b" / "checkpoint_4" / name)
    logging.getLogger("taser").propagate = True
    assert set_aside_damaged(tmp_path / "b") == [str(tmp_path / "b" / "damaged_checkpoint_4")]
    assert "DAMAGED CHECKPOINT" in caplog.text
    assert f"{name}: damaged after it was written: other bytes" in caplog.text
    assert "training resumes from checkpoint_2" in caplog.text
    again = toy_loop.run(tmp_path / "b", config)
    assert again.state.params["weight"] == undisturbed.state.params["weight"]
    assert set_aside_damaged(tmp_path / "b") == []
    for step in (2, 4, 6):
        flip(tmp_path / "b" / f"checkpoint_{step}" / "state" / "_METADATA")
    with pytest.raises(DataError, match=r"(?s)checkpoint_6/state/_METADATA.*checkpoint_4"):
        set_aside_damaged(tmp_path / "b")
    assert (tmp_path / "b" / "checkpoint_6").exists()


def test_a_checkpoint_that_had_not_reached_the_disk_is_set_aside(tmp_path):
    """After a power cut it has no record yet, and files without content."""
    toy_loop.run(tmp_path, LoopConfig(train_steps=4, checkpoint_period=2))
    for step in (4, 2):
        checkpoint = tmp_path / f"checkpoint_{step}"
        (checkpoint / checksums.FILE).unlink()
        assert set_aside_damaged(tmp_path) == []
        (checkpoint / "about" / "metadata").write_bytes(b"")
        with pytest.raises(DataError, match="about/metadata: empty, as after a power cut"):
            check_whole(checkpoint)
        if step == 4:
            assert set_aside_damaged(tmp_path) == [str(tmp_path / "damaged_checkpoint_4")]
    # Nothing had been recorded: the training begins again.
    assert set_aside_damaged(tmp_path) == [str(tmp_path / "damaged_checkpoint_2")]


def test_a_checkpoint_is_recorded_before_the_one_that_it_replaces_goes(tmp_path, monkeypatch):
    seal, there = checksums.seal, []

    def noted(path: pathlib.Path) -> None:
        there.append(sorted(checkpoint.name for checkpoint in tmp_path.glob("checkpoint_*")))
        seal(path)

    monkeypatch.setattr(checksums, "seal", noted)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_latest=1))
    for step in (1, 2, 3):
        checkpoints.save(toy_loop.initial_state(), step=step, about=toy_loop.ABOUT)
    checkpoints.close()
    both = [[f"checkpoint_{step - 1}", f"checkpoint_{step}"] for step in (2, 3)]
    assert there == [["checkpoint_1"], *both]
    assert [checkpoint.name for checkpoint in tmp_path.glob("checkpoint_*")] == ["checkpoint_3"]
