"""What is kept, what is restored where, and what happens when a checkpoint cannot be written.

Damaged checkpoints are named, set aside, and not resumed from.
"""

import dataclasses
import errno
import functools
import logging
import pathlib
import shutil
import subprocess
import sys
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import toy_loop
from disks import flip
from jax.sharding import NamedSharding, PartitionSpec

from taser_jax.commands.train import restore_initial_params
from taser_jax.devices.mesh import MeshConfig, make_mesh
from taser_jax.storage import checksums
from taser_jax.storage.errors import ConfigError, DataError, FingerprintError, StorageError
from taser_jax.training.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    Selection,
    absolute_path,
    check_whole,
    restore_params_from,
    set_aside_damaged,
)
from taser_jax.training.loop import LoopConfig
from taser_jax.training.state import TrainState

ABOUT = {"data": "abc", "seed": 0}
OPTIMIZER = optax.adam(1e-3)
abstract = functools.partial(jax.tree.map, ocp.utils.to_shape_dtype_struct)


def make_state(value: float = 1.0, *, size: int = 16) -> TrainState:
    kernel = jnp.arange(size * 4, dtype=jnp.float32).reshape(size, 4) * value
    params = {"encoder": {"kernel": kernel, "bias": jnp.full((4,), value)}}
    return TrainState(step=jnp.int32(0), params=params, opt_state=OPTIMIZER.init(params))


def save_all(checkpoints, metrics_by_step):
    for step, metrics in metrics_by_step.items():
        checkpoints.save(make_state(step), step=step, about=ABOUT, metrics=metrics)
        checkpoints.wait()


METRICS = {
    1: {"nll": 3.0, "average_rank": 9.0, "mrr": 0.2},
    2: {"nll": 1.0, "average_rank": 5.0, "mrr": 0.3},
    3: {"nll": 2.0, "average_rank": 2.0, "mrr": 0.9},
    4: {"nll": 4.0, "average_rank": 7.0, "mrr": 0.1},
}


BY_NLL, TWO = CheckpointConfig(), CheckpointConfig(keep_latest=2)
BY_RANK = CheckpointConfig(selection=Selection.AVERAGE_RANK)
BY_MRR = CheckpointConfig(selection=Selection.MRR)
# nll is 1 2 3 4 1 1 2 3.
REPEATED = {step: {"nll": float(step % 5 or 1)} for step in range(1, 9)}
SOME = {1: {"nll": 1.0}, 2: None, 3: {"nll": float("nan")}, 4: None}


@pytest.mark.parametrize(
    ("config", "metrics", "remaining", "best"),
    [
        pytest.param(BY_NLL, METRICS, [2, 4], 2, id="the last and the best by nll"),
        pytest.param(BY_RANK, METRICS, [3, 4], 3, id="by rank"),
        pytest.param(BY_MRR, METRICS, [3, 4], 3, id="by mrr"),
        pytest.param(TWO, REPEATED, [6, 7, 8], 6, id="of equal best ones the latest"),
        pytest.param(BY_NLL, SOME, [1, 4], 1, id="none without metrics as the best"),
        pytest.param(BY_NLL, {1: None, 2: None}, [2], 2, id="the newest where none has any"),
    ],
)
def test_what_is_kept(tmp_path, opened, config, metrics, remaining, best):
    checkpoints = opened(tmp_path, config)
    save_all(checkpoints, metrics)
    assert toy_loop.steps_saved(tmp_path) == remaining
    assert (checkpoints.best_step, checkpoints.latest_step) == (best, max(metrics))
    assert checkpoints.metrics(best) == (metrics[best] or {})


def test_saved_values_are_of_the_step_though_its_buffers_are_donated_at_once(tmp_path, opened):
    """Training overwrites the buffers of a state whose save has only begun."""
    one_more = functools.partial(jax.tree.map, lambda leaf: leaf + 1)
    advance_in_place = jax.jit(one_more, donate_argnums=0)
    state = jax.jit(lambda: make_state(0.0, size=1 << 20))()
    checkpoints = opened(tmp_path, CheckpointConfig(keep_latest=3))
    for step in range(1, 4):
        state = advance_in_place(state)
        checkpoints.save(state, step=step, about=ABOUT)
        for _ in range(4):
            state = advance_in_place(state)
    checkpoints.wait()
    for step in range(1, 4):
        params = checkpoints.restore_params(abstract(state.params), step=step)
        expected = 5 * (step - 1) + 1
        for leaf in jax.tree.leaves(params):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, expected, np.float32))


