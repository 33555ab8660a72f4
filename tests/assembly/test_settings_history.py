"""settings.jsonl: what may change in a model directory, what is refused, and what is kept."""

from __future__ import annotations

import json

import pytest

from taser_jax.assembly.settings_history import check_settings, record_settings
from taser_jax.storage.errors import DataError, FingerprintError

SETTINGS = {
    "model.bert.num_layers": 2,
    "training.loop.train_steps": 300,
    "training.optimizer.learning_rate": 2e-5,
    "training.length_buckets": (8, 16),
    "training.validation.batch_size": 8,
    "data.queries.faq": "a1",
}


def changed(**values):
    return SETTINGS | {name.replace("__", "."): value for name, value in values.items()}


@pytest.fixture
def model_dir(tmp_path):
    record_settings(tmp_path, SETTINGS, step=0)
    return tmp_path


def kept(model_dir):
    lines = (model_dir / "settings.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_same_settings_are_kept_once(model_dir):
    assert check_settings(model_dir, SETTINGS, step=300, accept_changes=False) == {}
    record_settings(model_dir, SETTINGS, step=300)
    (entry,) = kept(model_dir)
    assert entry["after_step"] == 0
    assert entry["settings"]["training.length_buckets"] == [8, 16]


def test_steps_may_change_and_each_change_is_kept(model_dir, caplog):
    longer = changed(training__loop__train_steps=600, training__length_buckets=(16,))
    with caplog.at_level("INFO", logger="taser"):
        changes = check_settings(model_dir, longer, step=300, accept_changes=False)
    assert changes == {
        "training.loop.train_steps": (300, 600),
        "training.length_buckets": ([8, 16], [16]),
    }
    assert "after step 300:\n    training.loop.train_steps: was 300, now 600\n" in caplog.text
    record_settings(model_dir, longer, step=300)
    assert [entry["after_step"] for entry in kept(model_dir)] == [0, 300]


def test_validation_may_be_left_out(model_dir):
    without = {name: v for name, v in SETTINGS.items() if "validation" not in name}
    without["training.validation"] = None
    changes = check_settings(model_dir, without, step=9, accept_changes=False)
    assert changes == {"training.validation.batch_size": (8, "unset")}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (changed(training__optimizer__learning_rate=1e-3), "learning_rate: was 2e-05, now 0.001"),
        (changed(data__queries__faq="b2"), "data.queries.faq: was a1, now b2"),
        (changed(data__queries__news="c3"), "data.queries.news: was unset, now c3"),
    ],
)
def test_the_rest_is_refused_unless_accepted(model_dir, settings, named):
    settings = settings | {"training.loop.train_steps": 400}
    with pytest.raises(FingerprintError) as refused:
        check_settings(model_dir, settings, step=300, accept_changes=False)
    message = str(refused.value)
    assert named in message
    assert "train_steps" not in message
    assert "--gin.train.accept_changes=True" in message
    assert len(check_settings(model_dir, settings, step=300, accept_changes=True)) == 2
    record_settings(model_dir, settings, step=300)
    # What it was begun with may not come back unasked.
    with pytest.raises(FingerprintError):
        check_settings(model_dir, SETTINGS, step=301, accept_changes=False)


def test_another_model_is_never_accepted(model_dir):
    deeper = changed(model__bert__num_layers=3)
    with pytest.raises(FingerprintError, match="num_layers: was 2, now 3") as refused:
        check_settings(model_dir, deeper, step=300, accept_changes=True)
    assert "accept_changes" not in str(refused.value)


def test_settings_that_a_new_version_added_are_no_change(model_dir):
    newer = changed(training__objective__label_smoothing=0.0)
    assert check_settings(model_dir, newer, step=300, accept_changes=False) == {}


def test_settings_that_a_new_version_dropped_are_no_change(model_dir):
    record_settings(model_dir, changed(training__objective__label_smoothing=0.0), step=300)
    assert check_settings(model_dir, SETTINGS, step=300, accept_changes=False) == {}
    several_tasks = changed(training__multitask__batching__total=64)
    record_settings(model_dir, changed(training__multitask=None), step=300)
    with pytest.raises(FingerprintError, match="multitask: was None, now unset"):
        check_settings(model_dir, several_tasks, step=300, accept_changes=False)


def test_a_run_from_step_0_begins_the_history_anew(model_dir):
    record_settings(model_dir, changed(model__bert__num_layers=3), step=0)
    assert [entry["settings"]["model.bert.num_layers"] for entry in kept(model_dir)] == [3]


@pytest.mark.parametrize("text", ["[1]\n", "{}\n", '{"settings": 1}\n', "nothing\n"])
def test_a_file_that_cannot_be_read_is_named(model_dir, text):
    (model_dir / "settings.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"settings\.jsonl"):
        check_settings(model_dir, SETTINGS, step=300, accept_changes=False)
    (model_dir / "settings.jsonl").unlink()
    assert check_settings(model_dir, {}, step=300, accept_changes=False) == {}