@pytest.fixture
def saved(tmp_path, opened):
    """Checkpoints, of which step 1 is saved."""
    checkpoints = opened(tmp_path)
    save_all(checkpoints, {1: {"nll": 1.0}})
    return checkpoints


@pytest.mark.parametrize("changed", [{"data": "xyz"}, {"seed": 1}])
def test_other_data_or_seed_is_refused(saved, changed):
    with pytest.raises(FingerprintError, match=rf"(?s)checkpoint_1.*{next(iter(changed))}"):
        saved.restore(abstract(make_state()), step=1, about=ABOUT | changed)


def test_another_optimiser_is_named(saved):
    state = make_state()
    other = dataclasses.replace(state, opt_state=optax.sgd(0.1, momentum=0.9).init(state.params))
    with pytest.raises(ConfigError, match="optimiser"):
        saved.restore(abstract(other), step=1, about=ABOUT)


def test_a_checkpoint_of_another_format_is_refused(saved, monkeypatch):
    monkeypatch.setattr("taser_jax.training.checkpoints.FORMAT_VERSION", 99)
    with pytest.raises(DataError, match=r"(?s)format version 2.*format version 99"):
        saved.restore(abstract(make_state()), step=1, about=ABOUT)


def test_an_empty_directory_has_no_checkpoint(tmp_path, opened):
    checkpoints = opened(tmp_path)
    assert checkpoints.latest_step is checkpoints.best_step is None
    with pytest.raises(ConfigError, match="no finished checkpoint"):
        checkpoints.restore_params(abstract(make_state().params))


def test_an_unfinished_checkpoint_is_ignored_and_removed(saved, tmp_path, opened):
    (tmp_path / "checkpoint_2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    checkpoints = opened(tmp_path)
    assert checkpoints.latest_step == 1
    save_all(checkpoints, {2: {"nll": 0.5}})
    assert toy_loop.steps_saved(tmp_path) == [2]


@pytest.mark.parametrize("direction", ["8 to 1", "1 to 8"])
def test_sharded_and_unsharded_checkpoints_are_the_same(tmp_path, opened, direction):
    many = NamedSharding(make_mesh(MeshConfig(data=1, fsdp=8)), PartitionSpec("fsdp"))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    source, target = (many, single) if direction == "8 to 1" else (single, many)
    params = {"kernel": jnp.arange(64.0).reshape(16, 4)}
    state = TrainState(step=jnp.int32(1), params=params, opt_state=OPTIMIZER.init(params))

    def place(tree, sharding):
        whole = NamedSharding(many.mesh, PartitionSpec()) if sharding is many else sharding
        shardings = jax.tree.map(lambda leaf: sharding if leaf.ndim else whole, tree)
        return jax.device_put(tree, shardings)

    checkpoints = opened(tmp_path)
    checkpoints.save(place(state, source), step=1, about=ABOUT)
    checkpoints.wait()
    like = place(state, target)
    restored = checkpoints.restore(abstract(like), step=1, about=ABOUT)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored.params["kernel"].sharding == target
    alone = checkpoints.restore_params(abstract(like.params), step=1)
    assert alone["kernel"].sharding == target
    np.testing.assert_array_equal(alone["kernel"], params["kernel"])


FULL_DISK = """
import resource, signal, sys
from taser_jax.cli import main as cli

def save(*_):
    import jax, jax.numpy as jnp
    from taser_jax.training.checkpoints import Checkpoints
    from taser_jax.training.state import TrainState
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))
    params = {"a": jax.random.normal(jax.random.key(0), (1000, 1000))}
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(TrainState(jnp.int32(2), params, ()), step=2, about={})
    checkpoints.wait()

cli._execute = save
cli.main(["verify", "."])
"""


def test_a_full_disk_spares_what_is_finished_and_is_told_in_three_lines(saved, tmp_path, opened):
    """A file-size limit fails the very writes a full disk fails, in the saving threads.

    Orbax and TensorStore would add a traceback for each of them.
    """
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    failed = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert failed.returncode == 2
    lines = failed.stderr.splitlines()
    problem = f"error: {tmp_path}: could not save a checkpoint: File too large"
    assert lines[0] == problem, failed.stderr
    assert [line.split(":")[0] for line in lines[1:]] == ["  expected", "  fix"]
    assert "free some space" in lines[2]
    again = opened(tmp_path)
    assert again.latest_step == 1
    restored = again.restore(abstract(make_state()), step=1, about=ABOUT)
    jax.tree.map(np.testing.assert_array_equal, restored, make_state())


def test_a_refusal_of_the_operating_system_is_reported(saved, tmp_path, monkeypatch):
    refuse = unittest.mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(ocp.CheckpointManager, "save", refuse)
    with pytest.raises(StorageError, match=f"(?s){tmp_path}.*a directory you may write to"):
        saved.save(make_state(), step=2, about=ABOUT)


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "model").write_text("not a directory")
    for place in ("model/below", "model"):
        with pytest.raises(StorageError, match="a directory you may write to"):
            Checkpoints(tmp_path / place)


def test_addresses_of_buckets_stay_whole():
    """Path arithmetic must not fold gs:// into gs:/ as pathlib does."""
    model_dir = absolute_path("gs://bucket/model")
    assert str(model_dir / "checkpoint_7") == "gs://bucket/model/checkpoint_7"


DPR = ("query_encoder", "passage_encoder")
Q_SPEC = ("query_encoder_nq", "query_encoder_fever", "passage_encoder")


def tower(seed, size=6):
    draw = functools.partial(jax.random.normal, jax.random.key(seed))
    return {"layers_0": {"kernel": draw((size, 4))}, "bias": draw((4,))}


def write_towers(folder, names):
    """A checkpoint of towers that differ; its path, and the towers."""
    towers = {name: tower(seed) for seed, name in enumerate(names)}
    checkpoints = Checkpoints(folder)
    checkpoints.save(TrainState(jnp.int32(1), towers, {}), step=1, about={})
    checkpoints.close()
    return folder / "checkpoint_1", towers


def abstract_towers(names, size=6):
    return dict.fromkeys(names, abstract(tower(0, size)))


@pytest.mark.parametrize(
    ("have", "want", "sources"),
    [
        (["encoder"], ["encoder"], ["encoder"]),
        (["encoder"], Q_SPEC, ["encoder"] * 3),
        (["encoder"], DPR, ["encoder"] * 2),
        (DPR, Q_SPEC, ["query_encoder", *DPR]),
        (Q_SPEC, Q_SPEC, Q_SPEC),
    ],
)
def test_each_tower_is_a_copy_of_the_nearest_saved_one(tmp_path, have, want, sources):
    checkpoint, params = write_towers(tmp_path, have)
    restored = restore_initial_params(checkpoint, abstract_params=abstract_towers(want))
    assert tuple(restored) == tuple(want)
    for name, source in zip(want, sources, strict=True):
        jax.tree.map(np.testing.assert_array_equal, restored[name], params[source])
    leaves = jax.tree.leaves(restored)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    ("have", "want", "size", "message"),
    [
        (["encoder"], Q_SPEC, 8, r"(?s)encoder/layers_0/kernel has shape \(6, 4\).*\(8, 4\)"),
        (Q_SPEC, ["encoder"], 6, "(?s)parameter encoder/bias has shape None"),
        # A query tower that no task of the model takes is not dropped in silence.
        (Q_SPEC, Q_SPEC[1:], 6, r"query_encoder_nq/bias has shape \(4,\).*"),
        (["passage_encoder"], Q_SPEC, 6, "query_encoder_fever/bias has shape None"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, have, want, size, message):
    checkpoint, _ = write_towers(tmp_path, have)
    with pytest.raises(ConfigError, match=message):
        restore_initial_params(checkpoint, abstract_params=abstract_towers(want, size))


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
